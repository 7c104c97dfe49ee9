"""Differential diagnosis of a log-prob gap: apply the inverse of a cause and measure again.

Causes tried: a shift by one or two columns of either side, and rows in another order. The cause
whose repair silences the gap is named first, with the numbers. Which of the two sides is wrong is
told by shared prefixes, where one side contradicts itself. A slope other than 1 of one side on the
other points to another temperature; that one is not repaired here, since it takes logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.noise import Noise
from dataproto_audit.probes.trie import contradictions

SHIFTS = (1, -1, 2, -2)
REPAIRED = 0.1
"""A repair counts when it leaves at most this share of the mean gap."""
MAX_ROWS = 64
"""Rows for which another row is searched that fits."""
TELLING = 3
"""Tokens from which a row does not fit another one by chance."""
WRITERS = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
    "update_log_probs": "update_actor",
}


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
    wrong, right = view.numpy(suspect), view.numpy(witness)
    mask = view.numpy("response_mask") != 0
    gap = np.abs(np.subtract(wrong, right, dtype=np.float64))
    mask &= np.isfinite(gap)
    before = float(gap[bad].mean())
    evidence |= {
        "max gap": float(gap[mask].max(initial=0.0)),
        "mean gap": float(gap[mask].mean()),
        "noise model": noise.name,
        "bound per token": noise.token,
        "bound on mean": noise.mean,
    }
    ranked: list[tuple[float, str]] = []
    shift, left = _best_shift(wrong, right, mask)
    if left <= REPAIRED * before:
        evidence[f"shift by {shift:+d}"] = f"mean gap {before:.3g} -> {left:.3g}"
        ranked.append((left, "shift"))
    left = _reordered(wrong, right, mask, bad)
    if left <= min(REPAIRED * before, noise.token or noise.mean):
        evidence["rows matched anew"] = f"mean gap {before:.3g} -> {left:.3g}"
        ranked.append((left, "row_permutation"))
    slope = evidence["slope"] = _slope(wrong[mask], right[mask])
    causes = [cause for _, cause in sorted(ranked)] + _usual(suspect, witness, slope)
    shifted = causes[0] == "shift"
    if shifted:
        bad = mask & _moved(wrong, shift)
    open_question = unknown and not ranked
    hints = [
        f"column t of {suspect} must score responses[:, t]" if shifted else "",
        f"tell {', '.join(unknown)}: they could explain the gap" if open_question else "",
    ]
    yield ctx.fail(
        suspect,
        code="DPA304" if shifted else "",
        severity="info" if open_question else None,
        stage=WRITERS.get(suspect, "") if convicted else "",
        cells=bad,
        expected=f"{suspect} equal to {witness} within {noise.name}",
        actual=f"{int(bad.sum())} tokens in {int(bad.any(1).sum())} rows disagree",
        evidence=evidence,
        causes=causes,
        hint="; ".join(filter(None, hints)),
    )


def _usual(suspect: str, witness: str, slope: float) -> list[str]:
    """Causes without a repair, most likely first."""
    if "ref_log_prob" in (suspect, witness):
        return ["reference_not_frozen", "temperature_mismatch", "dropout_on", "precision"]
    if "update_log_probs" in (suspect, witness):
        return ["dropout_on", "temperature_mismatch", "precision"]
    if abs(slope - 1.0) > 0.1:
        return ["temperature_mismatch", "stale_rollout_weights", "precision"]
    return ["stale_rollout_weights", "temperature_mismatch", "precision"]


def _best_shift(wrong: Any, right: Any, mask: Any) -> tuple[int, float]:
    """The column shift of ``wrong`` that fits ``right`` best, and the mean gap it leaves."""
    best, least = 0, np.inf
    width = wrong.shape[1]
    for shift in SHIFTS:
        if abs(shift) >= width:
            continue
        kept = slice(max(0, shift), width + min(0, shift))
        moved = slice(max(0, -shift), width + min(0, -shift))
        both = mask[:, kept] & mask[:, moved]
        if both.sum() < 2:
            continue
        left = float(np.abs(wrong[:, moved] - right[:, kept])[both].mean())
        if left < least:
            best, least = shift, left
    return best, least


def _moved(wrong: Any, shift: int) -> Any:
    """Cells ``[B,R]`` whose value is another one after the shift; those without a source count."""
    width = wrong.shape[1]
    source = np.arange(width) - shift
    inside = (source >= 0) & (source < width)
    return ~inside | (wrong != wrong[:, source.clip(0, width - 1)])


def _reordered(wrong: Any, right: Any, mask: Any, bad: Any) -> float:
    """Mean gap when every bad row may take the best fitting row of the same length instead."""
    lengths = mask.sum(1)
    rows = np.flatnonzero(bad.any(1) & (lengths >= TELLING))[:MAX_ROWS]
    if len(rows) < 2:
        return np.inf
    left = []
    for row in rows:
        others = np.flatnonzero((lengths == lengths[row]) & (np.arange(len(right)) != row))
        if not len(others):
            return np.inf
        distance = np.abs(wrong[row] - right[others])[:, mask[row]]
        left.append(float(distance.mean(1).min()))
    return float(np.mean(left))


def _slope(wrong: Any, right: Any) -> float:
    """Least-squares slope of ``right`` on ``wrong``; about 1/T for another temperature T."""
    if len(wrong) < 2:
        return 1.0
    centred = wrong.astype(np.float64) - wrong.mean()
    spread = float(centred @ centred)
    return float(centred @ (right - right.mean()) / spread) if spread > 0 else 1.0
