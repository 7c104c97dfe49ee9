"""Axis names, row relations, and what a size difference says.

The auditor owns the sizes: it takes ``rows``, ``prompt`` and ``response`` from the batch as a whole
and carries them through the step. ``rows`` changes only by the stage's declared row relation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Relation = Literal["same", "expand", "permute", "drop", "pad", "split", "concat"]


@dataclass(frozen=True)
class Rows:
    """How the rows after a stage follow from the rows before it.

    ``same``: the same rows in the same order. ``expand``: every row ``n`` times, copies adjacent.
    ``permute``: the same rows in another order. ``drop`` and ``pad``: fewer or more rows, the
    others as they were. ``split`` and ``concat``: one batch to several and back.
    """

    relation: Relation
    factor: str = ""
    """Name of the configured count that ``expand`` multiplies by."""

    def __str__(self) -> str:
        return f"{self.relation} x {self.factor}" if self.factor else self.relation


SAME = Rows("same")
PERMUTE = Rows("permute")
EXPAND_N = Rows("expand", "n")


def expected_rows(relation: Rows, before: int, sizes: Mapping[str, int]) -> int | None:
    """Rows after the stage, or None where the relation leaves the number open."""
    if relation.relation in ("same", "permute"):
        return before
    if relation.relation == "expand":
        factor = sizes.get(relation.factor)
        return None if factor is None else before * factor
    return None


def factor_story(actual: int, expected: int, factors: Mapping[str, int]) -> str:
    """Name the known factor that explains ``actual`` against ``expected``, or return ''.

    >>> factor_story(12, 4, {"n": 3})
    '12 = 4 x n (n=3): the other side was not repeated'
    """
    if actual <= 0 or expected <= 0 or actual == expected:
        return ""
    small, large = sorted((actual, expected))
    if large % small:
        return ""
    quotient = large // small
    for name, value in factors.items():
        if value == quotient:
            side = "the other side was not repeated" if actual > expected else "not repeated"
            return f"{large} = {small} x {name} ({name}={value}): {side}"
    return f"{large} = {small} x {quotient}"
