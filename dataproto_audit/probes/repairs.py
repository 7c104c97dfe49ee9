"""What would explain a gap between two log-prob fields: each cause is undone and measured again.

All take the :class:`Sides` of a gap and answer with a :class:`Cause`, or None where the cause does
not fit. What counts is the share of cells that a repair sets right, never a mean: one value of a
hundred nats must not make a cause out of whatever moves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.probes.noise import Noise

ONE_COLUMN = (1, -1)
SHIFTS = (*ONE_COLUMN, 2, -2)
"""Columns that values may have moved by; far more are too short of cells to tell."""
MOST = 0.8
"""Share of the cells in question that a repair has to set right."""
LEAST_CELLS = 2
MAX_ROWS = 64
"""Rows for which another row is searched that fits."""
TELLING = 3
"""Cells from which a row does not fit another one by chance; twice as many in half precision."""
COLUMNS = 256
"""Columns that rows are compared on."""


@dataclass(frozen=True)
class Cause:
    """A cause that fits: its name, what was measured, and the cells ``[B,R]`` it explains."""

    name: str
    test: str
    measured: str
    cells: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Sides:
    """Two fields ``[B,R]``, the cells to look at, and those of them that disagree."""

    wrong: NDArray[np.float64]
    right: NDArray[np.float64]
    mask: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    noise: Noise

    @property
    def gap(self) -> NDArray[np.float64]:
        """``wrong - right``."""
        return self.wrong - self.right

    @property
    def bound(self) -> float:
        """What two healthy values of moderate size differ by, in nats."""
        return 2 * self.noise.mean if self.noise.token is None else self.noise.token

    def alike(self, left: Any, right: Any) -> Any:
        """Where two values agree within the noise."""
        return np.abs(left - right) <= self.bound + self.noise.relative * np.abs(right)


def _medians(before: Any, left: Any) -> str:
    return f"median gap {np.median(before):.3g} -> {np.median(left):.3g}"


def shift(sides: Sides) -> Cause | None:
    """A shift by one or two columns, of all rows or of those that disagree."""
    best: tuple[float, int, str] | None = None
    width = sides.wrong.shape[1]
    rows: Any = sides.bad.any(1)
    for by in SHIFTS:
        if abs(by) >= width:
            continue
        kept = slice(max(0, by), width + min(0, by))
        moved = slice(max(0, -by), width + min(0, -by))
        both = sides.mask[rows][:, kept] & sides.mask[rows][:, moved]
        if both.sum() < LEAST_CELLS:
            continue
        new, right = sides.wrong[rows][:, moved][both], sides.right[rows][:, kept][both]
        share = float(sides.alike(new, right).mean())
        if share >= MOST and (best is None or share > best[0]):
            said = _medians(np.abs(sides.gap[sides.bad]), np.abs(new - right))
            best = (share, by, f"{said}, {share:.0%} of {int(both.sum())} tokens fit")
    if best is None:
        return None
    _, by, said = best
    source = np.arange(width) - by
    inside = (source >= 0) & (source < width)
    taken = sides.wrong[:, source.clip(0, width - 1)]
    cells = sides.mask & (~inside | (sides.wrong != taken))
    both = inside & sides.mask & sides.mask[:, source.clip(0, width - 1)]
    if (both & ~sides.alike(taken, sides.right))[~rows].any():
        cells &= rows[:, None]  # the other rows are right as they are
    return Cause("shift", f"shift by {by:+d}", said, cells)


def row_permutation(sides: Sides) -> Cause | None:
    """Rows that disagree hold the values of other rows."""
    wrong, right = sides.wrong[:, :COLUMNS], sides.right[:, :COLUMNS]
    mask = sides.mask[:, :COLUMNS]
    telling = TELLING if sides.bound < 0.01 else 2 * TELLING
    own = (mask & (wrong != 0)).sum(1) >= telling
    rows = np.flatnonzero(sides.bad.any(1) & own)[:MAX_ROWS]
    if len(rows) < 2:
        return None
    left = []
    for row in rows:
        both = mask & mask[row]
        enough = both.sum(1) >= telling
        enough[row] = False
        fits = (sides.alike(wrong[row], right) | ~both).all(1) & enough
        if fits.any():
            other = int(fits.argmax())
            left.append(np.abs(wrong[row] - right[other])[both[other]].max())
    if len(left) < max(2, len(rows) / 2):
        return None
    said = _medians(np.abs(sides.gap[sides.bad]), left)
    return Cause("row_permutation", "rows matched anew",
                 f"{said}, {len(left)} of {len(rows)} rows fit another one")  # fmt: skip


def placeholder(sides: Sides) -> Cause | None:
    """One side is exactly 0 wherever the two disagree."""
    zero = (sides.wrong == 0) | (sides.right == 0)
    count, total = int((zero & sides.bad).sum()), int(sides.bad.sum())
    if count < MOST * total:
        return None
    return Cause("placeholder_log_prob", "exactly 0.0", f"{count} of {total} cells")
