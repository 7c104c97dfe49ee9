"""How two log-prob fields relate over shared prefixes: by a factor, by an offset, or not at all.

Log-probs of distinct tokens after one prefix share one normaliser, so it cancels in their
differences. With another temperature these differences are multiplied by one number; a sampling
filter, which only renormalises, leaves them as they are; other weights change them at will. All
three give one prefix and token one gap, whichever row it is in; dropout, and rows that see each
other, do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.trie import NEEDS, shared_cells


@dataclass(frozen=True)
class Relation:
    """``free`` counts tokens less prefixes: what is left to test with once normalisers cancel.

    Over those, ``right - mean`` is about ``slope * (wrong - mean)``, with the root mean squares
    ``apart`` of the difference before and ``left`` after that fit. ``repeated`` counts tokens that
    several rows have after one prefix; over the share ``scattered`` of them the gap of the two
    fields depends on the row.
    """

    free: int
    slope: float
    apart: float
    left: float
    repeated: int
    scattered: float


def relation(
    view: BatchView, ctx: Context, wrong: str, right: str, keep: NDArray[np.bool_], bound: float
) -> Relation | None:
    """The :class:`Relation` of two fields ``[B,R]`` over the cells ``keep [B,R]``.

    None where the batch has no shared prefixes to look at. ``bound`` is what one gap may scatter.
    """
    if any(not view.has(name) or name in ctx.broken for name in NEEDS):
        return None
    cells = shared_cells(view, ctx)
    if not len(cells.start):
        return None
    pair = np.repeat(np.arange(len(cells.start)), cells.sizes())
    used = keep[cells.row, cells.column]
    pair, place = pair[used], (cells.row[used], cells.column[used])
    if not len(pair):
        return None
    one, other = (view.numpy(name)[place].astype(np.float64) for name in (wrong, right))
    number = np.bincount(pair, minlength=len(cells.start))
    seen = np.flatnonzero(number)
    means = [np.bincount(pair, v, len(number))[seen] / number[seen] for v in (one, other)]
    _, prefix = np.unique(cells.prefix_of_pair[seen], return_inverse=True)
    own, others = (_centred(mean, prefix) for mean in means)
    free, power = len(seen) - int(prefix.max()) - 1, float(own @ own)
    slope = float(own @ others) / power if power > 0 else 1.0
    apart, left = (
        float(np.sqrt(np.sum((others - s * own) ** 2) / max(free, 1))) for s in (1.0, slope)
    )
    gap, several = one - other, number[seen] > 1
    high, low = np.full(len(number), -np.inf), np.full(len(number), np.inf)
    np.maximum.at(high, pair, gap)
    np.minimum.at(low, pair, gap)
    spread = (high - low)[seen][several]
    repeated = int(several.sum())
    return Relation(
        free=free, slope=slope, apart=apart, left=left, repeated=repeated,
        scattered=float((spread > bound).mean()) if repeated else 0.0,
    )  # fmt: skip


def _centred(values: Any, group: Any) -> Any:
    count = np.bincount(group)
    return values - (np.bincount(group, values) / count)[group]
