"""Differential diagnosis of a log-prob gap: causes are tested, and those that fit come first.

In this order: repairs that set the cells right again (shift, other rows, zeros that stand for
nothing); where the two disagree (one place, few rows, rows of older weights, neighbours in a
pack); and, where they disagree everywhere, how: by one offset, by a factor (temperature), by an
offset for each prefix (sampling filter), differently in each row (dropout). What is left is other
weights. Which of the two sides is wrong is told by shared prefixes, where one contradicts itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes import repairs, shapes
from dataproto_audit.probes.context import Context, row_numbers
from dataproto_audit.probes.noise import Noise
from dataproto_audit.probes.relation import Relation, relation
from dataproto_audit.probes.repairs import Cause, Sides
from dataproto_audit.probes.trie import contradictions

WRITERS = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
    "update_log_probs": "update_actor",
}
USUAL = {
    "rollout_log_probs": ("stale_rollout_weights", "temperature_mismatch", "precision"),
    "ref_log_prob": (
        "reference_not_frozen", "temperature_mismatch", "dropout_on", "precision",
    ),
    "update_log_probs": ("dropout_on", "temperature_mismatch", "precision"),
}  # fmt: skip
"""What is usual where nothing fits, by the field that tells: the first that is one of the two."""
TESTS = 3
"""Tokens beyond one a prefix from which a factor or an offset is tested."""
FIT = 0.05
"""A factor or an offset fits when it leaves at most this share of the gap."""
REPEATED = 2
"""Tokens that rows share from which scatter between rows is a fact."""


def explain_gap(
    view: BatchView,
    ctx: Context,
    bad: Any,
    *,
    suspect: str,
    witness: str,
    noise: Noise,
    unknown: Sequence[str] = (),
) -> Iterable[Finding]:
    """One finding about ``suspect [B,R]``, whose cells ``bad [B,R]`` disagree with ``witness``.

    ``unknown`` settings could explain a gap by themselves; with any, only a repair makes it a
    ``fail``. Where shared prefixes convict one side, its writer is the stage at fault.
    """
    evidence: dict[str, Any] = {}
    own, other = (contradictions(view, ctx, name, noise) for name in (suspect, witness))
    if own == 0 and other:
        suspect, witness, own, other = witness, suspect, other, own
    convicted = bool(own) and other == 0
    if convicted:
        evidence["contradicts itself over shared prefixes"] = f"{suspect}, {own} times"
    sides = _sides(view, bad, suspect, witness, noise)
    size = np.abs(sides.gap)[sides.mask]
    evidence |= {
        "max gap": float(size.max(initial=0.0)),
        "mean gap": float(size.mean()),
        "noise model": noise.name,
        "bound per token": "none" if noise.token is None else noise.token,
        "bound on mean": noise.mean,
    }
    undone = [cause for cause in _repaired(sides) if cause]
    found = undone or [cause for cause in _placed(view, sides, convicted, suspect) if cause]
    found = found or list(_everywhere(view, ctx, sides, suspect, witness))
    for cause in found:
        if cause.test:
            evidence.setdefault(cause.test, cause.measured)
    evidence["slope"] = shapes.slope_of(sides.wrong[sides.mask], sides.right[sides.mask])
    causes = [c.name for c in found] + _usual(suspect, witness)
    named = next((c.cells for c in found[:1] if c.cells is not None), sides.bad)
    shifted = causes[0] == "shift"
    open_question = unknown and not undone
    hints = [
        f"column t of {suspect} must score responses[:, t]" if shifted else "",
        f"tell {', '.join(unknown)}: they could explain the gap" if open_question else "",
    ]
    yield ctx.fail(
        suspect,
        code="DPA304" if shifted else "",
        severity="info" if open_question else None,
        stage=WRITERS.get(suspect, "") if convicted else "",
        cells=named,
        expected=f"{suspect} equal to {witness} within {noise.name}",
        actual=f"{int(named.sum())} tokens in {int(named.any(1).sum())} rows disagree",
        evidence=evidence,
        causes=causes,
        hint="; ".join(filter(None, hints)),
    )


def _sides(view: BatchView, bad: Any, suspect: str, witness: str, noise: Noise) -> Sides:
    wrong, right = (view.numpy(name).astype(np.float64) for name in (suspect, witness))
    mask = (view.numpy("response_mask") != 0) & np.isfinite(wrong) & np.isfinite(right)
    if "update_log_probs" in (suspect, witness):  # the others come from a policy that has moved
        mask &= (view.numpy("mini_batch") == 0)[:, None]
    wrong, right = (np.where(np.isfinite(v), v, 0.0) for v in (wrong, right))
    return Sides(wrong, right, mask, bad, noise)


def _repaired(sides: Sides) -> Iterable[Cause | None]:
    yield repairs.shift(sides)
    yield repairs.row_permutation(sides)
    yield repairs.placeholder(sides)


def _older(view: BatchView, sides: Sides) -> Cause | None:
    """Exactly rows of older weights disagree, as far as they have anything to disagree about."""
    versions, rows = row_numbers(view, "weight_version"), sides.bad.any(1)
    if versions is None or not (~rows & sides.mask.any(1)).any():
        return None
    older = versions < versions.max()
    if not older.any() or (rows & ~older).any():
        return None
    said = f"{int(rows.sum())} of {int(older.sum())} rows of older weights disagree, no others"
    return Cause("stale_rollout_weights", "weight_version", said)


def _placed(view: BatchView, sides: Sides, convicted: bool, suspect: str) -> Iterable[Cause | None]:
    """Causes that the place of the disagreement tells."""
    older = _older(view, sides)
    place = shapes.one_place(sides) or shapes.from_a_column(sides)
    few, some = shapes.few_rows(sides), shapes.some_rows(sides)
    if not (older or place or few or some):
        return
    yield older
    yield shapes.uniform(sides)
    yield place
    yield few
    if some and not (place or few):
        if convicted and suspect == "rollout_log_probs":
            yield replace(some, name="stale_rollout_weights", cells=None)
        if not shapes.pack_of(sides):
            rows = sides.bad.any(1, keepdims=True)
            yield shapes.sloped(replace(sides, mask=sides.mask & rows))
        yield some
    for name in ("row_outlier", "cross_row_leakage", *(("shift",) if place else ())):
        yield Cause(name, "", "")


def _everywhere(
    view: BatchView, ctx: Context, sides: Sides, suspect: str, witness: str
) -> Iterable[Cause]:
    """Causes of a gap on all rows, told by its shape."""
    small = shapes.uniform(sides)
    if small:
        yield small
    sign = {suspect: 1.0, witness: -1.0}.get("rollout_log_probs")
    filtered = shapes.one_sided(sides, sign=sign) if sign else None
    related = relation(view, ctx, suspect, witness, sides.mask, sides.bound)
    verdict = _related(related, filtered, sides) if related else None
    if verdict:
        yield verdict
        return
    sloped = shapes.sloped(sides)
    if sloped and not (related and related.free >= TESTS):
        yield sloped
    if filtered:
        yield filtered
    if sloped:
        yield sloped


def _related(found: Relation, filtered: Cause | None, sides: Sides) -> Cause | None:
    """What shared prefixes say: differently in each row, by a factor, by an offset, or nothing."""
    if found.repeated >= REPEATED and found.scattered > 0.5:
        said = f"the gap of {found.scattered:.0%} of {found.repeated} shared tokens is the row's"
        return Cause("dropout_on", "scatter", said)
    gap = float(np.sqrt(np.mean(sides.gap[sides.mask] ** 2)))
    if found.free < TESTS:
        return None
    if filtered and found.apart <= max(FIT * gap, sides.bound / 2):
        said = f"one offset for each prefix leaves {found.apart:.2g} of {gap:.2g} nats"
        return Cause("sampling_filter", "offset", said)
    if abs(found.slope - 1.0) > FIT and found.left <= max(FIT * found.apart, sides.bound / 2):
        said = f"slope {found.slope:.3f} leaves {found.left:.2g} of {found.apart:.2g} nats"
        return Cause("temperature_mismatch", "within a prefix", said)
    return None


def _usual(suspect: str, witness: str) -> list[str]:
    for name in ("ref_log_prob", "update_log_probs"):
        if name in (suspect, witness):
            return list(USUAL[name])
    return list(USUAL["rollout_log_probs"])
