"""How one audited fault is scored.

The first finding of a run is the one at the earliest boundary, and there the most severe. The
*hits* are the findings whose stage and field are accepted answers; causes are those of the first.
Rows and columns are right when some hit, or all findings on its field at its boundary together,
name exactly those of the truth or of one of its alternatives, which is how the public cases are
scored, too; where the truth defines none, they count as right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.findings import SEVERITIES, Finding

MEASURES = (
    "detected", "stage_right", "field_right", "row_right", "column_right", "cause_top1",
    "cause_top3",
)  # fmt: skip


@dataclass(frozen=True)
class Sighting:
    """A finding and the number of the boundary, over all steps, where it was made.

    ``place`` is that boundary's stage and side, which the finding may blame on an earlier one.
    """

    boundary: int
    finding: Finding
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Score:
    """What is right about the findings of one run; ``first`` and ``hit`` for the eye."""

    detected: bool = False
    stage_right: bool = False
    field_right: bool = False
    row_right: bool = False
    column_right: bool = False
    cause_top1: bool = False
    cause_top3: bool = False
    first: Finding | None = None
    hit: Finding | None = None
    rows: tuple[int, ...] = field(default=())
    """Rows of the truth, where the hit counts them."""

    def misses(self) -> tuple[str, ...]:
        """The measures that are not right."""
        return tuple(name for name in MEASURES if not getattr(self, name))


def in_order(sightings: Iterable[Sighting]) -> list[Sighting]:
    """By boundary, then by severity; otherwise as they came."""
    return sorted(sightings, key=lambda s: (s.boundary, SEVERITIES.index(s.finding.severity)))


def same_field(name: str, accepted: Sequence[str]) -> bool:
    """True for an accepted name, or one that ends in it: ``non_tensor_batch.uid``."""
    return name in accepted or name.split(".")[-1] in accepted


def score(
    fault: Any,
    truth: Any,
    sightings: Iterable[Sighting],
    *,
    moved: Callable[[int, Sighting], int] = lambda row, sighting: row,
) -> Score:
    """Score what was found of ``fault``.

    ``moved`` says where a row of the truth is at the boundary of a sighting.
    """
    loud = [s for s in in_order(sightings) if s.finding.severity in fault.levels]
    if not loud:
        return Score()
    first = loud[0].finding
    hits = [s for s in loud if _accepted(fault, s.finding)]
    hit = hits[0] if hits else None
    causes = (hit.finding if hit else first).causes
    right = _undefined(truth)
    if hits:
        each = [rows_and_columns(truth, one, loud, moved) for one in hits]
        right = any(rows for rows, _ in each), any(columns for _, columns in each)
    return Score(
        detected=True,
        stage_right=first.stage in fault.stages,
        field_right=same_field(first.field, fault.fields),
        row_right=right[0],
        column_right=right[1],
        cause_top1=any(cause in fault.causes for cause in causes[:1]),
        cause_top3=any(cause in fault.causes for cause in causes[:3]),
        first=first,
        hit=hit.finding if hit else None,
        rows=tuple(truth.rows) if truth else (),
    )


def _accepted(fault: Any, finding: Finding) -> bool:
    return finding.stage in fault.stages and same_field(finding.field, fault.fields)


def _undefined(truth: Any) -> tuple[bool, bool]:
    """Without a hit only what is not defined counts as right."""
    return (not truth or not truth.rows, not truth or not truth.columns)


def rows_and_columns(
    truth: Any,
    hit: Sighting,
    sightings: Sequence[Sighting],
    moved: Callable[[int, Sighting], int],
) -> tuple[bool, bool]:
    """Whether the hit, or all findings on its field together, have rows and columns right."""
    if not truth or not truth.rows:
        return True, True
    together = [s.finding for s in sightings
                if (s.boundary, s.finding.field) == (hit.boundary, hit.finding.field)]  # fmt: skip
    answers = [(set(hit.finding.rows), _cells([hit.finding])),
               (_union(f.rows for f in together), _cells(together))]  # fmt: skip
    wanted = []
    for one in (truth, *truth.also):
        rows = {row: moved(row, hit) for row in one.rows}
        cells = {(rows[row], column) for row, found in one.columns.items() for column in found}
        wanted.append((set(rows.values()), cells))
    row_right = any(rows == want for rows, _ in answers for want, _ in wanted)
    column_right = not truth.columns or any(
        cells == want if want else rows == ours for rows, cells in answers for ours, want in wanted
    )
    return row_right, column_right


def _union(parts: Iterable[Sequence[int]]) -> set[int]:
    return {row for rows in parts for row in rows}


def _cells(findings: Iterable[Finding]) -> set[tuple[int, int]]:
    columns: list[Mapping[int, tuple[int, ...]]] = [finding.columns for finding in findings]
    return {(row, column) for found in columns for row, cs in found.items() for column in cs}
