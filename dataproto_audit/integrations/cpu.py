"""CPU seconds of a run on this machine, to set those of the audit against.

verl's driver is one of Ray's workers, and so is each of its ranks, servers and reward loops: all of
them descend from the process that started the driver. Their times are read from ``/proc``.

Not covered: other nodes, and processes that ended meanwhile, so that a share of this is rather too
large than too small.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PROC = Path("/proc")
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Places in ``/proc/PID/stat`` behind the name, which may hold spaces (proc(5) counts from 1)."""


def processes(root: Path = PROC) -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of every process; {} where there is no ``/proc``."""
    found = {}
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    for folder in root.glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it ended meanwhile
            continue
        rest = words.rpartition(")")[2].split()
        if len(rest) > _SYSTEM:
            spent = (int(rest[_USER]) + int(rest[_SYSTEM])) / ticks
            found[int(folder.name)] = (int(rest[_PARENT]), spent)
    return found


def with_descendants(known: dict[int, tuple[int, float]], root: int) -> dict[int, float]:
    """CPU seconds of ``root`` and all that came of it, by process."""
    children: dict[int, list[int]] = {}
    for process, (parent, _) in known.items():
        children.setdefault(parent, []).append(process)
    found, open_ = {}, [root]
    while open_:
        process = open_.pop()
        if process in known and process not in found:
            found[process] = known[process][1]
            open_ += children.get(process, [])
    return found


class CpuClock:
    """CPU seconds of the run from when this was made: of all Ray's workers here, or this process.

    Looking costs some milliseconds, so it is done at the beginning and at the end of a run only.
    """

    def __init__(self) -> None:
        self._began, self._own = self._now(), time.process_time()

    def spent_s(self) -> float:
        """Seconds since then."""
        now = self._now()
        if not now:
            return time.process_time() - self._own
        return sum(spent - self._began.get(process, 0.0) for process, spent in now.items())

    def _now(self) -> dict[int, float]:
        """Of each process of the run; {} where this process alone counts, as without Ray."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return {}
        if ray.get_runtime_context().get_actor_id() is None:
            return {}  # a driver outside of Ray's workers: theirs are not below its parent
        return with_descendants(processes(), os.getppid())
