"""Faults of the catalogue in a step that was recorded, written as a trace.

A fault that needs what such a step does not have (a policy, notes of ranks, a field) cannot be made
in it. Of what a fault changed, cells that moved by less than the precision of the run are
``blurred``: they are wrong, and no check could tell.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.fingerprint import frozen
from dataproto_audit.probes.noise import HALF_NOISE
from dataproto_audit.testing.faults import Fault, Truth
from dataproto_audit.testing.faults.scene import Scene, unequal
from dataproto_audit.testing.healthy import Boundary
from dataproto_audit.testing.recorded_steps import RecordedStep, boundaries
from dataproto_audit.testing.trace_scoring import (
    EARLY,
    BisectScore,
    after_balance,
    located,
    score_verdict,
)
from dataproto_audit.testing.traces import Written

SIDES = {"after_stage": "after", "before_stage": "before"}
NOISE = 0.08
"""Nats that a log-prob may move by unseen in bfloat16: what a token is allowed (0.05), and what
healthy ones lie apart (0.03)."""
FAR = 1.0
"""Nats that no rounding makes of a single token."""
MOST = 0.75
ROUNDED = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "entropys")
Cells = frozenset[tuple[int, int]]


class NotHere(Exception):
    """The fault cannot be made in this step."""


@dataclass
class Seeded(Written):
    """What was recorded; ``blurred`` are the cells of each fault that no check could tell."""

    blurred: dict[str, Cells] = field(default_factory=dict)


def write_recorded(folder: str | Path, step: RecordedStep, faults: Sequence[Fault] = ()) -> Seeded:
    """Record the step with all ``faults`` under ``folder/trace``.

    Raises :class:`NotHere` where one of them cannot be made in it, or changes nothing.
    """
    run = step.run()
    made = Seeded(run.options)  # type: ignore[arg-type]  # what of it scoring asks for
    settings = asdict(step.settings)
    with (
        TraceWriter(Path(folder) / "trace", retention="all", settings=settings) as writer,
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore")  # what NaN and infinity do to the stages behind
        writer.begin_step(step.step)
        steps = _faulty(boundaries(run), run, faults, made)
        while True:
            try:
                b = next(steps, None)
            except NotHere:
                raise
            except Exception as error:  # noqa: BLE001 - a loud fault: the stages behind it die of it
                made.crash = f"{type(error).__name__}: {error}"
                return made
            if b is None:
                break
            writer.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        writer.end_step()
    lost = [fault.name for fault in faults if fault.name not in made.truths]
    if lost:
        raise NotHere(f"no boundary for {lost[0]}")
    return made


def _faulty(
    healthy: Iterator[Boundary], run: Any, faults: Sequence[Fault], made: Seeded
) -> Iterator[Boundary]:
    for b in healthy:
        for fault in faults:
            if (b.stage, b.when) == (fault.stage, SIDES.get(fault.where, "")):
                _make(fault, b, run, made)
        made.order = run.order
        yield b


def _make(fault: Fault, b: Boundary, run: Any, made: Seeded) -> None:
    before, objects = _fields(b)
    before = {name: tensor.clone() for name, tensor in before.items()}
    try:
        truth = fault.apply(Scene(run, b))
    except Exception as error:  # it asks for what the step does not have
        raise NotHere(f"{type(error).__name__}: {error}") from error
    now, others = _fields(b)
    if objects == others and before.keys() == now.keys() and not any(
        _moved(before[name], now[name]).any() for name in before
    ):  # fmt: skip
        raise NotHere("nothing changed")
    made.truths[fault.name] = truth
    made.blurred[fault.name] = frozenset()
    name, shape = truth.field, None if truth.field not in now else now[truth.field].shape
    told = {(row, column) for row, columns in truth.columns.items() for column in columns}
    if told and name in before and before[name].shape == shape and now[name].is_floating_point():
        gap = (now[name].float() - before[name].float()).abs()
        changed = {(row, column) for row, column in torch.nonzero(gap > 0).tolist()}
        near = changed - told  # by too little to count, but wrong
        if name in ROUNDED:
            near |= {cell for cell in told if gap[cell] <= NOISE}
            near |= _of_rewritten(told, now["response_mask"] != 0)
            if _in_noise(gap, now):
                raise NotHere("within the precision of the run")
        made.blurred[fault.name] = frozenset(near)


def _of_rewritten(told: set[tuple[int, int]], trained: Tensor) -> set[tuple[int, int]]:
    """The other trained cells of rows of which nearly all changed: these are equal by chance, as
    bfloat16 has few values."""
    cells = {(row, column) for row, column in torch.nonzero(trained).tolist()}
    rows = Counter(row for row, _ in told & cells)
    whole = {row for row, n in rows.items() if n >= MOST * int(trained[row].sum())}
    return {(row, column) for row, column in cells - told if row in whole}


def _in_noise(gap: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """True where the change does not show in the mean over tokens, nor as values far outside."""
    mask = tensors["response_mask"] != 0
    usual = float(gap[mask].mean()) <= HALF_NOISE.mean_of(int(mask.sum()))
    return usual and float(gap[mask].max()) <= FAR


def _moved(old: Tensor, new: Tensor) -> Tensor:
    if old.shape != new.shape or old.dtype != new.dtype:
        return torch.ones(1, dtype=torch.bool)
    return unequal(old, new)


def _fields(b: Boundary) -> tuple[dict[str, Tensor], Any]:
    """Tensors, and a mark of everything else; of a batch in any form."""
    view = BatchView.of(b.batch)
    others = {**view.arrays, **{f"meta.{name}": value for name, value in view.meta.items()}}
    return dict(view.tensors), repr((frozen(others), frozen(dict(b.evidence))))


def score_recorded(
    verdict: Mapping[str, Any], faults: Sequence[Fault], made: Seeded
) -> BisectScore:
    """As :func:`~.trace_scoring.score_verdict`, where blurred cells may be named or not."""
    score = score_verdict(verdict, faults, made)
    first = next((f for f in faults if verdict["stage"] in f.stages), None)
    blurred = made.blurred.get(first.name) if first else None
    truth = made.truths.get(first.name) if first else None
    if first is None or truth is None or not blurred or score.rows is None:
        return score
    told = {(int(row), int(column)) for row, column in verdict["tokens"]}
    rows = set(verdict["rows"])
    if first.stage in EARLY and after_balance(str(verdict.get("boundary") or "")):
        order = range(1 << 30) if made.order is None else made.order.tolist()
        told, rows = {(order[row], c) for row, c in told}, {order[row] for row in rows}
    cells = {(row, c) for row, cs in truth.columns.items() for c in cs}
    sure = (cells - blurred) | (told & blurred)
    kept = {row: tuple(c for r, c in sorted(sure) if r == row) for row in {r for r, _ in sure}}
    if not told:
        kept |= {row: truth.columns[row] for row in rows & set(truth.columns) - set(kept)}
    shown = Truth(truth.field, tuple(kept), kept, truth.also)
    said = {"rows": sorted(rows), "tokens": sorted(told), "boundary": ""}
    right, exact = located(said, first, Seeded(made.options, {first.name: shown}))
    return BisectScore(score.faulty, score.stage, right, exact, score.second)
