"""Many files, or a big trace, replayed in several processes over Ray.

Answers stream back in the order of the work; no more than two pieces a process are under way, so
memory is bounded by the largest step times the number of processes. Metrics of earlier steps are
known within a piece only. One job runs in this process, without Ray; for several, Ray must be
running: the command starts one that leaves no process behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dataproto_audit.codes import CodedError, RunError, UsageError
from dataproto_audit.replay.answers import Wanted, Work, attempts

Told = dict[str, Any] | CodedError
AHEAD = 2
"""Pieces of work under way for each process."""


def replayed(
    work: Sequence[Work], wanted: Wanted, *, jobs: int = 1
) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Each piece of work with its answers, in order; raises the first thing that is unreadable."""
    for piece, told in attempted(work, wanted, jobs=jobs):
        for answer in told:
            if isinstance(answer, CodedError):
                raise answer
            yield piece, answer


def attempted(
    work: Sequence[Work], wanted: Wanted, *, jobs: int = 1
) -> Iterator[tuple[Work, Iterable[Told]]]:
    """Each piece of work once, in order, with its answers and the errors of what has none."""
    if jobs < 1:
        raise UsageError("DPA851", f"--jobs {jobs}.", "Give a number from 1.")
    if jobs == 1 or len(work) < 2:
        for piece in work:
            yield piece, attempts(piece, wanted)
        return
    ray = _ray()
    task = ray.remote(num_cpus=1)(_answered)
    waiting: deque[tuple[Work, Any]] = deque()
    for piece in work:
        waiting.append((piece, task.remote(piece, wanted)))
        if len(waiting) >= AHEAD * jobs:
            yield _next(ray, waiting)
    while waiting:
        yield _next(ray, waiting)


def _next(ray: Any, waiting: deque[tuple[Work, Any]]) -> tuple[Work, list[Told]]:
    piece, running = waiting.popleft()
    try:
        return piece, ray.get(running)
    except ray.exceptions.RayError as error:
        died = RunError(
            "DPA864", f"a process that replayed {piece.path} died ({type(error).__name__}).",
            "Lower --jobs: the steps together may not fit into memory.",
        )  # fmt: skip
        died.__cause__ = error
        return piece, [died]


def _answered(piece: Work, wanted: Wanted) -> list[Told]:
    """In another process: errors for users come back as values, so that they keep their kind."""
    return list(attempts(piece, wanted))


def _ray() -> Any:
    """The Ray that is running. Who calls starts it: ours may not outlive the call."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "DPA858", "several jobs need ray.", "Install dataproto-audit[trainer], or use one job."
        ) from error
    if not ray.is_initialized():
        raise UsageError("DPA851", "several jobs need a Ray that runs.", "Call ray.init() first.")
    return ray
