"""Who waits for whom: notes that ranks leave before collectives, kept where they outlive a rank.

The driver hosts a small key-value store over which ranks also find each other. Before each
micro-batch a rank writes one line there; the driver reads the lines when a collective timed out,
when nothing moves any more, or when asked (SIGUSR1). A note costs one message without an answer.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # conditional there

STORE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Note:
    """Where a rank is. ``call`` numbers the driver's calls, ``count`` grows by one with every note
    of a call, ``at`` is Unix time."""

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
            where = (
                f", mini-batch {self.mini_batch}, "
                f"micro-batch {self.micro_batch + 1} of {self.micro_batches}"
            )
        ago = max(0.0, time.time() - self.at)
        return f"rank {self.rank}: {self.stage} {self.state}{where}, {ago:.0f} s ago"


def host_store(host: str) -> tuple[TCPStore, int]:
    """A store served by this process on a free port of ``host``, and the port."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(host: str, port: int) -> TCPStore:
    """This rank's connection to the driver's store."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))


class Notebook:
    """One rank's side: writes its own note."""

    def __init__(self, store: Store, *, rank: int) -> None:
        self._store, self._rank = store, rank
        self._call, self._stage, self._count = 0, "", 0

    def begin(self, call: int, stage: str) -> None:
        """A call starts."""
        self._call, self._stage, self._count = call, stage, 0
        self._write()

    def micro_batch(self, mini_batch: int, micro_batch: int, micro_batches: int) -> None:
        """The collectives of a micro-batch are next."""
        self._count += 1
        self._write(mini_batch, micro_batch, micro_batches)

    def end(self) -> None:
        """The call is over."""
        self._count += 1
        self._write(state="finished")

    def _write(
        self,
        mini_batch: int = 0,
        micro_batch: int = 0,
        micro_batches: int = 0,
        state: str = "running",
    ) -> None:
        note = Note(
            self._rank,
            self._call,
            self._stage,
            self._count,
            mini_batch,
            micro_batch,
            micro_batches,
            state,
            time.time(),
        )
        self._store.set(f"note/{self._rank}", json.dumps(asdict(note)))


def read_notes(store: Store, *, world_size: int) -> list[Note | None]:
    """The last note of each rank; None for one that has not written any."""
    notes: list[Note | None] = []
    for rank in range(world_size):
        key = f"note/{rank}"
        notes.append(Note(**json.loads(store.get(key))) if store.check([key]) else None)
    return notes


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


def report_on_signal(notes: Callable[[], Sequence[Note | None]]) -> None:
    """From now on SIGUSR1 makes this process write ``notes()`` to stderr. Main thread only."""

    def report(_number: int, _frame: object) -> None:
        print(describe(notes()), file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR1, report)


def describe(notes: Sequence[Note | None]) -> str:
    """One line a rank."""
    lines = [
        f"rank {rank}: no note yet" if note is None else str(note)
        for rank, note in enumerate(notes)
    ]
    return "\n".join(lines)
