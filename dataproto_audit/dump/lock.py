"""One writer per run folder: a lock file that names its holder.

The file is made with ``O_EXCL`` and holds process id, start time of the process, and an identity of
the machine's boot and process namespace, so that a later run can tell a holder that lives from one
that was killed. It cannot tell for a holder on another machine or in another container, and says
so. Not covered: network file systems on which ``O_EXCL`` is not atomic.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dataproto_audit.atomic import storage_error
from dataproto_audit.codes import UsageError

LOCK_NAME = ".lock"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. ``started`` is in clock ticks since boot, "" if unknown."""

    pid: int
    started: str
    machine: str
    since: str

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None when it cannot be seen from here."""
        if self.machine != _machine():
            return None
        return _process_start(self.pid) == self.started


class RunLock:
    """The lock of one folder; :meth:`release` gives it back, a killed process leaves it behind."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    @classmethod
    def acquire(cls, folder: str | os.PathLike[str], *, take_over: bool = False) -> RunLock:
        """Lock ``folder``, or raise ``UsageError`` DPA801 that names the holder.

        ``take_over`` takes the lock of a process that is known to be dead, never of a living one.
        """
        path = Path(folder) / LOCK_NAME
        holder = Holder(os.getpid(), _process_start(os.getpid()), _machine(), _now())
        content = json.dumps(asdict(holder)).encode()
        try:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                _take(path, content, take_over=take_over)
            else:
                _write(fd, content)
        except OSError as error:
            raise storage_error(path, error) from error
        return cls(path, content)

    def release(self) -> None:
        """Remove the lock if it is still ours; a second call does nothing."""
        with suppress(OSError):
            if self._path.read_bytes() == self._content:
                self._path.unlink()


def holder_of(folder: str | os.PathLike[str]) -> Holder | None:
    """Who holds the lock of ``folder``: None for nobody, or for a lock that cannot be read."""
    try:
        return _parse((Path(folder) / LOCK_NAME).read_bytes())
    except OSError:
        return None


def refuse_held(folder: str | os.PathLike[str]) -> None:
    """Raise ``UsageError`` DPA801 where another process of this machine writes into ``folder``."""
    holder = holder_of(folder)
    if holder is not None and holder.alive and holder.pid != os.getpid():
        raise _in_use(Path(folder) / LOCK_NAME, holder)


def _take(path: Path, content: bytes, *, take_over: bool) -> None:
    # Two processes may find the same dead holder. The file itself is locked while one of them
    # writes its name into it, so the other then reads a living holder.
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    found = _parse(os.pread(fd, 1 << 16, 0))
    if take_over and found is not None and found.alive is False:
        os.ftruncate(fd, 0)
        _write(fd, content)
        return
    os.close(fd)
    raise _in_use(path, found)


def _in_use(path: Path, found: Holder | None) -> UsageError:
    folder = path.parent
    if found is None:
        what = "the lock file names no holder"
        remedy = f"If no run writes there, delete {path}."
    elif found.alive:
        what = f"process {found.pid} writes into it since {found.since}"
        remedy = "Choose another trainer.run_dir, or wait for it."
    elif found.alive is None:
        what = (
            f"process {found.pid} of another machine, container or boot locked it on {found.since}"
        )
        remedy = f"If that run is gone, delete {path}."
    else:
        what = f"process {found.pid} locked it on {found.since} and is dead: the run was killed"
        remedy = (
            "Continue it from its checkpoints (trainer.resume_mode=auto), pass --overwrite, or "
            "choose another trainer.run_dir. Its finished steps can be read."
        )
    return UsageError("DPA801", f"{folder}: the run folder is in use: {what}.", remedy)


def _write(fd: int, content: bytes) -> None:
    try:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)  # gives an flock back, too


def _parse(content: bytes) -> Holder | None:
    try:
        data = json.loads(content)
        return Holder(int(data["pid"]), data["started"], data["machine"], data["since"])
    except (ValueError, TypeError, KeyError):
        return None


def _process_start(pid: int) -> str:
    """Start time of a process in ticks since boot; "" when there is no such process.

    A process id alone is not enough: ids are given out again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()  # the name may hold blanks and brackets
    return "" if state in "ZX" else rest[18]


def _machine() -> str:
    """This boot and process namespace: what makes a process id comparable. No host name."""
    boot, namespace = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace}"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
