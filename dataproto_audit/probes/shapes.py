"""Where two log-prob fields disagree, and how evenly: what no repair can undo, but a look can tell.

All take the :class:`~.repairs.Sides` of a gap and answer with a :class:`~.repairs.Cause`, or None.
Rows count as agreeing only where their usual gap is far below that of the cells that disagree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dataproto_audit.probes.repairs import LEAST_CELLS, MOST, Cause, Sides

FACTOR = 10.0
"""Rows agree plainly where their usual gap is this much smaller."""
FEW = 0.25
"""Share of the rows that are few."""
CAST = 0.05
"""Nats. What half precision did to log-probs of small models, with room."""
PACKS = (2, 3, 4, 8)
"""Rows in a pack that are tried."""


def one_place(sides: Sides) -> Cause | None:
    """The two disagree at one place of each row only: a column, or the last token."""
    rows = sides.bad.any(1)
    if (sides.bad.sum(1) > 1).any() or rows.sum() < 2 or not (sides.mask & ~sides.bad).any():
        return None
    column = sides.bad.argmax(1)[rows]
    last = sides.mask.shape[1] - 1 - sides.mask[:, ::-1].argmax(1)[rows]
    place = f"column {column[0]}" if (column == column[0]).all() else ""
    place = place or ("the last token" if (column == last).all() else "")
    return Cause("row_outlier", "place", f"{place} of {len(column)} rows") if place else None


def from_a_column(sides: Sides) -> Cause | None:
    """The two disagree from one column on, and agree before it."""
    first, rows = int(sides.bad.any(0).argmax()), sides.bad.any(1)
    mask, bad = sides.mask[rows], sides.bad[rows]
    if rows.sum() < 2 or mask[:, :first].sum() < max(LEAST_CELLS, rows.sum() / 2):
        return None
    at_once = bad[:, first].sum() >= MOST * mask[:, first].sum()
    if not at_once or bad[:, first:].sum() < MOST * mask[:, first:].sum():
        return None
    return Cause("row_outlier", "place", f"from column {first} on in {int(rows.sum())} rows")


def _parts(sides: Sides) -> tuple[Any, Any] | None:
    """Rows that disagree and rows that do not, where the latter plainly agree."""
    rows = sides.bad.any(1)
    calm = sides.mask.any(1) & ~rows
    if not calm.any():
        return None
    size = np.abs(sides.gap)
    usual = float(np.median(size[calm][sides.mask[calm]]))
    return None if np.median(size[sides.bad]) < FACTOR * usual else (rows, calm)


def few_rows(sides: Sides) -> Cause | None:
    """Few rows disagree, and the others plainly agree."""
    parts = _parts(sides)
    if parts is None:
        return None
    rows, total = int(parts[0].sum()), int(parts[0].sum() + parts[1].sum())
    if rows > FEW * total:
        return None
    return Cause("row_outlier", "rows", f"{rows} of {total} disagree, the others agree")


def some_rows(sides: Sides) -> Cause | None:
    """Many rows disagree all over, and others plainly agree: what neighbours in a pack do."""
    parts = _parts(sides)
    if parts is None or parts[1].sum() < LEAST_CELLS:
        return None
    rows, calm = parts
    if sides.bad[rows].sum() < MOST * sides.mask[rows].sum():
        return None
    pack = pack_of(sides)
    said = f"{int(rows.sum())} of {int(rows.sum() + calm.sum())} disagree, the others agree"
    said += f": all but the first of each {pack}" if pack else ""
    return Cause("cross_row_leakage", "rows", said, sides.mask & rows[:, None])


def pack_of(sides: Sides) -> int:
    """Rows in each pack where those that disagree are all but the first of theirs; 0 for none."""
    rows = sides.bad.any(1)
    calm = sides.mask.any(1) & ~rows
    return next((size for size in PACKS if _in_packs(rows, calm, size)), 0)


def _in_packs(rows: Any, calm: Any, size: int) -> bool:
    first = np.arange(len(rows)) % size == 0
    return not (rows & first).any() and not (calm & ~first).any()


def uniform(sides: Sides) -> Cause | None:
    """One offset on all tokens, small enough for a cast; or a gap that is small everywhere."""
    gap = sides.gap[sides.mask]
    middle = float(np.median(gap))
    scatter = float(np.median(np.abs(gap - middle)))
    if sides.bound < abs(middle) <= CAST and 4 * scatter <= abs(middle):
        return Cause("precision", "offset", f"{middle:.3g} on all tokens, within {scatter:.2g}")
    largest = float(np.abs(gap).max(initial=0.0))
    if largest > CAST:
        return None
    return Cause("precision", "largest gap", f"{largest:.3g}, as half precision has it")


def one_sided(sides: Sides, *, sign: float) -> Cause | None:
    """``wrong`` is above ``right`` on all tokens (below for ``sign`` -1), as a filter has it."""
    gap = sign * sides.gap[sides.mask]
    if not len(gap) or (gap < -sides.bound).mean() > 1 - ONE_SIDED or np.median(gap) <= 0:
        return None
    return Cause("sampling_filter", "one-sided", f"up by 0 to {gap.max():.3g}")


ONE_SIDED = 0.98
"""Share of the tokens that a filter leaves on its side; rounding moves the others."""


def sloped(sides: Sides) -> Cause | None:
    """The gap follows the log-prob itself: likely tokens up, unlikely ones down, or the reverse."""
    wrong, right = sides.wrong[sides.mask], sides.right[sides.mask]
    size = np.abs(wrong - right)
    kept = size <= FACTOR * max(float(np.median(size)), sides.bound)
    wrong, right = wrong[kept], right[kept]
    if len(wrong) < 3:
        return None
    slope = slope_of(wrong, right)
    gap, fit = right - wrong, (slope - 1.0) * (wrong - wrong.mean())
    power = float(np.sum((gap - gap.mean()) ** 2))
    share = float(fit @ fit) / power if power > 0 else 0.0
    if abs(slope - 1.0) <= SLOPE or share < FOLLOWS:
        return None
    return Cause("temperature_mismatch", "log-prob explains", f"{share:.0%} of the gap's variance")


SLOPE = 0.1
FOLLOWS = 0.5
"""A temperature shows where the slope is off by this much and explains this much of the gap."""


def slope_of(wrong: Any, right: Any) -> float:
    """Least-squares slope of ``right`` on ``wrong``; about 1/T for another temperature T."""
    if len(wrong) < 2:
        return 1.0
    centred = wrong - wrong.mean()
    spread = float(centred @ centred)
    return float(centred @ (right - right.mean()) / spread) if spread > 0 else 1.0
