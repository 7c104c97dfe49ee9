"""CPU seconds of the processes of a run, and the share that auditing took.

Linux keeps a CPU clock of every process, which any process may read; no sampling is involved.
Processes on other machines cannot be read and are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil


def process_cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process so far; 0 for one that is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


class CpuMeter:
    """CPU seconds that a set of processes spent since :meth:`start`.

    ``audit_s`` is what blocks under :meth:`auditing` spent, in all processes together.
    """

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()
        self._base = 0.0
        self.audit_s = 0.0

    def start(self, pids: Iterable[int]) -> None:
        """Measure these processes from here on."""
        self._pids = tuple(pids)
        self._base = self._now()

    def spent_s(self) -> float:
        """CPU seconds since the start."""
        return self._now() - self._base

    def total_s(self) -> float:
        """CPU seconds of this process, all below it and the measured ones, since each began.

        Start-up, Ray's daemons and processes that have ended and were waited for are included;
        what shuts down after the call is not.
        """
        me = psutil.Process()
        below = {child.pid: child for child in me.children(recursive=True)}
        measured = [pid for pid in self._pids if pid != me.pid and pid not in below]
        total = sum(map(process_cpu_s, measured))
        for process in (me, *below.values()):
            with suppress(psutil.Error):
                spent = process.cpu_times()
                total += spent.user + spent.system
                total += spent.children_user + spent.children_system
        return float(total)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Count what the processes spend in the block as auditing."""
        before = self._now()
        try:
            yield
        finally:
            self.audit_s += self._now() - before

    def _now(self) -> float:
        return sum(map(process_cpu_s, self._pids))
