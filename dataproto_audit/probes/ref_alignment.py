"""Whether the reference's log-probs are in place once the policy has moved (DPA304, DPA310).

At the first step old and reference log-probs are equal and every cell is judged. Later they differ
by what was learned, but still follow each other: both score the same tokens. Where they do not, and
shifted by columns or taken from another row they do, they are out of place. Looked at are a sample
of the rows, and the rows that are farthest from the reference.

Not covered: a reference of other weights or temperature; a shift in few rows of fewer tokens than
:data:`LEAST_IN_ROW`, an exchange of rows of fewer than :data:`LEAST_IN_FEW`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.outliers import TO_REFERENCE
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.repairs import COLUMNS, MAX_ROWS, SHIFTS
from dataproto_audit.probes.scan import Gap

FIELDS = ("old_log_probs", "ref_log_prob", "response_mask")
NEAR = 0.05
"""Nats. Mean gap up to which the policy has hardly moved, and nothing can be far out of place."""
SAMPLED = 1 << 14
"""Cells of the rows that are looked at in good health."""
LEAST = 64
LEAST_IN_ROW = 24
LEAST_IN_FEW = 8
"""Cells below which a correlation may be chance: of the batch; of one row; and of rows that are
exchanged, which tell of each other, where most rows do follow the reference."""
APART, TOGETHER = (0.3, 0.5), (0.6, 0.8)
"""Correlations below which log-probs do not follow each other, and from which they do: those of all
cells, and of one row, where fewer cells tell less."""
NEARER = (1.5, 2.0)
"""What is put in its place comes nearer by this factor: all cells, and one row."""


@dataclass(frozen=True)
class Pairs:
    """Cells of old log-probs ``[b,R]`` beside those of the reference, and where both are known."""

    old: NDArray[np.float64]
    ref: NDArray[np.float64]
    on: NDArray[np.bool_]

    def moved(self, by: int) -> Pairs:
        """The same with the reference's columns moved by ``by``."""
        on = self.on & np.roll(self.on, by, 1)
        on[:, slice(by) if by > 0 else slice(by, None)] = False  # came from the other end
        return Pairs(self.old, np.roll(self.ref, by, 1), on)

    def correlation(self, axis: int) -> Any:
        """Pearson correlation within rows (``axis`` 1), one for each row; or within columns (0),
        one for all, so that what all tokens of one place have in common does not count."""
        x, y = (_centred(values, self.on, axis) for values in (self.old, self.ref))
        over = None if axis == 0 else 1
        spread = np.sqrt((x * x).sum(over) * (y * y).sum(over))
        return np.where(spread > 0, (x * y).sum(over) / np.where(spread > 0, spread, 1.0), 0.0)

    def likely(self) -> Pairs:
        """Probabilities: of them no single value is many times as far off as the others."""
        return Pairs(np.exp(self.old), np.exp(self.ref), self.on)

    def gap(self, axis: int) -> Any:
        """Mean of ``|old - ref|``, of each row (``axis`` 1) or of all."""
        over = None if axis == 0 else 1
        size = np.where(self.on, np.abs(self.old - self.ref), 0.0).sum(over)
        return size / np.maximum(self.cells(axis), 1)

    def cells(self, axis: int) -> Any:
        """How many cells there are, of each row (``axis`` 1) or in all."""
        return self.on.sum(None if axis == 0 else 1)


def _centred(values: NDArray[np.float64], on: NDArray[np.bool_], axis: int) -> Any:
    values = np.where(on, values, 0.0)
    mean = values.sum(axis, keepdims=True) / np.maximum(on.sum(axis, keepdims=True), 1)
    return np.where(on, values - mean, 0.0)


def _pairs(view: BatchView, rows: Any) -> Pairs:
    old, ref, mask = (view.numpy(name)[rows] for name in FIELDS)
    on = (mask != 0) & np.isfinite(old) & np.isfinite(ref)
    old, ref = (np.where(on, values, 0.0).astype(np.float64) for values in (old, ref))
    return Pairs(old, ref, on)


def _least(pairs: Pairs) -> int:
    """Cells from which one row tells."""
    told = pairs.cells(1) >= LEAST_IN_FEW
    usual = np.median(pairs.correlation(1)[told]) if told.any() else 0.0
    return LEAST_IN_FEW if usual >= TOGETHER[1] else LEAST_IN_ROW


def _apart(pairs: Pairs, axis: int) -> Any:
    """Where the reference does not follow as it is."""
    return pairs.correlation(axis) < APART[axis]


def _better(pairs: Pairs, apart: Any, other: Pairs, axis: int, least: int) -> Any:
    """Of what is ``apart``, where the reference follows as in ``other``."""
    far = (other.cells(axis) >= least) & apart
    if not np.any(far):
        return far
    same = Pairs(pairs.old, pairs.ref, other.on)
    follows = _apart(same, axis) & (other.correlation(axis) >= TOGETHER[axis])
    follows &= other.likely().correlation(axis) >= TOGETHER[0]
    return far & follows & (other.gap(axis) * NEARER[axis] < same.gap(axis))


def _shift(pairs: Pairs, apart: Any, axis: int, least: int) -> int:
    """The shift that puts most of what is ``apart`` in place; 0 without one."""
    tried = (by for by in SHIFTS if abs(by) < pairs.old.shape[1])
    placed = {by: int(np.sum(_better(pairs, apart, pairs.moved(by), axis, least))) for by in tried}
    best = max(placed, key=placed.__getitem__, default=0)
    return best if placed.get(best) else 0


def _of_other_rows(pairs: Pairs, least: int) -> NDArray[np.bool_]:
    """Rows that were exchanged: each follows the reference's of another, and another follows its.

    Looked for among rows that do not follow their own, as all of an exchange must.
    """
    out = np.zeros(len(pairs.old), bool)
    far = np.flatnonzero((pairs.cells(1) >= least) & _apart(pairs, 1))[:MAX_ROWS]
    part = Pairs(pairs.old[far], pairs.ref[far], pairs.on[far])
    fits = np.zeros((len(far), len(far)), bool)
    for row in range(len(far)):
        old, ref = (np.broadcast_to(v[row], part.old.shape) for v in (part.old, part.ref))
        on = part.on & part.on[row]
        own = Pairs(old, ref, on)
        fits[row] = _better(own, _apart(own, 1), Pairs(old, part.ref, on), 1, least)
    np.fill_diagonal(fits, False)
    exchanged = fits.any(0) & fits.any(1)
    if exchanged.sum() >= len(far) / 2:
        out[far[exchanged]] = True
    return out


def _looked_at(view: BatchView, gap: Gap) -> NDArray[np.intp]:
    """Rows spread over the batch, and those whose largest gap is beyond the usual."""
    count = max(2, min(view.rows, SAMPLED // max(1, view.numpy(FIELDS[0]).shape[1])))
    spread = np.linspace(0, view.rows - 1, count).astype(np.intp)
    far = np.flatnonzero(gap.row_max > NEARER[1] * np.median(gap.row_max))
    farthest = far[np.argsort(-gap.row_max[far], kind="stable")[:MAX_ROWS]]
    return np.union1d(spread, farthest)


@probe(
    "DPA304",
    stages=("ref_log_prob",),
    needs=FIELDS,
    stats=(TO_REFERENCE,),
    applies=lambda ctx: (
        "old_ref_first says more" if ctx.settings.ref_from_actor and ctx.step == 1 else ""
    ),
)
def ref_in_place(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """ref_log_prob [B,R] follows old_log_probs where it stands, not columns or rows away."""
    gap: Gap = stats[TO_REFERENCE.name]
    if gap.mean(gap.absolute) <= NEAR:
        return
    rows = _looked_at(view, gap)
    pairs = _pairs(view, rows)
    if (apart := _apart(pairs, 0)) and (by := _shift(pairs, apart, 0, LEAST)):
        yield _out_of_columns(ctx, _pairs(view, slice(None)), by, 0)
        return
    if pairs.old.shape[1] < LEAST_IN_FEW or not (apart := _apart(pairs, 1)).any():
        return
    if by := _shift(pairs, apart, 1, LEAST_IN_ROW):
        yield _out_of_columns(ctx, _pairs(view, slice(None)), by, 1)
        return
    least = _least(pairs)
    width = slice(COLUMNS)
    moved = _of_other_rows(
        Pairs(pairs.old[:, width], pairs.ref[:, width], pairs.on[:, width]), least
    )
    if not moved.any():
        return
    cells = np.zeros(view.numpy(FIELDS[0]).shape, bool)
    cells[rows[moved]] = pairs.on[moved]
    yield ctx.fail(
        FIELDS[1],
        code="DPA310",
        cells=cells,
        expected="log-probs that follow old_log_probs of their own row",
        actual=f"in {int(moved.sum())} of {len(rows)} rows looked at they follow another row's",
        causes=("row_permutation", "row_outlier"),
        hint="undo the order of micro-batches or of balancing",
    )


def _out_of_columns(ctx: Context, pairs: Pairs, by: int, axis: int) -> Finding:
    moved = pairs.moved(by)
    if axis == 0:  # all rows, but those that are plainly in place
        rows = (pairs.cells(1) < LEAST_IN_ROW) | (pairs.correlation(1) < TOGETHER[1])
    else:
        rows = _better(pairs, _apart(pairs, 1), moved, 1, LEAST_IN_ROW)
    on = moved.on & rows[:, None]
    before, after = Pairs(pairs.old, pairs.ref, on), Pairs(moved.old, moved.ref, on)
    return ctx.fail(
        FIELDS[1],
        cells=pairs.on & rows[:, None],
        expected="log-probs that follow old_log_probs in their columns",
        actual=f"in {int(rows.sum())} rows they follow those of other columns",
        evidence={
            f"shift by {by:+d}": f"mean gap {before.gap(0):.3g} -> {after.gap(0):.3g} nats",
            "correlation": f"{before.correlation(0):.2f} -> {after.correlation(0):.2f}",
        },
        causes=("shift",),
        hint="column t of ref_log_prob must score responses[:, t]",
    )
