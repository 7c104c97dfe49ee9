"""Shared prefixes of a batch: which cells score a token after a prefix that other rows share.

A log-prob depends on its prefix alone, so rows that share a prefix must agree on it. This needs
neither a model nor a second log-prob. Cost: one sort of the rows; cells are laid out only as deep
as prefixes are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.fingerprint import Hashes, row_hash
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.noise import Noise
from dataproto_audit.probes.scan import PROMPT_LENGTH, RESPONSE_LENGTH, scan

Index = NDArray[np.int64]

NEEDS = ("prompts", "responses", "attention_mask", "response_mask")
CHUNK = 64
"""Columns that are laid out at once; most prefixes part much earlier."""


@dataclass(frozen=True)
class SharedCells:
    """Cells in shared prefixes, sorted so that equal (prefix, token) pairs are adjacent.

    ``row``, ``column`` and ``prefix`` have one entry per cell; ``start`` is the first cell of each
    distinct (prefix, token) pair.
    """

    row: Index
    column: Index
    prefix: Index
    start: Index

    def sizes(self) -> Index:
        """Cells of each (prefix, token) pair."""
        return np.diff(self.start, append=len(self.row))

    @cached_property
    def prefix_of_pair(self) -> Index:
        """The prefix of each (prefix, token) pair, ascending."""
        return self.prefix[self.start]

    @cached_property
    def prefixes(self) -> tuple[Index, NDArray[np.bool_]]:
        """The first pair of each prefix, and whether distinct tokens follow that prefix."""
        starts = np.flatnonzero(np.diff(self.prefix_of_pair, prepend=-1))
        return starts, np.diff(starts, append=len(self.start)) > 1


def shared_cells(view: BatchView, ctx: Context) -> SharedCells:
    """The structure of this batch, computed once per step: rows that moved take it along."""
    read = [view.tensors[name] for name in NEEDS if name in view.tensors]
    mark = ("trie", *map(id, read))
    tracked = not any(tensor.is_inference() for tensor in read)
    versions = tuple(tensor._version for tensor in read) if tracked else None
    found = ctx.cache.get(mark)
    if found is None or not tracked or found[1] != versions:
        cells, rows = _moved_along(view, ctx.cache.get("trie"))
        ctx.cache["trie"] = cells, rows
        found = ctx.cache[mark] = (cells, versions, read)
    return cast(SharedCells, found[0])


def _moved_along(
    view: BatchView, before: tuple[SharedCells, Hashes] | None
) -> tuple[SharedCells, Hashes]:
    """The structure, from the one ``before`` if its rows are here in any order, and the rows."""
    rows = np.zeros(view.rows, np.uint64)
    for name in NEEDS:
        hashes = row_hash(view.numpy(name)) if name not in view.tensors else view.row_hashes(name)
        rows = rows * np.uint64(0x9E3779B97F4A7C15) + hashes
    if before is not None and len(before[1]) == len(rows):
        cells, old = before
        old_order, order = old.argsort(kind="stable"), rows.argsort(kind="stable")
        if np.array_equal(old[old_order], rows[order]):
            place = np.empty(len(rows), np.int64)
            place[old_order] = order
            return replace(cells, row=place[cells.row]), rows
    return _build(view), rows


def spreads(
    cells: SharedCells, values: NDArray[np.float64], noise: Noise
) -> tuple[NDArray[np.float64], NDArray[np.float64], Index]:
    """Spread of each (prefix, token) pair, its bound, and the pairs that the noise leaves open.

    ``values`` are those of ``cells``, in that order; pairs with values that are not finite do not
    count.
    """
    high = np.maximum.reduceat(values, cells.start)
    low = np.minimum.reduceat(values, cells.start)
    spread = high - low
    spread[~np.isfinite(spread)] = 0.0
    if noise.token is not None:
        bound = noise.token + noise.relative * np.abs(low)
        return spread, bound, np.flatnonzero(spread > bound)
    bound = np.full(len(spread), 4 * noise.mean)
    several = cells.sizes() > 1
    if not several.any() or spread[several].mean() <= 2 * noise.mean_of(int(several.sum())):
        return spread, bound, np.zeros(0, np.int64)
    return spread, bound, np.flatnonzero(spread > bound)


def prefix_sums(cells: SharedCells, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Summed probability of the distinct tokens after each prefix, by ``cells.prefix``."""
    first = np.exp(np.minimum(values[cells.start], 50.0))
    first[~np.isfinite(first)] = 0.0
    return np.bincount(cells.prefix_of_pair, first).astype(np.float64, copy=False)


FAR_SHARE = 0.02
"""Share of the prefixes with a token that is far off in good health, where tokens have no bound."""
FAR = 0.4
"""What such a token adds to a sum: of odds that are exp(1.5) off, tanh(1.5 / 4) = 0.36 at most."""


def largest_sum(noise: Noise) -> float:
    """What rounding may make of a sum of probabilities that is 1."""
    return 1.001 if noise.token is not None else 1.2


def beyond_one(
    cells: SharedCells, values: NDArray[np.float64], noise: Noise
) -> tuple[NDArray[np.float64], Index]:
    """The sums of :func:`prefix_sums`, and the prefixes whose sum the noise leaves open.

    Noise that bounds no single token leaves a few far off. Where no more prefixes are beyond it
    than that explains (one and three standard deviations more than ``FAR_SHARE``: two of eight,
    five of fifty), they are let through up to what one token can do: all tokens of a small
    vocabulary were sampled, so that one is enough.
    """
    total = prefix_sums(cells, values)
    wrong = np.flatnonzero(total > largest_sum(noise))
    if noise.token is None and len(wrong):
        usual = FAR_SHARE * np.count_nonzero(cells.prefixes[1])
        if len(wrong) <= 1 + usual + 3 * usual**0.5:
            wrong = wrong[total[wrong] > largest_sum(noise) + FAR]
    return total, wrong


def contradictions(view: BatchView, ctx: Context, field: str, noise: Noise) -> int | None:
    """How often ``field [B,R]`` contradicts itself over shared prefixes; None if it cannot tell."""
    if any(not view.has(name) or name in ctx.broken for name in NEEDS):
        return None
    cells = shared_cells(view, ctx)
    if not len(cells.start):
        return None
    values = view.numpy(field)[cells.row, cells.column].astype(np.float64)
    beyond = beyond_one(cells, values, noise)[1]
    return len(spreads(cells, values, noise)[2]) + len(beyond)


def _build(view: BatchView) -> SharedCells:
    stats = scan(view, (PROMPT_LENGTH, RESPONSE_LENGTH))
    prompts = view.row_hashes("prompts") * np.uint64(0x9E3779B97F4A7C15)
    prompts += stats["prompt_length"].astype(np.uint64)
    lengths, mask = stats["response_length"], view.numpy("response_mask")
    order, shared = _sorted_rows(prompts, view.numpy("responses"), lengths)
    before = np.concatenate([[-1], shared])  # columns that a row shares with the one before it
    depth = np.maximum(before, np.concatenate([shared, [-1]]))
    deepest = min(int(depth.max(initial=-1)) + 1, mask.shape[1])
    parts = [
        _laid_out(left, min(left + CHUNK, deepest), order, before, depth, lengths, mask)
        for left in range(0, deepest, CHUNK)
    ]
    if not parts:
        none = np.zeros(0, np.int64)
        return SharedCells(none, none, none, none)
    row, column, prefix, pair = (np.concatenate(part) for part in zip(*parts, strict=True))
    return SharedCells(row, column, prefix, np.flatnonzero(np.diff(pair, prepend=-1)))


def _laid_out(
    left: int, right: int, order: Any, before: Any, depth: Any, lengths: Any, mask: Any
) -> tuple[Index, Index, Index, Index]:
    """Row, column, prefix and pair of the shared cells in columns ``left`` to ``right``."""
    some = np.flatnonzero(depth >= left)
    rows, own, columns = order[some], before[some], np.arange(left, right)[:, None]
    used = (mask[rows, left:right].T != 0) & (columns <= depth[some]) & (columns < lengths[rows])
    column, at = np.nonzero(used)
    offset = columns * len(order)
    prefix = np.cumsum(own < columns, axis=1) + offset
    pair = np.cumsum(own <= columns, axis=1) + offset
    return rows[at], column + left, prefix[column, at], pair[column, at]


def _sorted_rows(prompts: Any, responses: Any, lengths: Any) -> tuple[Index, Index]:
    """Rows in lexicographic order, and how many columns each shares with the next one.

    -1 where not even the prompt is the same. Rows are compared as far as they are attended; a few
    columns usually tell all rows apart.
    """
    width = min(CHUNK, responses.shape[1])
    while True:
        keys = np.empty((len(prompts), width + 2), ">u4")
        keys[:, 0], keys[:, 1] = prompts >> np.uint64(32), prompts & np.uint64(0xFFFFFFFF)
        keys[:, 2:] = responses[:, :width]
        order = keys.view(f"S{4 * (width + 2)}").ravel().argsort(kind="stable")
        in_order = keys[order]
        same = np.ones((max(len(keys) - 1, 0), width + 3), bool)
        np.equal(in_order[1:], in_order[:-1], out=same[:, :-1])
        same[:, -1] = False
        ends = lengths[order]
        shared = np.minimum(same.argmin(1) - 2, np.minimum(ends[1:], ends[:-1]))
        shared[shared < 0] = -1
        if width == responses.shape[1] or not (shared == width).any():
            return order, shared
        width = min(4 * width, responses.shape[1])
