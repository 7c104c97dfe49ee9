"""Waiting for all ranks of one call, so that the first failure is known at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dataproto_audit.trainer.workers.failures import follows_from_a_peer
from dataproto_audit.trainer.workers.hang import Note

POLL_S = 1.0
"""How often signals are looked at and notes are read while a call runs."""
GRACE_S = 5.0
"""How long to wait for the cause when a rank only reports a lost or late peer."""


class CallFailed(Exception):
    """One or more ranks failed: rank -> what Ray raised. Empty if the call does not move."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        self.failures = dict(failures)
        super().__init__(f"ranks {sorted(self.failures)} failed")


def gather(
    refs: Sequence[Any], *, notes: Callable[[], Sequence[Note | None]], stall_s: float
) -> list[Any]:
    """The answers of all ranks in rank order.

    Raises :class:`CallFailed` as soon as one rank failed on its own account, after a grace period
    if it only lost its peers, or when no rank has left a note for ``stall_s`` seconds.
    """
    pending = {ref: rank for rank, ref in enumerate(refs)}
    answers: list[Any] = [None] * len(refs)
    watch = _Watch(notes, stall_s)
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
        for ref in ready:
            rank = pending.pop(ref)
            try:
                answers[rank] = ray.get(ref)
            except RayError as error:
                raise CallFailed(_with_peers({rank: error}, pending)) from None
        if not ready and watch.stalled():
            raise CallFailed({})
    return answers


def _with_peers(failures: dict[int, BaseException], pending: dict[Any, int]) -> dict[int, Any]:
    """``failures`` and, if they only speak of a peer, what the other ranks say in a while."""
    deadline = time.monotonic() + GRACE_S
    while pending and all(follows_from_a_peer(error) for error in failures.values()):
        left = deadline - time.monotonic()
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, left))
        if not ready:
            break
        rank = pending.pop(ready[0])
        try:
            ray.get(ready[0])
        except RayError as error:
            failures[rank] = error
    return failures


class _Watch:
    """Notices that no rank has left a new note for a while."""

    def __init__(self, notes: Callable[[], Sequence[Note | None]], stall_s: float) -> None:
        self._notes, self._stall_s = notes, stall_s
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()

    def stalled(self) -> bool:
        now = time.monotonic()
        seen = tuple((note.call, note.count, note.state) for note in self._notes() if note)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since > self._stall_s
