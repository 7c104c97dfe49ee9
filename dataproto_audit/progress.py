"""Where ranks are, and whom the others wait for: notes, read by whoever was told of them.

How a note travels is the business of who writes it: over a store of ``torch.distributed`` in our
own trainer (:mod:`dataproto_audit.trainer.workers.hang`), as a small file in verl's workers
(:mod:`dataproto_audit.integrations.worker_files`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN = -1
"""Number of micro-batches where the loop that runs them does not say it beforehand."""


@dataclass(frozen=True)
class Note:
    """Where a rank is. ``call`` numbers the driver's calls, ``count`` grows by one with every note
    of a call, ``at`` is Unix time. ``micro_batches`` is 0 outside of micro-batches."""

    rank: int
    call: int
    stage: str
    count: int = 0
    mini_batch: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    state: str = "running"
    at: float = 0.0

    def __str__(self) -> str:
        where = ""
        if self.micro_batches:
            total = f" of {self.micro_batches}" if self.micro_batches != UNKNOWN else ""
            where = f", mini-batch {self.mini_batch}, micro-batch {self.micro_batch + 1}{total}"
        ago = max(0.0, time.time() - self.at)
        return f"rank {self.rank}: {self.stage} {self.state}{where}, {ago:.0f} s ago"


def late_ranks(
    notes: Sequence[Note | None], *, call: int, waiting: Sequence[int] = ()
) -> list[int]:
    """The ranks that the others wait for in ``call``, as far as notes tell.

    Ranks that have not begun the call; else ranks that finished it while others still run (they
    ran fewer micro-batches); else those with the least progress. Of ranks that are level, those
    not in ``waiting`` (ranks that reported a time-out themselves).
    """
    current = [note if note is not None and note.call == call else None for note in notes]
    absent = [rank for rank, note in enumerate(current) if note is None]
    finished = [note.rank for note in current if note is not None and note.state == "finished"]
    if absent or (finished and len(finished) < len(notes)):
        return absent or finished
    counts = [note.count for note in current if note is not None]
    behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
    if len(behind) == len(notes):
        behind = [rank for rank in behind if rank not in waiting] or behind
    return behind


def describe(notes: Sequence[Note | None]) -> str:
    """One line a rank."""
    lines = [
        f"rank {rank}: no note yet" if note is None else str(note)
        for rank, note in enumerate(notes)
    ]
    return "\n".join(lines)


def uneven(notes: Sequence[Note | None], *, call: int) -> str:
    """``rank 1 is in update_actor micro-batch 3, rank 0 in 4: the others wait for rank 1``.

    Says that ranks are level where they are; '' for no rank at all.
    """
    if not notes:
        return ""
    late = late_ranks(notes, call=call)
    order = [*late, *(rank for rank in range(len(notes)) if rank not in late)]
    told = [_place(rank, notes[rank], call, full=not at) for at, rank in enumerate(order)]
    if len(late) == len(notes):
        return f"{', '.join(told)}: the ranks are level"
    names = ", ".join(str(rank) for rank in late)
    return f"{', '.join(told)}: the others wait for rank {names}"


def _place(rank: int, note: Note | None, call: int, *, full: bool) -> str:
    if note is None or note.call != call:
        before = f" (last seen in {note.stage})" if note is not None else ""
        return f"rank {rank} has not begun{before}"
    if note.state == "finished":
        return f"rank {rank} has finished {note.stage} after {note.count - 1} micro-batches"
    if not note.micro_batches:
        return f"rank {rank} is in {note.stage} before its first micro-batch"
    stage = f"is in {note.stage} micro-batch" if full else "in"
    return f"rank {rank} {stage} {note.count}"
