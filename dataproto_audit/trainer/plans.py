"""What each rank is to do in one call, decided by the driver from lengths alone.

Plans are small (index lists and counts) and travel with the call, so ranks agree without a
collective and the driver can say afterwards what was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.algorithms.losses import Counts
from dataproto_audit.trainer.batching import (
    Index,
    Lengths,
    agreed_micro_batches,
    check_rows_fit,
    counted_micro_batches,
    mini_batch_rows,
    static_micro_batches,
)


@dataclass(frozen=True)
class MicroBatching:
    """How rows are cut: ``max_tokens`` (a hard limit) if set, else ``rows`` at a time.

    The number of micro-batches is a multiple of ``divisible_by``, which an interleaved pipeline
    asks for; without a size of their own they are as few as that allows.
    """

    rows: int = 0
    max_tokens: int = 0
    divisible_by: int = 1

    def check(self, lengths: Lengths) -> None:
        """Raise DPA856, naming the row of the batch, if one is above the token limit."""
        if self.max_tokens:
            check_rows_fit(lengths, limit=self.max_tokens)

    def split(self, per_rank: Sequence[Lengths]) -> list[list[Index]]:
        """Micro-batches of every rank, equally many; positions within each rank's rows."""
        if self.max_tokens:
            return agreed_micro_batches(
                per_rank, limit=self.max_tokens, divisible_by=self.divisible_by
            )
        if self.divisible_by > 1:
            return [
                counted_micro_batches(len(lengths), size=self.rows, divisible_by=self.divisible_by)
                for lengths in per_rank
            ]
        size = self.rows or max(len(lengths) for lengths in per_rank)
        return [static_micro_batches(len(lengths), size=size) for lengths in per_rank]


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step of one rank.

    ``index`` counts the mini-batches of the call over all epochs; ``rows`` are positions in the
    rank's chunk; ``micro_batches`` are subsets of them; ``counts`` are those of all ranks.
    """

    epoch: int
    index: int
    rows: Index
    micro_batches: tuple[Index, ...]
    counts: Counts


@dataclass(frozen=True)
class UpdatePlan:
    """The mini-batches of every rank: ``ranks[r][j]``."""

    ranks: tuple[tuple[MiniBatchPlan, ...], ...]


@dataclass(frozen=True)
class ForwardPlan:
    """The micro-batches of every rank in a pass without gradients: ``ranks[r][k]``."""

    ranks: tuple[tuple[Index, ...], ...]


def plan_forward(lengths: Lengths, *, ranks: int, micro: MicroBatching) -> ForwardPlan:
    """Micro-batches of a log-prob pass over all rows.

    ``lengths`` [rows] are attended tokens; rows go to ranks in contiguous equal chunks (DPA854
    if they do not divide).
    """
    micro.check(lengths)
    chunks = _chunks(lengths, ranks)
    return ForwardPlan(tuple(tuple(parts) for parts in micro.split(chunks)))


def plan_update(
    lengths: Lengths,
    trained: Lengths,
    *,
    ranks: int,
    mini_batch_size: int,
    width: int,
    micro: MicroBatching,
    epochs: int = 1,
    shuffle: bool = True,
    seed: Sequence[int] = (0,),
) -> UpdatePlan:
    """Mini-batches and micro-batches of an update over all rows.

    ``lengths`` [rows] attended tokens, ``trained`` [rows] tokens under the response mask,
    ``mini_batch_size`` rows over all ranks, ``width`` response columns. Each rank takes its share
    of a mini-batch from its own chunk. Raises DPA854 if sizes do not divide, DPA856 if a row is
    above the token limit.
    """
    if mini_batch_size % ranks:
        raise UsageError(
            "DPA854",
            f"a mini-batch of {mini_batch_size} rows cannot be cut over {ranks} ranks.",
            "Make actor.ppo_mini_batch_size * rollout.n a multiple of the number of ranks.",
        )
    micro.check(lengths)
    lengths_of, trained_of = _chunks(lengths, ranks), _chunks(trained, ranks)
    rows_of = [
        mini_batch_rows(
            len(lengths_of[rank]),
            size=mini_batch_size // ranks,
            epochs=epochs,
            shuffle=shuffle,
            seed=[*seed, rank],
        )
        for rank in range(ranks)
    ]
    plans: list[list[MiniBatchPlan]] = [[] for _ in range(ranks)]
    index = 0
    for epoch in range(epochs):
        for mini in range(len(rows_of[0][epoch])):
            rows = [rows_of[rank][epoch][mini] for rank in range(ranks)]
            parts = micro.split([lengths_of[rank][rows[rank]] for rank in range(ranks)])
            tokens = [trained_of[rank][rows[rank]] for rank in range(ranks)]
            counts = Counts(
                tokens=int(sum(t.sum() for t in tokens)),
                sequences=int(sum((t > 0).sum() for t in tokens)),
                width=width,
            )
            for rank in range(ranks):
                micro_batches = tuple(rows[rank][part] for part in parts[rank])
                plans[rank].append(MiniBatchPlan(epoch, index, rows[rank], micro_batches, counts))
            index += 1
    return UpdatePlan(tuple(tuple(plan) for plan in plans))


def _chunks(values: Lengths, ranks: int) -> list[Lengths]:
    values = np.asarray(values, dtype=np.int64)
    if values.size % ranks:
        raise UsageError(
            "DPA854",
            f"{values.size} rows cannot be cut over {ranks} ranks.",
            "Make train_batch_size * rollout.n a multiple of the number of ranks.",
        )
    return list(values.reshape(ranks, -1))
