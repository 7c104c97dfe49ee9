"""Opening a large pickle first in a child process with limits on time and memory.

The machine that reads pickles executes nothing, and what it makes is bounded by the size of the
file. A large file may still take long, or more memory than there is. So a file above
:data:`SMALL` is opened by a child of a fork server first, which may use :func:`limits_of` its size;
only a file that fits is opened here. Reading is deterministic, so it fits here, too.

A file of up to :data:`SMALL` bytes is opened at once: each value of it costs a byte of the file or
is counted against the budget, which takes a second or two at most. ``DATAPROTO_AUDIT_CONFINE=off``
opens every file at once.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from dataproto_audit.codes import UsageError

SMALL = 1 << 21
"""Bytes of a pickle that are read without a child."""
SWITCH = "DATAPROTO_AUDIT_CONFINE"
LIMIT = "DPA813"
_START_S = 300.0
"""Seconds for the fork server to come up, which imports torch once in a process."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Limits:
    """Seconds, of CPU and of a clock, and bytes beyond what the empty child has."""

    seconds: float
    bytes: int


def limits_of(size: int) -> Limits:
    """Limits for a file of ``size`` bytes: 20 s and 1 s a MB, 1 GiB and 24 times the size."""
    return Limits(20.0 + size / 1e6, (1 << 30) + 24 * size)


def confine(path: Path, size: int, limits: Limits | None = None) -> None:
    """Open ``path`` in a child, and raise ``DPA813`` where that takes more than ``limits``.

    What is wrong with the file otherwise is left to the reader to say. Nothing happens for a small
    file, inside of a child, or where it is switched off.
    """
    if limits is None and (size <= SMALL or os.environ.get(SWITCH) == "off"):
        return
    if current_process().daemon:  # such a process may have no children; its parent set its limits
        return
    allowed = limits or limits_of(size)
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "dataproto_audit.dump.readers.read"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_open, args=(str(path), allowed, theirs), daemon=True)
    _start(child)
    theirs.close()
    try:
        said = _answer(ours, allowed)
    finally:
        ours.close()
        if child.is_alive():
            child.kill()
        child.join()
        child.close()
    if said != "done":
        raise UsageError(
            LIMIT, f"{path} is not read: a child process that opened it {said}.",
            f"It is broken or made to fill memory. If you trust it, set {SWITCH}=off.",
        )  # fmt: skip


def _start(child: Any) -> None:
    """Start ``child`` without running the user's script in it: children import ``__main__``."""
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            child.start()
        finally:
            sys.modules["__main__"] = main


def _answer(ours: Connection, allowed: Limits) -> str:
    too_long = f"took more than {allowed.seconds:.0f} s"
    too_much = f"needed more than {allowed.bytes >> 20} MB, or more than {allowed.seconds:.0f} s"
    try:
        if not ours.poll(_START_S):
            return "did not start"
        ours.recv_bytes(8)  # it has begun
        if not ours.poll(allowed.seconds):
            return too_long
        said = ours.recv_bytes(8)
    except EOFError:  # killed by a limit before it could say so
        return too_much
    return "done" if said == b"done" else too_much


def _open(path: str, allowed: Limits, answer: Connection) -> None:
    """What the child does: limits first, then open the file; one word is the answer."""
    # A file that makes the child use up its time must not leave a traceback on the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[SWITCH] = "off"
    from dataproto_audit.dump.readers.read import read_batches

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed.bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(allowed.seconds) + 1, int(allowed.seconds) + 2))
    answer.send_bytes(b"begun")
    try:
        read_batches(path)
        word = b"done"
    except UsageError as error:
        word = b"memory" if isinstance(error.__cause__, MemoryError) else b"done"
    except MemoryError:
        word = b"memory"
    answer.send_bytes(word)
    answer.close()
