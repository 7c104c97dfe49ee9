"""Why advantages or returns of a recursion are not what they should be: each cause is tested.

A cause is applied to the recomputation; it is named first when that gives what the batch holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataproto_audit.probes.estimates import GAE, PLUS, REMAX, USUAL, WHITENED, Estimate
from dataproto_audit.reference.recursions import (
    discounted,
    gae_terms,
    mean_and_std,
    next_values,
    until_gaps,
)

MAX_ROWS = 32
"""Wrong rows that a cause is tried on, those with the fewest tokens first."""
FITS = 1e-4
"""Largest difference, relative to values above 1, at which a cause explains a cell."""
TELLING = 2
"""Rows, or pairs of cells, from which a fit is no accident."""


@dataclass
class Explained:
    """Causes, the likely one first, and the numbers that speak for it."""

    causes: tuple[str, ...]
    evidence: dict[str, Any] = field(default_factory=dict)
    hint: str = ""


def close(found: Any, want: Any, cells: Any) -> bool:
    """True when the two agree on ``cells``, of which there are some."""
    found, want = found[cells], want[cells]
    error = np.abs(found - want)
    return bool(len(found)) and bool((error <= FITS * np.maximum(1.0, np.abs(want))).all())


def largest(found: Any, want: Any, cells: Any) -> float:
    """The largest difference on ``cells``."""
    return float(np.abs(found - want)[cells].max(initial=0.0))


# -- returns ---------------------------------------------------------------------------------------


def explain_returns(made: Estimate, bad: Any, attended: Any) -> Explained:
    """Which recursion gave the returns that the batch holds."""
    counts = made.on.sum(1)
    rows = np.flatnonzero(bad.any(1))
    rows = rows[np.argsort(counts[rows], kind="stable")][-MAX_ROWS:]
    few = made.of_rows(rows)
    before = largest(few.returns, few.want_returns, few.on)
    for cause, name, tried in _recursions(few, None if attended is None else attended[rows]):
        if close(few.returns, tried, few.on):
            left = largest(few.returns, tried, few.on)
            return Explained((cause,), {name: f"max error {before:.3g} -> {left:.3g}"})
    order = row_order(made.returns, made.want_returns, made.on, bad)
    if order:
        return Explained(("row_permutation",), {"rows matched anew": order})
    usual = ("wrong_discount", "gae_over_masked") if made.name in (GAE, PLUS) else ()
    return Explained((*usual, "returns_reset_at_gap", "row_permutation"))


def _recursions(few: Estimate, attended: Any) -> Iterator[tuple[str, str, Any]]:
    """Cause, what it is called in the evidence, and the returns that it would have given."""
    yield "wrong_sign", "with the other sign", -few.want_returns
    if few.name == GAE:
        yield "wrong_whitening", "whitened advantages plus values", few.advantages + few.values
    terms = few.rewards
    if few.name == GAE:
        terms = few.rewards + (few.gamma or 0.0) * next_values(few.values, few.on) - few.values
    factor = (few.gamma or 0.0) * (few.lam or 0.0) if few.name == GAE else few.gamma or 0.0
    factor = 1.0 if few.name == REMAX else factor
    yield "returns_reset_at_gap", "starting again at every masked token", (
        until_gaps(terms, few.on, factor) + few.values
    )  # fmt: skip
    if few.name not in (GAE, PLUS):
        return
    walks = [("gae_over_masked", "walking over every column", np.ones_like(few.on))]
    if attended is not None:
        walks.insert(0, ("gae_over_masked", "walking over masked tokens", attended | few.on))
    for cause, name, walked in walks:
        yield cause, name, _walked(few, walked, few.gamma or 0.0, few.lam or 0.0)
    if few.name == GAE:
        yield "gae_over_masked", "bootstrapping from the column behind the end", few.values + (
            gae_terms(few.rewards, few.values, few.on, gamma=few.gamma or 0.0, lam=few.lam or 0.0,
                      beyond=True)
        )  # fmt: skip
    others = list(_discounts(few))
    for cause, name, walked in [("wrong_discount", "", few.on), *walks]:
        for gamma, lam in others:
            told = f"gamma {gamma:g}" + (f", lambda {lam:g}" if few.name == GAE else "")
            yield cause, " with ".join(filter(None, (name, told))), _walked(few, walked, gamma, lam)


def _walked(few: Estimate, walked: Any, gamma: float, lam: float) -> Any:
    if few.name == GAE:
        return few.values + gae_terms(few.rewards, few.values, walked, gamma=gamma, lam=lam)
    return discounted(few.rewards, walked, gamma)


def _discounts(few: Estimate) -> Iterator[tuple[float, float]]:
    """Other discounts: those that the last two tokens of each row tell, then usual ones."""
    gamma, lam = few.gamma or 0.0, few.lam or 0.0
    width = few.on.shape[1]
    rows = np.flatnonzero(few.on.sum(1) >= 2)
    if len(rows):
        on = few.on[rows]
        last = width - 1 - on[:, ::-1].argmax(1)
        at = np.arange(len(rows))
        rest = on.copy()
        rest[at, last] = False
        before = width - 1 - rest[:, ::-1].argmax(1)

        def value(array: Any, column: Any) -> Any:
            return array[rows][at, column]

        r, v, g = few.rewards, few.values, few.returns
        if few.name == GAE:  # A = r + gamma V' - V + gamma lambda A', solved for either
            found = value(g, before) - value(r, before)
            rest_of = value(g, last) - value(v, last)
            told = (
                _middle((found - gamma * value(v, last)) / (gamma * rest_of)),
                _middle(found / (value(v, last) + lam * rest_of)),
            )
            if told[0] is not None:
                yield gamma, told[0]
            if told[1] is not None:
                yield told[1], lam
        else:
            solved = _middle((value(g, before) - value(r, before)) / value(g, last))
            if solved is not None:
                yield solved, lam
    lams = USUAL if few.name == GAE else (lam,)
    yield from ((g, x) for g in dict.fromkeys((gamma, *USUAL)) for x in dict.fromkeys((lam, *lams)))


def _middle(values: Any) -> float | None:
    """The median of what is finite, a discount; None where that is none."""
    kept = values[np.isfinite(values)]
    if not len(kept):
        return None
    middle = float(np.round(np.median(kept), 6))
    return middle if 0.0 <= middle <= 1.5 else None


# -- advantages ------------------------------------------------------------------------------------


def explain_advantages(
    made: Estimate, bad: Any, want: Any, *, ranks: int | None = None
) -> Explained:
    """What was done to the right returns on the way to the advantages."""
    found, on = made.advantages, made.on
    if not np.isfinite(found[bad]).all():
        return Explained(("non_finite",))
    before = largest(found, want, on)

    def told(cause: str, name: str, tried: Any) -> Explained | None:
        if not close(found, tried, on):
            return None
        left = largest(found, tried, on)
        return Explained((cause,), {name: f"max error {before:.3g} -> {left:.3g}"})

    raw = made.raw
    scaled = made.name in WHITENED
    unscaled = "wrong_whitening" if scaled else "wrong_group_normalisation"
    tries = [("wrong_sign", "with the other sign", -want), ("wrong_sign", "raw", -raw)]
    tries += [(unscaled, "not whitened", raw)] if scaled else []
    if made.name == REMAX:
        tries.append((unscaled, "without the greedy baseline", raw + made.baselines))
    tries += [(unscaled, name, part) for name, part in _parts(made, raw, ranks)] if scaled else []
    for cause, name, tried in tries:
        explained = told(cause, name, tried)
        if explained:
            return explained
    order = row_order(found, want, on, bad)
    if order:
        return Explained(("row_permutation",), {"rows matched anew": order})
    line = _line(raw[on], found[on]) if scaled else None
    if line is not None:
        mean, std = mean_and_std(raw, on)
        return Explained(
            ("wrong_whitening",),
            {"mean and std used": f"{line[0]:.6g}, {line[1]:.6g}",
             "of the trained tokens": f"{mean:.6g}, {std:.6g}", **_counted(made, raw, line)},
        )  # fmt: skip
    rest = ("wrong_whitening",) if scaled else ()
    return Explained((*rest, "wrong_group_normalisation", "row_permutation"))


def _parts(made: Estimate, raw: Any, ranks: int | None) -> Iterator[tuple[str, Any]]:
    """Names and results of whitening pieces of the batch by themselves."""
    rows = len(raw)
    for count in dict.fromkeys([ranks or 0, 2, 4, 8, rows]):
        if not 1 < count <= rows:
            continue
        pieces, whole = np.array_split(np.arange(rows), count), np.zeros_like(raw)
        for piece in pieces:
            if np.count_nonzero(made.on[piece]) > 1:
                mean, std = mean_and_std(raw[piece], made.on[piece])
                whole[piece] = (raw[piece] - mean) / std
        yield f"whitened in {count} pieces of the batch", np.where(made.on, whole, 0.0)


def _line(raw: Any, found: Any) -> tuple[float, float] | None:
    """Mean and scale with found = (raw - mean) / scale at every cell; None for none."""
    centred = raw - raw.mean()
    spread = float(centred @ centred)
    if spread <= 0 or len(raw) <= TELLING or not np.isfinite(found).all():
        return None
    slope = float(centred @ (found - found.mean()) / spread)
    offset = float(found.mean() - slope * raw.mean())
    tried = slope * raw + offset
    if slope == 0 or not (np.abs(found - tried) <= FITS * np.maximum(1.0, np.abs(tried))).all():
        return None
    return -offset / slope, 1.0 / slope


def _counted(made: Estimate, raw: Any, line: tuple[float, float]) -> dict[str, Any]:
    """Says so where the numbers are those of all columns, padding included."""
    mean, std = float(raw.mean()), float(raw.std(ddof=1))
    if abs(mean - line[0]) <= 1e-3 * std and abs(std - line[1]) <= 1e-3 * std:
        return {"of all columns, padding included": f"{mean:.6g}, {std:.6g}"}
    return {}


def row_order(found: Any, want: Any, on: Any, bad: Any) -> str:
    """Says so where every wrong row holds what belongs to another row with the same mask."""
    rows = np.flatnonzero(bad.any(1))
    if len(rows) < TELLING:
        return ""
    for row in rows[:MAX_ROWS]:
        cells = on[row]
        error = np.abs(found[row] - want)[:, cells].max(1, initial=0.0)
        error[row] = np.inf
        if not (error <= FITS * np.maximum(1.0, np.abs(want[:, cells]).max(1, initial=0.0))).any():
            return ""
    return f"each of {min(len(rows), MAX_ROWS)} rows is another row's"
