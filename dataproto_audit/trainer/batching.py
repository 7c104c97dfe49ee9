"""How rows are spread over ranks, mini-batches and micro-batches. Pure functions on lengths.

A length is the number of attended tokens of a row. Everything here runs in the driver, which knows
all lengths, so ranks agree on the number of micro-batches without asking each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import UsageError

Lengths = NDArray[np.int64]
Index = NDArray[np.int64]


def balance(lengths: Lengths, *, ranks: int) -> Index:
    """Permutation after which ``ranks`` contiguous equal chunks hold similar numbers of tokens.

    Rows are dealt from longest to shortest in rounds of ``ranks``; in each round the rank with
    the fewest tokens so far gets the longest row. The sums of two ranks differ by at most the
    longest row. Within a chunk rows keep their order. Raises DPA854 if the rows do not divide.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if ranks < 1 or lengths.size % ranks:
        raise UsageError(
            "DPA854",
            f"{lengths.size} rows cannot be cut into {ranks} equal chunks.",
            "Make train_batch_size * rollout.n a multiple of the number of ranks.",
        )
    order = np.argsort(-lengths, kind="stable").reshape(-1, ranks)
    loads = np.zeros(ranks, dtype=np.int64)
    chunks = np.empty((ranks, len(order)), dtype=np.int64)
    for turn, rows in enumerate(order):
        takers = np.argsort(loads, kind="stable")
        chunks[takers, turn] = rows
        loads[takers] += lengths[rows]
    chunks.sort(axis=1)
    return chunks.reshape(-1)


def static_micro_batches(rows: int, *, size: int) -> list[Index]:
    """Rows 0..rows-1 in runs of ``size``; the last one may be shorter."""
    if size < 1:
        raise UsageError("DPA851", f"a micro-batch of {size} rows.", "It holds at least one row.")
    return [np.arange(at, min(at + size, rows)) for at in range(0, rows, size)]


def check_rows_fit(lengths: Lengths, *, limit: int) -> None:
    """Raise DPA856 if a row alone is above the token limit."""
    lengths = np.asarray(lengths)
    longest = int(np.argmax(lengths)) if lengths.size else 0
    if lengths.size and lengths[longest] > limit:
        raise UsageError(
            "DPA856",
            f"row {longest} has {int(lengths[longest])} tokens, the limit is {limit}.",
            "Raise actor.ppo_max_token_len_per_gpu (or the log_prob one).",
        )


def fewest_micro_batches(lengths: Lengths, *, limit: int) -> list[Index]:
    """First-fit decreasing: few micro-batches, none above ``limit`` tokens.

    Source: D. Johnson (1973); at most 11/9 of the optimum plus a constant. Raises DPA856 if a
    single row is above the limit.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_rows_fit(lengths, limit=limit)
    room = np.empty(0, dtype=np.int64)
    bins: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable"):
        fits = room >= lengths[row]
        at = int(np.argmax(fits)) if fits.any() else len(bins)
        if at == len(bins):
            bins.append([])
            room = np.append(room, limit)
        bins[at].append(int(row))
        room[at] -= lengths[row]
    return [np.array(sorted(rows), dtype=np.int64) for rows in bins]


def dynamic_micro_batches(lengths: Lengths, *, limit: int, count: int) -> list[Index]:
    """Exactly ``count`` micro-batches, none empty and none above ``limit`` tokens.

    Rows of similar length go together where the limit allows it, because padded models pay for
    the longest row of a micro-batch. ``count`` must be at least the length of
    :func:`fewest_micro_batches` and at most the number of rows.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_rows_fit(lengths, limit=limit)
    bins = _similar(lengths, limit=limit, count=count)
    if bins is None:
        bins = fewest_micro_batches(lengths, limit=limit)
    assert len(bins) <= count <= lengths.size, (len(bins), count, lengths.size)
    while len(bins) < count:
        at = max(range(len(bins)), key=lambda i: (bins[i].size > 1, int(lengths[bins[i]].sum())))
        rows = bins.pop(at)
        half = _half(lengths[rows])
        bins[at:at] = [rows[:half], rows[half:]]
    return bins


def _half(lengths: Lengths) -> int:
    """Where to cut a run of two or more rows so that both parts hold similar token counts."""
    ahead = np.cumsum(lengths)[:-1]
    return int(np.argmin(np.abs(2 * ahead - lengths.sum()))) + 1


def _similar(lengths: Lengths, *, limit: int, count: int) -> list[Index] | None:
    """Rows sorted by length and cut into at most ``count`` runs with the least possible maximum.

    None if no such cut keeps below ``limit``.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    low, high = int(lengths.max(initial=0)), limit
    if len(_runs(ends, high)) > count:
        return None
    while low < high:
        middle = (low + high) // 2
        if len(_runs(ends, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    starts = _runs(ends, high)
    return [np.sort(rows) for rows in np.split(order, starts[1:])]


def _runs(ends: Lengths, cap: int) -> list[int]:
    """Starts of the runs when sorted rows are taken greedily up to ``cap`` tokens a run."""
    starts, taken = [0], 0
    while True:
        nxt = int(np.searchsorted(ends, taken + cap, side="right"))
        if nxt >= ends.size:
            return starts
        starts.append(nxt)
        taken = int(ends[nxt - 1])


def agreed_micro_batches(
    per_rank: Sequence[Lengths], *, limit: int, divisible_by: int = 1
) -> list[list[Index]]:
    """Dynamic micro-batches of every rank, the same number on each, a multiple of ``divisible_by``.

    The number is the largest that any rank needs, rounded up; ranks hold equally many rows, so
    each can fill it. Raises DPA856 if a row is above the limit, DPA854 if ranks hold unequal
    numbers of rows, or fewer rows than micro-batches.
    """
    if len({len(lengths) for lengths in per_rank}) > 1:
        raise UsageError(
            "DPA854",
            f"ranks hold {[len(lengths) for lengths in per_rank]} rows.",
            "Ranks need equally many rows.",
        )
    need = max(len(fewest_micro_batches(lengths, limit=limit)) for lengths in per_rank)
    count = -(-need // divisible_by) * divisible_by
    _check_count(count, rows=len(per_rank[0]), divisible_by=divisible_by)
    return [dynamic_micro_batches(lengths, limit=limit, count=count) for lengths in per_rank]


def counted_micro_batches(rows: int, *, size: int, divisible_by: int) -> list[Index]:
    """:func:`static_micro_batches` whose number is a multiple of ``divisible_by``.

    ``size`` 0 takes as few as that allows, of equal sizes up to one row. Raises DPA854 if rows and
    size do not come out at a multiple.
    """
    if not size:
        _check_count(divisible_by, rows=rows, divisible_by=divisible_by)
        return list(np.array_split(np.arange(rows), divisible_by))
    parts = static_micro_batches(rows, size=size)
    if len(parts) % divisible_by:
        raise UsageError(
            "DPA854",
            f"{rows} rows per rank in micro-batches of {size} are {len(parts)} micro-batches; the "
            f"pipeline takes multiples of {divisible_by}.",
            "Change actor.ppo_micro_batch_size_per_gpu (or the log_prob one).",
        )
    return parts


def _check_count(count: int, *, rows: int, divisible_by: int) -> None:
    if count > rows and divisible_by > 1:
        raise UsageError(
            "DPA854",
            f"{rows} rows per rank cannot fill {count} micro-batches; the pipeline takes multiples "
            f"of {divisible_by}.",
            "Raise actor.ppo_mini_batch_size or the token limit, or lower the pipeline sizes.",
        )


def mini_batch_rows(
    rows: int, *, size: int, epochs: int, shuffle: bool, seed: Sequence[int]
) -> list[list[Index]]:
    """Row positions of each mini-batch, for each epoch, on one rank.

    ``size`` rows each. With ``shuffle`` every epoch draws its own permutation from ``seed``
    (step, rank, ... chosen by the driver); without it mini-batches are runs. Raises DPA854 if
    ``size`` does not divide ``rows``.
    """
    if size < 1 or rows % size:
        raise UsageError(
            "DPA854",
            f"{rows} rows per rank cannot be cut into mini-batches of {size} rows per rank.",
            "Change train_batch_size, actor.ppo_mini_batch_size, rollout.n or the ranks.",
        )
    out = []
    for epoch in range(epochs):
        order = np.arange(rows)
        if shuffle:
            order = np.random.default_rng([*seed, epoch]).permutation(rows)
        out.append([np.sort(part) for part in order.reshape(-1, size)])
    return out
