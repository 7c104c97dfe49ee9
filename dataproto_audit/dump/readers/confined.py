"""Opening a large pickle first in a child process with limits on time and memory.

The machine that reads pickles executes nothing, and what it makes is bounded by the size of the
file. A large file may still take long, or more memory than there is. So a file above
:data:`SMALL` is opened by a child of a fork server first, which may use :func:`limits_of` its size;
only a file that fits is opened here. Reading is deterministic, so it fits here, too.

A file of up to :data:`SMALL` bytes is opened at once: each value of it costs a byte of the file or
is counted against the budget, which takes a second or two at most. ``DATAPROTO_AUDIT_CONFINE=off``
opens every file at once. So does a platform without fork servers or without limits of a process;
where only the memory of a process cannot be bounded, time still is.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import current_process, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from dataproto_audit.codes import UsageError

try:
    import resource
except ImportError:  # a platform without limits of a process
    resource = None  # type: ignore[assignment] # tested where it is used

SMALL = 1 << 21
"""Bytes of a pickle that are read without a child."""
SWITCH = "DATAPROTO_AUDIT_CONFINE"
LIMIT, UNREAD = "DPA813", "DPA810"
_WORD = 64
"""Bytes of the longest answer of a child."""
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
    if resource is None or "forkserver" not in get_all_start_methods():
        return
    if current_process().daemon:  # such a process may have no children; its parent set its limits
        return
    allowed = limits or limits_of(size)
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "dataproto_audit.dump.readers.read"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_open, args=(str(path), allowed, theirs), daemon=True)
    try:
        _start(child)
        theirs.close()
        said = _answer(ours, allowed)
    except OSError as error:  # no process, or no more open files
        said = f"did not start ({error})"
    finally:
        theirs.close()
        ours.close()
        if child.pid is not None:
            if child.is_alive():
                child.kill()
            child.join()
        child.close()
    if said.startswith(("did not start", "raised")):
        raise UsageError(
            UNREAD, f"{path} is not read: a child process that opens large files first {said}.",
            f"If you trust the file, set {SWITCH}=off to open it without one.",
        )  # fmt: skip
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
        ours.recv_bytes(_WORD)  # it has begun
    except EOFError:
        return "did not start"
    try:
        if not ours.poll(allowed.seconds):
            return too_long
        said = ours.recv_bytes(_WORD).decode()
    except EOFError:  # killed by a limit before it could say so
        return too_much
    return too_much if said == "memory" else said


def _open(path: str, allowed: Limits, answer: Connection) -> None:
    """What the child does: limits first, then open the file; two words are the answer."""
    # A file that makes the child use up its time must not leave a traceback on the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[SWITCH] = "off"
    from dataproto_audit.dump.readers.read import read_batches

    answer.send_bytes(b"begun")
    _limit(allowed)
    try:
        read_batches(path)
        word = b"done"
    except UsageError as error:
        word = b"memory" if isinstance(error.__cause__, MemoryError) else b"done"
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it as coded
        word = b"memory" if _of_memory(error) else f"raised {type(error).__name__}".encode()
    answer.send_bytes(word[:_WORD])
    answer.close()


def _limit(allowed: Limits) -> None:
    """Bound this process. What a platform cannot bound, the parent's clock bounds."""
    seconds = int(allowed.seconds) + 1
    _set("RLIMIT_CPU", seconds, seconds + 1)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no such file system: what the empty process has is not known
        return
    most = pages * resource.getpagesize() + allowed.bytes
    _set("RLIMIT_AS", most, most)


def _set(name: str, soft: int, hard: int) -> None:
    kind = getattr(resource, name, None)
    if kind is None:
        return
    _, highest = resource.getrlimit(kind)
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    with suppress(ValueError, OSError):  # the platform refuses such a limit
        resource.setrlimit(kind, (soft, hard))


def _of_memory(error: Exception) -> bool:
    """Python's own, the system's, and torch's allocator, which raises a RuntimeError."""
    if isinstance(error, RuntimeError):
        return "memory" in str(error) and not isinstance(error, RecursionError)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
