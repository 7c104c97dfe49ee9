"""What a probe may know besides the batch: settings, earlier boundaries, history, evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding, OutcomeKind, Severity, When
from dataproto_audit.fingerprint import frozen
from dataproto_audit.storage import dense

NOTES = ("ranks", "losses")
"""Evidence that is a list of mappings: one of each rank, or mini-batch."""
TABLES = ("sampling", "metrics", "sync_probe", "trainer_checksum", "engine_checksum")
"""Evidence that is a mapping."""
MAX_CELLS = 100_000
"""Cells that a finding lists one by one; of more it lists the rows and counts the cells."""


@dataclass(frozen=True)
class Settings:
    """What the run is configured to do. ``None`` is unknown: checks that need it cannot run."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    adv_estimator: str | None = None
    norm_adv_by_std: bool | None = None
    loss_agg_mode: str | None = None
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None
    use_kl_loss: bool | None = None
    kl_loss_coef: float | None = None
    kl_loss_type: str | None = None
    entropy_coeff: float | None = None
    use_kl_in_reward: bool | None = None
    multi_turn: bool | None = None
    rejection: bool | None = None
    stop_ids: tuple[int, ...] | None = None
    pad_id: int | None = None
    max_response_length: int | None = None
    vocab_size: int | None = None
    world_size: int | None = None
    """Data-parallel ranks that the rows are cut over."""
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    micro_batch_size: int | None = None
    actor_micro_batch_size: int | None = None
    max_token_len: int | None = None
    ppo_epochs: int | None = None
    gamma: float | None = None
    lam: float | None = None
    exact_log_probs: bool | None = None
    """True where engine and trainer are declared to compute bit-equal log-probs."""
    tool_ids: tuple[int, ...] | None = None
    """Ids that only tools write."""
    image_ids: tuple[int, ...] | None = None
    """Ids that stand for pieces of an image."""
    merge_size: int | None = None
    """Image patches in each direction that one image id stands for."""
    log_prob_token: float | None = None
    """Nats that log-probs of one token may differ by; from the precision where it is not set."""
    log_prob_mean: float | None = None
    """The same for the mean over tokens."""
    trainer_dtype: str | None = None
    rollout_dtype: str | None = None
    ref_from_actor: bool | None = None
    """True where actor and reference start from the same weights in the same precision."""
    on_policy: bool | None = None
    """True where every rollout comes from the weights of the step before (no staleness)."""

    @classmethod
    def known(cls) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(f.name for f in fields(cls))

    @property
    def filtered(self) -> bool:
        """True where top-p or top-k leaves tokens out, so that the engine renormalises."""
        return self.top_p not in (None, 1.0) or (self.top_k or -1) > 0

    def factors(self) -> dict[str, int]:
        """Known counts that may explain a wrong size."""
        named = {"n": self.n, "dp": self.world_size, "tp": self.tp_size, "cp": self.cp_size,
                 "sp": self.sp_size}  # fmt: skip
        return {name: value for name, value in named.items() if value and value > 1}


class NotChecked(Exception):
    """Raised through :meth:`Context.skip` and :meth:`Context.unknown`: a probe has no verdict."""

    def __init__(self, kind: OutcomeKind, reason: str) -> None:
        self.kind: OutcomeKind = kind
        self.reason = reason
        super().__init__(f"{kind}: {reason}")


@dataclass
class Context:
    """Where a probe runs. ``evidence`` holds the meta entries of the boundary and what the
    producer passed along; ``history`` maps a metric to its values of earlier steps, oldest first.
    """

    step: int | None
    stage: str
    when: When
    settings: Settings
    evidence: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    """Shared between probes of one step: structures that depend on ids alone."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Fields that break their declaration at this boundary, and how; probes do not read them."""
    model: Any = None
    check: str = ""
    code: str = ""
    severity: Severity = "fail"

    def given(self, name: str) -> Any:
        """What the producer passed along under ``name``; None where it is of another kind than
        documented. A batch's meta entries count too, and may use the name for something else.
        Tensors come as arrays; one without data counts as nothing.
        """
        value = self.evidence.get(name)
        if isinstance(value, Tensor):
            value = None if value.is_meta else dense(value)
        if name in NOTES:
            if not isinstance(value, (list, tuple)):
                return None
            return value if all(isinstance(note, Mapping) for note in value) else None
        return None if name in TABLES and not isinstance(value, Mapping) else value

    def number(self, name: str) -> float | None:
        """The same, where it is a number."""
        value = self.given(name)
        return value if isinstance(value, (int, float)) else None

    def measure(self, name: str, value: float) -> None:
        """Record a metric of this step; it goes to the ``steps`` table and to the history."""
        self.metrics[name] = float(value)

    def skip(self, reason: str) -> NoReturn:
        """Leave the probe: this batch has no such thing (``not_applicable``)."""
        raise NotChecked("not_applicable", reason)

    def unknown(self, reason: str) -> NoReturn:
        """Leave the probe: what a verdict needs is missing (``not_checkable``).

        For what only a look at the batch can tell; what a declaration can tell belongs there.
        """
        raise NotChecked("not_checkable", reason)

    def fail(
        self,
        field: str = "",
        *,
        cells: NDArray[np.bool_] | None = None,
        rows: Sequence[int] | NDArray[np.int64] | None = None,
        code: str = "",
        severity: Severity | None = None,
        stage: str = "",
        expected: str = "",
        actual: str = "",
        evidence: Mapping[str, Any] | None = None,
        causes: Sequence[str] = (),
        hint: str = "",
    ) -> Finding:
        """A finding of this probe. ``cells`` is a bool array ``[rows, columns]`` of bad cells."""
        columns: dict[int, tuple[int, ...]] = {}
        known = dict(evidence or {})
        if cells is not None:
            columns, listed = _by_row(cells)
            if rows is None:
                rows = np.flatnonzero(cells.any(1))
            if not listed:
                known |= {"cells": int(np.count_nonzero(cells)), "cells listed": "none, too many"}
        return Finding(
            code=code or self.code,
            severity=severity or self.severity,
            stage=stage or self.stage,
            check=self.check,
            field=field,
            rows=tuple(int(row) for row in (rows if rows is not None else ())),
            columns=columns,
            expected=expected,
            actual=actual,
            evidence=known,
            causes=tuple(dict.fromkeys(causes)),
            hint=hint,
        )


def _by_row(cells: NDArray[np.bool_]) -> tuple[dict[int, tuple[int, ...]], bool]:
    """Columns of each row with bad cells, or nothing and False where there are too many."""
    if np.count_nonzero(cells) > MAX_CELLS:
        return {}, False
    rows, columns = np.nonzero(cells)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    parts = np.split(columns, starts[1:]) if len(starts) else []
    named = zip(rows[starts].tolist(), parts, strict=True)
    return {row: tuple(part.tolist()) for row, part in named}, True


def group_codes(view: BatchView, ctx: Context) -> tuple[NDArray[np.int64], list[str]]:
    """Integer group of each row by uid, in order of first appearance, and the uids."""
    uids = view.arrays["uid"]
    listed = uids.tolist()
    mark = ("groups", id(uids))
    found = ctx.cache.get(mark)
    if found is None or found[2] != listed:
        same = listed
        if set(map(type, listed)) != {str}:
            same = [uid if isinstance(uid, str) else str(frozen(uid)) for uid in listed]
        number = {uid: place for place, uid in enumerate(dict.fromkeys(same))}
        codes = np.fromiter(map(number.__getitem__, same), np.int64, len(same))
        found = ctx.cache[mark] = (codes, list(number), listed, uids)
    return found[0], found[1]


def group_sizes(view: BatchView, ctx: Context) -> NDArray[np.int64]:
    """Rows of each group of :func:`group_codes`, those that only fill the batch up left out.

    A row that is trained among others of its group counts, whatever flag it bears: the flag is
    what is wrong with it then.
    """
    codes, uids = group_codes(view, ctx)
    filling = filling_rows(view)
    if filling is None:
        counted = codes
    else:
        real = np.bincount(codes[~filling], minlength=len(uids))[codes] > 0
        counted = codes[~(filling & ~(real & _trained(view)))]
    return np.bincount(counted, minlength=len(uids)).astype(np.int64, copy=False)


def _trained(view: BatchView) -> NDArray[np.bool_]:
    """Rows with a trained token ``[rows]``, as far as that is known."""
    mask = view.numpy("response_mask") if "response_mask" in view.tensors else np.zeros((0, 0))
    if mask.ndim != 2 or len(mask) != view.rows:
        return np.zeros(view.rows, np.bool_)
    trained: NDArray[np.bool_] = (mask != 0).any(1)
    return trained


def filling_field(view: BatchView) -> str | None:
    """The field that flags rows which only fill the batch up: ``is_padding`` or ``is_pad``.

    Looked up in the whole batch: dispatch writes the flag, and the rows are what they are in the
    stages before it.
    """
    return next((name for name in ("is_padding", "is_pad") if name in view.whole), None)


def filling_rows(view: BatchView) -> NDArray[np.bool_] | None:
    """Rows that only fill the batch up, ``[rows]``.

    None where there is no such flag (:func:`filling_field`), or not exactly one a row.
    """
    name = filling_field(view)
    if name is None:
        return None
    flags = view.whole.numpy(name).reshape(-1).tolist()
    if len(flags) != view.rows or not all(isinstance(f, (bool, int, float)) for f in flags):
        return None
    return np.array([flag != 0 for flag in flags], np.bool_)


def row_numbers(view: BatchView, name: str) -> NDArray[np.float64] | None:
    """A field with one number a row, as float64 ``[rows]``; None where it is missing or none."""
    if name not in view:
        return None
    try:
        numbers = np.asarray(view.numpy(name)).reshape(-1).astype(np.float64)
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == view.rows and np.isfinite(numbers).all() else None
