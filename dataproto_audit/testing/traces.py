"""Traces of simulated steps, healthy or with seeded faults, and models that can score them.

What is wrong in a trace is known, so that a replay or a bisect can be scored. Several faults may be
made in one step: the stages behind each go on from what it left.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import Fault, Truth
from dataproto_audit.testing.faults.scene import Scene
from dataproto_audit.testing.healthy import Boundary, boundaries
from dataproto_audit.testing.layouts import jagged
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.toy_policy import ToyPolicy, prompt_hash

_ON_SIDE = {"after_stage": "after", "before_stage": "before"}
Floats = NDArray[np.float64]


@dataclass
class Written:
    """What was recorded: the truth of each fault, and what the stages behind a fault died of."""

    options: Options
    truths: dict[str, Truth | None] = field(default_factory=dict)
    order: NDArray[np.int64] | None = None
    """Rows before balancing, in the order after it."""
    crash: str = ""

    def row_after(self, row: int) -> int:
        """Where a row of before the balancing is after it."""
        if self.order is None:
            return row
        found = np.flatnonzero(self.order == row)
        return int(found[0]) if len(found) else row


def write_simulated(
    folder: str | Path,
    options: Options | str,
    faults: Iterable[Fault] = (),
    *,
    seed: int = 0,
    steps: int = 1,
    retention: str = "all",
) -> Written:
    """Record ``steps`` simulated steps of ``options`` (or of the base of that name), each with all
    ``faults``, under ``folder/trace``.
    """
    base = BASES[options] if isinstance(options, str) else options
    base = replace(base, seed=base.seed + seed)
    made = Written(base)
    settings = asdict(base.settings())
    with TraceWriter(Path(folder) / "trace", retention=retention, settings=settings) as writer:
        for turn in range(steps):
            step = replace(base, step=base.step + turn)
            writer.begin_step(step.step)
            _record(writer, step, list(faults), turn, made)
            if made.crash:
                return made  # the writer closes the step as broken off
            writer.end_step()
    return made


def _record(
    writer: TraceWriter, options: Options, faults: list[Fault], turn: int, made: Written
) -> None:
    try:
        for b in _faulty(options, faults, turn, made):
            batch = jagged(b.batch) if options.layout == "jagged" else b.batch
            writer.write_boundary(b.stage, batch, when=b.when, evidence=b.evidence)
    except Exception as error:  # noqa: BLE001 - a loud fault: the stages behind it die of it
        made.crash = f"{type(error).__name__}: {error}"


def _faulty(options: Options, faults: list[Fault], turn: int, made: Written) -> Iterator[Boundary]:
    """The boundaries of a step with all faults made at their places."""
    runs: list[Any] = []

    def prepared(run: Any) -> None:
        runs.append(run)
        for fault in faults:
            if fault.where == "start":
                made.truths[fault.name] = fault.apply(Scene(run, None, turn))

    hooks: dict[str, Callable[..., Any]] = {}
    for fault in faults:
        if fault.where in ("sampling", "before_sync"):
            hooks["sampling" if fault.where == "sampling" else "sent"] = fault.apply
            made.truths.setdefault(fault.name, None)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # what NaN and infinity do to the stages behind
        for b in boundaries(options, prepared=prepared, **hooks):
            for fault in faults:
                if (b.stage, b.when) == (fault.stage, _ON_SIDE.get(fault.where, "")):
                    made.truths[fault.name] = fault.apply(Scene(runs[0], b, turn))
            with contextlib.suppress(AttributeError):
                made.order = runs[0].order
            yield b


def toy_scorers(options: Options, *, step: int | None = None) -> Mapping[str, Any]:
    """``policy`` and ``reference`` as functions of (batch, temperature), as a replay takes them.

    They are those of the healthy step: what its trainer should have computed.
    """
    step = options.step if step is None else step
    base = ToyPolicy(options.vocab, temperature=options.temperature, reserved=options.reserved)
    policies = {"policy": base.at(options.step_drift * (step - 1)), "reference": base}
    return {name: _scorer(policy) for name, policy in policies.items()}


def _scorer(policy: ToyPolicy) -> Callable[[BatchView, float], tuple[Floats, Floats]]:
    def score(view: BatchView, temperature: float) -> tuple[Floats, Floats]:
        responses, attention = view.numpy("responses"), view.attention
        if attention is None or view.prompt is None:
            raise ValueError("no attention mask")
        ids = np.clip(responses.astype(np.int64), 0, policy.vocab - 1)
        used = attention[:, : view.prompt] != 0
        hashes = prompt_hash(view.numpy("prompts").astype(np.int64), used)
        return replace(policy, temperature=temperature).score(hashes, ids)

    return score
