"""What explains that a log-prob field contradicts itself over shared prefixes.

Each cause is tested on the one field: it is taken out, or undone, and the prefixes are looked at
again. A cause that no test supports is named after those that one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import row_numbers
from dataproto_audit.probes.noise import Noise
from dataproto_audit.probes.repairs import ONE_COLUMN
from dataproto_audit.probes.trie import SharedCells, beyond_one, spreads

FEW = 0.25
"""Share of the rows that are few."""
CONSTANT = 1e-6
"""Nats between the values of a row that are one value."""
SEVERAL = 3
"""Rows from which a pattern of rows is no coincidence."""


def causes_of(
    view: BatchView,
    cells: SharedCells,
    field: str,
    noise: Noise,
    *,
    bad: Any,
    wrong: int,
    odd: bool,
) -> Iterator[tuple[str, str]]:
    """Causes that fit, the best first, each with what was measured.

    ``bad [B,R]`` are the cells that take part in one of the ``wrong`` contradictions; ``odd`` where
    they are those that differ from others, and not all of them.
    """
    values, mask = view.numpy(field), view.numpy("response_mask") != 0
    zero = (values == 0) & mask
    if (zero & bad).any() and not _left(cells, np.where(zero, np.nan, values), noise):
        causes = zeros(zero, mask)
        yield from ((cause, f"nothing wrong without {int(zero.sum())} zeros") for cause in causes)
    several = mask.sum(1) > 1
    spread = np.where(mask, values, -np.inf).max(1) - np.where(mask, values, np.inf).min(1)
    if several.sum() >= SEVERAL and (spread[several] <= CONSTANT).all():
        yield "sum_not_per_token", f"one value on all tokens of each of {int(several.sum())} rows"
    by = _shift(cells, values, noise, bad) if wrong > 1 else 0
    if by:
        yield "shift", f"nothing wrong after a shift by {by:+d}"
    if _versions_apart(view, cells, values, noise):
        yield "stale_rollout_weights", "rows of one weight version agree with each other"
        yield "stale_prefix_cache", ""
    if _other_order(view, values, mask):
        yield "row_permutation", "values end where other rows end"
    rows = int(bad.any(1).sum())
    if odd and rows <= max(2, FEW * int(mask.any(1).sum())):
        yield "row_outlier", f"{rows} rows take part"


def _versions_apart(view: BatchView, cells: SharedCells, values: Any, noise: Noise) -> bool:
    """True where rows of several weight versions contradict each other, and of one do not."""
    versions = row_numbers(view, "weight_version")
    if versions is None:
        return False
    known = np.unique(versions)
    parts = (np.where((versions == v)[:, None], values, np.nan) for v in known)
    return len(known) > 1 and not any(_left(cells, part, noise) for part in parts)


def _left(cells: SharedCells, whole: Any, noise: Noise, by: int = 0) -> int:
    """Contradictions of ``whole [B,R]``, its columns moved; cells that are NaN do not count."""
    source, width = cells.column - by, whole.shape[1]
    inside = (source >= 0) & (source < width)
    values = whole[cells.row, source.clip(0, width - 1)].astype(np.float64)
    values[~inside] = np.nan
    pair = np.repeat(np.arange(len(cells.start)), cells.sizes())
    filled = np.where(np.isfinite(values), values, -np.inf)
    highest = np.maximum.reduceat(filled, cells.start)
    highest[np.isinf(highest)] = np.nan
    values = np.where(np.isfinite(values), values, highest[pair])
    beyond = beyond_one(cells, values, noise)[1]
    return len(spreads(cells, values, noise)[2]) + len(beyond)


def _shift(cells: SharedCells, values: Any, noise: Noise, bad: Any) -> int:
    """The column shift after which nothing is wrong; 0 where there is none.

    A shift for which no bad cell has a source repairs nothing.
    """
    width = values.shape[1]
    for by in ONE_COLUMN:
        source = cells.column + by
        inside = (source >= 0) & (source < width)
        sees = (inside & bad[cells.row, cells.column]).any()
        if sees and not _left(cells, values, noise, -by):
            return -by
    return 0


def zeros(zero: Any, mask: Any) -> tuple[str, ...]:
    """Causes of exact zeros ``[B,R]`` under a mask, by their place.

    At the start of rows, or at the end of every row, they were moved in; in runs within rows a tool
    wrote them.
    """
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    rows = np.flatnonzero(mask.any(1))
    if len(rows) > 1 and zero[rows, mask[rows].argmax(1)].sum() == zero.sum():
        return ("shift", "placeholder_log_prob")
    ends = zero[rows, last[rows]]
    if ends.sum() == zero.sum():
        late = len(rows) > 1 and bool(ends.all())
        return ("shift", "placeholder_log_prob") if late else ("placeholder_log_prob", "shift")
    runs = np.zeros(zero.shape, bool)
    beside = zero[:, 1:] & zero[:, :-1]
    runs[:, 1:] |= beside
    runs[:, :-1] |= beside
    partly = (mask & ~zero).any(1)
    if 2 * (runs & partly[:, None]).sum() > zero.sum():
        return ("mask_on_tool", "placeholder_log_prob")
    return ("placeholder_log_prob", "mask_on_tool")


def _other_order(view: BatchView, values: Any, mask: Any) -> bool:
    """True where values are 0 as if each row's belonged to another row of the batch."""
    attended = view.numpy("attention_mask")[:, -mask.shape[1] :] != 0
    there = values != 0
    for used in (mask, attended):
        have, want = there.sum(1), used.sum(1)
        if (have != want).sum() >= SEVERAL and np.array_equal(np.sort(have), np.sort(want)):
            return True
    return False
