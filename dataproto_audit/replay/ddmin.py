"""Delta debugging: a smallest part of a list that still passes a test.

Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28
(2002), algorithm ddmin. After a success the search goes on at the same place instead of from the
start, so that many needless items cost one test each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
ALONE = 16
"""Pieces up to which each is also tried alone."""


def ddmin(
    items: Sequence[Item], test: Callable[[Sequence[Item]], bool], *, least: int = 0
) -> list[Item]:
    """The items that are left once no single one can be taken out; ``test(items)`` must hold.

    ``least`` items stay whatever the test says. The answer is 1-minimal: a test of it without any
    one item fails. Tests: logarithmic where one item is enough, at most quadratic.
    """
    left = list(items)
    while len(left) > max(1, least):
        alone = _alone(left, test, least)
        if alone is None:
            break
        left = alone
    size = -(-len(left) // 2)
    while len(left) > least:
        kept = _without_pieces(left, test, size, least)
        if len(kept) == len(left):
            if size <= 1:
                break
            size = -(-size // 2)
        left = kept
    return left


def _alone(
    left: Sequence[Item], test: Callable[[Sequence[Item]], bool], least: int
) -> list[Item] | None:
    """A piece of ``left`` that passes by itself, the largest first."""
    parts = 2
    while parts <= ALONE and parts <= len(left):
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            piece = list(left[start : start + size])
            if least <= len(piece) < len(left) and test(piece):
                return piece
        parts *= 2
    return None


def _without_pieces(
    left: Sequence[Item], test: Callable[[Sequence[Item]], bool], size: int, least: int
) -> list[Item]:
    """``left`` without every piece of ``size`` that it can do without."""
    kept, start = list(left), 0
    while start < len(kept):
        rest = kept[:start] + kept[start + size :]
        if len(rest) >= least and test(rest):
            kept = rest
        else:
            start += size
    return kept
