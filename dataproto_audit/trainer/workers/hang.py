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
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # conditional there

from dataproto_audit.progress import Note, describe, late_ranks

__all__ = [
    "Note",
    "Notebook",
    "describe",
    "host_store",
    "join_store",
    "late_ranks",
    "read_notes",
    "report_on_signal",
]

STORE_TIMEOUT_S = 300.0


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


def report_on_signal(notes: Callable[[], Sequence[Note | None]]) -> None:
    """From now on SIGUSR1 makes this process write ``notes()`` to stderr. Main thread only."""

    def report(_number: int, _frame: object) -> None:
        print(describe(notes()), file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR1, report)
