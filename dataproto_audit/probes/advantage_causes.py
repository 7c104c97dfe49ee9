"""Why group-relative advantages are not what they should be: each cause is tested.

A cause is applied to the recomputation (another rule, other groups, another sign, another row
order); it is named first when that gives what the batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.probes.return_causes import FITS, Explained, close, largest, row_order
from dataproto_audit.reference import rules
from dataproto_audit.reference.groups import GroupStats, stats_of_codes

Rule = Callable[[GroupStats], Tensor]
NORMALISED = "wrong_group_normalisation"


def explain_group_advantages(
    groups: GroupStats, rule: Rule, found: Any, on: Any, bad: Any, want: Any
) -> Explained:
    """Causes of ``found [B,R]``, which is not ``want [B,1]`` at the cells ``bad``."""
    if not np.isfinite(found[bad]).all():
        return Explained(("non_finite", NORMALISED))
    whole = np.broadcast_to(want, found.shape)
    before = largest(found, whole, on & np.isfinite(whole))
    per_row = _per_row(found, on)
    if per_row is None:  # one advantage a row is what every rule gives: cells were changed
        return Explained((NORMALISED,), {"rows": "advantages are not constant along a row"})
    for cause, name, tried in _tries(groups, rule, per_row, on.any(1), want[:, 0]):
        spread = np.broadcast_to(tried[:, None], found.shape)
        if close(found, spread, on):
            left = largest(found, spread, on)
            return Explained((cause,), {name: f"max error {before:.3g} -> {left:.3g}"})
    if (found[bad] == 0).all():
        return Explained(("zero_advantage", NORMALISED))
    order = _row_order(found, whole, on, bad)
    if order:
        return Explained(("row_permutation", NORMALISED), {"rows matched anew": order})
    return Explained((NORMALISED, "row_permutation"))


def _per_row(found: Any, on: Any) -> Any:
    """The advantage of each row ``[B]``, NaN without trained tokens; None if it is not one."""
    rows = on.any(1)
    high = np.where(on, found, -np.inf).max(1)
    low = np.where(on, found, np.inf).min(1)
    if not (high == low)[rows].all():
        return None
    return np.where(rows, high, np.nan).astype(np.float64)


def _tries(
    groups: GroupStats, rule: Rule, per_row: Any, rows: Any, want: Any
) -> Iterator[tuple[str, str, Any]]:
    """Cause, what it is called in the evidence, and the advantage of each row it would give."""
    yield "wrong_sign", "with the other sign", -want
    kept = torch.from_numpy(np.flatnonzero(rows))  # rows without trained tokens say nothing
    judged = stats_of_codes(groups.scores[kept], groups.codes[kept], groups.lengths[kept])
    fits = rules.fit_group_rules(judged, torch.from_numpy(per_row)[kept])
    if fits and fits[0].max_error < FITS:
        name = fits[0].rule.name
        yield NORMALISED, f"rule that fits: {name}", fits[0].rule(groups).numpy()
    for cause, name, codes in _regrouped(groups):
        yield cause, name, rule(stats_of_codes(groups.scores, codes, groups.lengths)).numpy()
    deviation = groups.deviation.numpy()
    scale = _one_scale(deviation, per_row, rows)
    if scale:
        yield NORMALISED, f"scores less the mean, times {scale:.6g}", deviation * scale


def _regrouped(groups: GroupStats) -> Iterator[tuple[str, str, Tensor]]:
    """Cause, name and group codes of groups that are not those of the uid."""
    rows = len(groups.scores)
    at = torch.arange(rows)
    yield NORMALISED, "all rows as one group", torch.zeros(rows, dtype=torch.int64)
    sizes = groups.size.long()
    n = int(sizes[0]) if rows else 1
    if n > 1 and bool((sizes == n).all()):
        yield "tiled_groups", f"groups of {n} consecutive rows", at // n
        yield "tiled_groups", f"groups of every {rows // n}th row", at % (rows // n)
    yield "uid_after_repeat", "every row as its own group", at


def _one_scale(deviation: Any, per_row: Any, rows: Any) -> float | None:
    """The factor between deviations from the group mean and the advantages; None for none."""
    judged = rows & (np.abs(deviation) > FITS) & np.isfinite(per_row)
    if np.count_nonzero(judged) < 2:
        return None
    return float(np.median(per_row[judged] / deviation[judged]))


def _row_order(found: Any, whole: Any, on: Any, bad: Any) -> str:
    """As :func:`row_order`, where the wrong rows also hold each other's values, each once."""
    rows = np.flatnonzero(bad.any(1))
    mine = np.sort([found[row][on[row]][0] for row in rows])
    theirs = np.sort([whole[row][on[row]][0] for row in rows])
    if not np.allclose(mine, theirs, atol=FITS):
        return ""
    return row_order(found, whole, np.ones_like(on), bad & np.isfinite(whole)) or (
        f"{len(rows)} rows hold each other's values"
    )
