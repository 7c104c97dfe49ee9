"""From a batch to the rows of the tables. Columns only: nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dataproto_audit.batch import Array, BatchView, Block
from dataproto_audit.narrow import row_max, row_sum

FieldRow = tuple[Any, ...]
SAMPLED_ROWS = 2
"""Rows whose tokens are written although nothing is wrong with them."""
MAX_TOKENS = 1 << 14
"""Tokens of a step that are written, whole rows only (but at least one)."""
MASKS = ("responses", "response_mask", "attention_mask")


def can_tell_rows(view: BatchView, broken: Mapping[str, str]) -> bool:
    """True when lengths and masks of the rows can be read."""
    return view.rows > 0 and all(view.has(name) and name not in broken for name in MASKS)


class RowReader:
    """The fields of a batch that rows are described by, without the ``broken`` ones."""

    def __init__(self, view: BatchView, broken: Mapping[str, str]) -> None:
        self.view = view
        self.block = Block(view, slice(None))
        self._broken = broken

    def has(self, name: str) -> bool:
        """True when the field is there and is as declared."""
        return name in self.view and name not in self._broken

    def tensor(self, name: str) -> Array | None:
        """A tensor field as ``[rows, response]``, or None."""
        return self.view.numpy(name) if name in self.view.tensors and self.has(name) else None

    @cached_property
    def trained(self) -> Array:
        """Trained tokens of each row."""
        out: Array = row_sum(self.block.mask, np.int32)
        return out

    @cached_property
    def lengths(self) -> Array:
        """Attended response tokens of each row."""
        out: Array = row_sum(self.block.response_attention, np.int32)
        return out

    @cached_property
    def scores(self) -> Array | None:
        """Scalar score of each row: ``score``, else the row sum of the token-level scores."""
        try:
            if self.has("score"):
                return np.array(list(map(float, self.view.numpy("score").tolist())))
        except (TypeError, ValueError):
            pass  # other things than numbers
        tokens = self.tensor("token_level_scores")
        return None if tokens is None else row_sum(tokens, np.float64)

    @cached_property
    def advantage(self) -> Array | None:
        """Mean advantage over the trained tokens of each row."""
        values = self.tensor("advantages")
        if values is None:
            return None
        kept = np.where(self.block.mask, values, 0.0)
        out: Array = row_sum(kept, np.float64) / np.maximum(self.trained, 1)
        return out

    def gap(self, left: str, right: str) -> Array | None:
        """Largest difference of two fields over the trained tokens of each row."""
        a, b = self.tensor(left), self.tensor(right)
        if a is None or b is None:
            return None
        gap = np.abs(a - b)
        gap[~self.block.mask] = 0.0
        out: Array = row_max(gap)
        return out


def short_dtype(view: BatchView, name: str) -> str:
    """``f32``, ``i64``, ``bool``, ``object``: the stored kind of number."""
    tensor = view.tensors.get(name)
    dtype = view.arrays[name].dtype if tensor is None else tensor.dtype
    known = _SHORT.get(dtype)
    if known is None:
        known = str(dtype).removeprefix("torch.")
        for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
            if known.startswith(long):
                known = known.replace(long, short, 1)
                break
        _SHORT[dtype] = known
    return known


_SHORT: dict[Any, str] = {}


def field_row(
    view: BatchView,
    stage: str,
    when: str,
    name: str,
    fingerprint: str,
    known: FieldRow | None = None,
) -> FieldRow:
    """One row of the ``fields`` table: dtype, shape and range of a field at a boundary.

    ``known`` is an earlier row of this field: with the same fingerprint it holds the same rows in
    some order, and is not measured again.
    """
    head = (stage, when, name, short_dtype(view, name))
    tensor = view.tensors.get(name)
    values = view.numpy(name)
    size = len(values) if values.ndim else 0
    if tensor is None or values.dtype.kind not in "biuf":
        shape = ",".join(map(str, values.shape))
        return (*head, f"[{shape}]", size, None, None, None, None, None, None, fingerprint or None)
    shape = ",".join(str(n) if isinstance(n, int) else "*" for n in tensor.shape)
    if known is not None and (*known[3:6], known[-1]) == (head[3], f"[{shape}]", size, fingerprint):
        return (*head, *known[4:])
    low, high, mean, nan, inf, covered = None, None, None, 0, 0, None
    if values.size:
        covered = np.count_nonzero(values) / values.size
        total = _sum(values)
        if total - total != 0.0:  # a NaN or an infinity is in there
            nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
            values = values[np.isfinite(values)]
            total = _sum(values)
    if values.size:
        low = float(np.minimum.reduce(values, axis=None))
        high = float(np.maximum.reduce(values, axis=None))
        mean = total / values.size
    return (*head, f"[{shape}]", size, low, high, mean, nan, inf, covered, fingerprint)


def _sum(values: Array) -> float:
    """Sum in float64; integers are added as such, which is exact and takes no conversion."""
    exact = None if values.dtype.kind in "biu" else np.float64
    return float(np.add.reduce(values, axis=None, dtype=exact))


def rows_columns(
    rows: RowReader, keys: Sequence[str], flags: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """Columns of the ``rows`` table; ``flags`` maps a row key to the codes that named it."""
    view = rows.view
    count, width = view.rows, view.prompt or 0
    uids = view.arrays["uid"].tolist() if rows.has("uid") else ["-"] * count
    if set(map(type, uids)) != {str}:
        uids = [str(uid) for uid in uids]
    reasons = view.arrays["finish_reason"].tolist() if rows.has("finish_reason") else None
    return {
        "row": np.arange(count, dtype=np.int32),
        "row_key": keys,
        "uid": uids,
        "prompt_length": row_sum(rows.block.attended[:, :width], np.int32),
        "response_length": rows.lengths,
        "trained_tokens": rows.trained,
        "score": rows.scores,
        "advantage": rows.advantage,
        "rollout_old_gap_max": rows.gap("rollout_log_probs", "old_log_probs"),
        "old_ref_gap_max": rows.gap("old_log_probs", "ref_log_prob"),
        "finish_reason": reasons,
        "flags": [" ".join(sorted(flags.get(k, ()))) for k in keys] if flags else "",
    }


def groups_columns(rows: RowReader, codes: Any, uids: Sequence[str]) -> dict[str, Any] | None:
    """Columns of the ``groups`` table; None before the rows are scored."""
    scores = rows.scores
    if scores is None or not len(uids):
        return None
    size = np.bincount(codes, minlength=len(uids))
    mean = np.bincount(codes, scores) / size
    square = np.bincount(codes, (scores - mean[codes]) ** 2)
    order = np.argsort(codes, kind="stable")
    start = np.searchsorted(codes[order], np.arange(len(uids)))
    low = np.minimum.reduceat(scores[order], start)
    high = np.maximum.reduceat(scores[order], start)
    advantage = None if rows.advantage is None else np.bincount(codes, rows.advantage) / size
    return {
        "uid": uids,
        "rows": size,
        "score_mean": mean,
        "score_std": np.where(size > 1, np.sqrt(square / np.maximum(size - 1, 1)), np.nan),
        "score_min": low,
        "score_max": high,
        "advantage_mean": advantage,
        "length_mean": np.bincount(codes, rows.lengths) / size,
        "degenerate": low == high,
    }


def tokens_columns(
    rows: RowReader, keys: Sequence[str], flags: Mapping[int, str]
) -> dict[str, Any] | None:
    """Columns of the ``tokens`` table for the rows in ``flags`` (row -> code) and a sample."""
    view, block = rows.view, rows.block
    sampled = [row for row in range(min(SAMPLED_ROWS, view.rows)) if row not in flags]
    chosen = np.array([*flags, *sampled])
    shown = block.response_attention[chosen] | block.mask[chosen]
    fits = np.cumsum(shown.sum(1)) <= MAX_TOKENS
    fits[0] = True
    chosen, shown = chosen[fits], shown[fits]
    order = np.argsort(chosen)
    at, column = np.nonzero(shown[order])
    if not len(at):
        return None
    row = chosen[order][at]

    def cells(name: str) -> Any:
        values = rows.tensor(name)
        return None if values is None else values[row, column]

    listed = row.tolist()
    return {
        "row": row,
        "row_key": [keys[r] for r in listed],
        "column": column,
        "token_id": view.numpy("responses")[row, column],
        "mask": block.mask[row, column],
        "rollout_log_prob": cells("rollout_log_probs"),
        "old_log_prob": cells("old_log_probs"),
        "ref_log_prob": cells("ref_log_prob"),
        "reward": cells("token_level_scores"),
        "advantage": cells("advantages"),
        "flag": [flags.get(r, "") for r in listed],
    }


def rank_rows(stage: str, ranks: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of the ``ranks`` table from the notes of each rank.

    ``bubble`` is what the rank noted (from the order of its micro-batches, in unit costs), else the
    share of the slowest rank's wall time that it did not work.
    """
    listed = list(ranks)
    slowest = max((float(r.get("wall_s") or 0.0) for r in listed), default=0.0)
    rows = []
    for place, note in enumerate(listed):
        wall, bubble = note.get("wall_s"), note.get("bubble")
        if bubble is None and wall is not None and slowest > 0:
            bubble = 1.0 - float(wall) / slowest
        counts = (_count(note.get(name)) for name in ("rows", "tokens"))
        micros, peak = note.get("micro_batches"), _count(note.get("peak_token_sum"))
        micro = len(micros) if isinstance(micros, (list, tuple)) else 0
        rank = int(note.get("rank", place))
        rows.append((stage, rank, *counts, micro, peak, bubble, note.get("cpu_s")))
    return rows


def _count(value: Any) -> int:
    """A number of a rank's note; 0 where the note has none."""
    return int(value) if isinstance(value, (int, float, np.number)) and value == value else 0


def loss_rows(
    recomputed: Iterable[tuple[int, str, float, float | None, float]],
) -> list[tuple[Any, ...]]:
    """Rows of the ``loss`` table from (mini-batch, term, value, normaliser, recomputed)."""
    return [
        (number, term.removesuffix("_loss"), value, normaliser,
         exact, abs(value - exact))
        for number, term, value, normaliser, exact in recomputed
    ]  # fmt: skip
