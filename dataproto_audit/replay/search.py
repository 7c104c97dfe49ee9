"""Finding the rows that matter by halving, for faults that show only when rows meet.

Packing, leakage between rows and gradients cannot be judged row by row: something is run on a part
of the batch and fails or does not. One culprit among B rows takes at most 2 * ceil(log2 B) runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Fails = Callable[[Sequence[int]], bool]
"""True where the batch of these rows still fails."""


class Counted:
    """A predicate that remembers what it was asked, and how often it ran."""

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._known: dict[tuple[int, ...], bool] = {}
        self.calls = 0

    def __call__(self, rows: Sequence[int]) -> bool:
        """Ask, at most once for the same rows."""
        mark = tuple(sorted(rows))
        if mark not in self._known:
            self.calls += 1
            self._known[mark] = bool(self._fails(mark))
        return self._known[mark]


def culprits(rows: Sequence[int], fails: Fails, *, limit: int = 100_000) -> tuple[list[int], int]:
    """A small set of rows that fails together, and the number of predicate calls.

    ``rows`` must fail as a whole. One row, or several that fail only together, are found by
    halving: a half that fails alone is halved on; where neither does, each half is reduced while
    the other one stays (A. Zeller, "Yesterday, my program worked", 1999). Of several independent
    culprits one is found. Stops at ``limit`` calls with what is left.
    """
    asked = Counted(fails)

    def reduced(part: list[int], kept: list[int]) -> list[int]:
        if len(part) == 1 or asked.calls >= limit:
            return part
        half = len(part) // 2
        left, right = part[:half], part[half:]
        if asked(left + kept):
            return reduced(left, kept)
        if asked(right + kept):
            return reduced(right, kept)
        return reduced(left, right + kept) + reduced(right, left + kept)

    found = reduced(list(rows), []) if len(rows) else []
    return sorted(found), asked.calls
