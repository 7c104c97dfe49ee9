"""CPU seconds of the processes of a run, and the share that auditing took.

Linux keeps a CPU clock of every process, which any process may read; no sampling is involved.
Processes on other machines cannot be read and are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
