"""Why a reported loss is not the recomputed one: each cause is tried on the mini-batch.

The loss is computed again with another divisor, split, aggregation, clip range or KL estimator; the
cause that gives the reported number is named first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataproto_audit.probes.context import Settings
from dataproto_audit.reference.kl import kl_of_difference
from dataproto_audit.reference.losses import AGGREGATION_MODES, LossTerms, policy_loss

NORMALISER, SPLIT, CLIP, KL = (
    "wrong_normaliser", "loss_depends_on_split", "wrong_clip", "wrong_kl_estimator",
)  # fmt: skip
FITS = 2e-4
"""Relative difference at which a cause explains a loss."""
VISIBLE = 1e-6
"""A KL from which its coefficient can be told."""
LARGEST = 10.0
"""A KL coefficient above this is none that anybody uses."""
UNCLIPPED = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9, "clip_ratio_c": None}


@dataclass(frozen=True)
class MiniBatch:
    """One mini-batch: how its loss is computed, from what, and what was reported.

    ``wrong`` are the terms that differ, as (reported, recomputed); ``parts`` are the rows of each
    micro-batch by rank, as positions within the mini-batch, where they were recorded.
    """

    fields: Mapping[str, torch.Tensor]
    how: Mapping[str, Any]
    reported: Mapping[str, Any]
    wrong: Mapping[str, tuple[float, float]]
    terms: LossTerms
    settings: Settings
    parts: tuple[tuple[Any, ...], ...] = ()

    def loss(self, rows: Any = None, **changes: Any) -> dict[str, float]:
        """The loss of some rows with other settings than configured."""
        given: dict[str, Any] = {**self.fields}
        if rows is not None:
            given = {name: field[rows] for name, field in given.items()}
        terms: dict[str, Any] = dict(policy_loss(**given, **{**self.how, **changes}))
        return {name: float(value) for name, value in terms.items()}


def explain_loss(mini: MiniBatch) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Ranked causes and the evidence for the first."""
    names = set(mini.wrong)
    name = next(iter(mini.wrong))
    got, exact = mini.wrong[name]
    if not np.isfinite(got):
        return ("non_finite", SPLIT), {}
    for cause, told in _tried(mini, names, got, exact):
        rest = [c for c in _usual(name) if c != cause]
        return (cause, *rest), {"explained by": told}
    return _usual(name), {}


def _usual(name: str) -> tuple[str, ...]:
    return {
        "kl_loss": (KL, SPLIT, NORMALISER),
        "pg_loss": (SPLIT, NORMALISER, CLIP),
    }.get(name, (SPLIT, NORMALISER))


def _alike(got: float, want: float) -> bool:
    return bool(abs(got - want) <= FITS * abs(want) + 1e-9)


def _tried(mini: MiniBatch, names: set[str], got: float, exact: float) -> Iterator[tuple[str, str]]:
    """Causes that give the reported numbers, and how."""
    yield from _of_the_total(mini, names)
    factors = {n: g / e for n, (g, e) in mini.wrong.items() if abs(e) > 1e-9}
    common = _common(factors)
    counted, true = mini.reported.get("normaliser"), float(mini.terms["normaliser"])
    if common is not None and counted and counted != true and _alike(common, true / counted):
        yield NORMALISER, f"divided by {counted:g} instead of {true:g}"
    yield from _splits(mini)
    if common is not None and "pg_loss" in names:
        micros = {len(rank) for rank in mini.parts}
        if len(micros) == 1 and _alike(common, float(micros.copy().pop())) and common > 1.5:
            yield SPLIT, f"{common:g} micro-batches added and not divided"
    if "pg_loss" in names:
        yield from _other_settings(mini, got)
    if names == {"total"} and mini.reported.get("pg_loss") is None:
        yield from _other_aggregation(mini, got)
    if names <= {"kl_loss", "total"} and "kl_loss" in names:
        yield from _other_kl(mini, got)
    if common is not None and _alike(common, -1.0):
        yield "wrong_sign", f"{', '.join(sorted(names))} of the other sign"
    if common is not None:
        whole = names >= {n for n in ("pg_loss", "total") if n in mini.reported}
        count = round(common)
        if count > 1 and _alike(common, float(count)) and not names <= {"kl_loss", "total"}:
            told = f"all terms are {count} times too large" if whole else f"{count} times too large"
            yield (NORMALISER if whole else SPLIT), told
        rows, width = mini.fields["response_mask"].shape
        if _alike(common, true / (rows * width)):
            yield NORMALISER, f"divided by all {rows * width} columns"
        if whole and _alike(common, 1.0 / max(1, len(mini.parts))) and len(mini.parts) > 1:
            yield NORMALISER, f"divided by {len(mini.parts)} ranks once more"
        if whole and common > 0 and len(names - {"total"}) > 1:
            yield NORMALISER, f"all terms times {common:.6g}"


def _common(factors: Mapping[str, float]) -> float | None:
    """The factor that all wrong terms share, the total left out where others tell."""
    own = {n: f for n, f in factors.items() if n != "total"} or factors
    values = list(own.values())
    if not values or not all(_alike(value, values[0]) for value in values):
        return None
    return values[0]


def _of_the_total(mini: MiniBatch, names: set[str]) -> Iterator[tuple[str, str]]:
    """Only the total is wrong: a term in it has another sign, or another weight."""
    parts = mini.reported
    if names != {"total"} or any(parts.get(n) is None for n in ("pg_loss", "total")):
        return
    s = mini.settings
    kl, entropy = (float(parts.get(n) or 0.0) for n in ("kl_loss", "entropy_loss"))
    weight = (s.kl_loss_coef or 0.0) if s.use_kl_loss else 0.0
    bonus = s.entropy_coeff or 0.0
    more = float(parts["total"]) - (float(parts["pg_loss"]) + weight * kl - bonus * entropy)
    if bonus and entropy and _alike(more, 2 * bonus * entropy):
        yield "entropy_sign", "total = pg + kl + entropy bonus"
    if weight and kl and _alike(more, -2 * weight * kl):
        yield "wrong_sign", "total = pg - kl - entropy bonus"
    if abs(kl) > VISIBLE:
        used = weight + more / kl
        if -FITS <= used <= LARGEST * (1 + FITS):
            told = f"a KL coefficient of {max(used, 0.0):.4g} instead of {weight:g}"
            yield "engine_setting", told


def _splits(mini: MiniBatch) -> Iterator[tuple[str, str]]:
    """Means of the means of micro-batches, or of ranks."""
    for name, parts in (
        ("micro-batches", [rows for rank in mini.parts for rows in rank]),
        ("ranks", [np.concatenate(rank) for rank in mini.parts if len(rank)]),
    ):
        kept = [rows for rows in parts if len(rows)]
        if len(kept) < 2:
            continue
        made = [mini.loss(torch.from_numpy(rows)) for rows in kept]
        mean = {n: float(np.mean([part[n] for part in made])) for n in mini.wrong}
        if all(_alike(got, mean[n]) for n, (got, _) in mini.wrong.items()):
            yield SPLIT, f"the mean of the means of {len(kept)} {name}"


def _other_settings(mini: MiniBatch, got: float) -> Iterator[tuple[str, str]]:
    """Another clip range or another aggregation than configured."""
    s = mini.settings
    low, high = s.clip_ratio_low, s.clip_ratio_high
    clips: list[tuple[str, dict[str, Any]]] = [
        ("the sides of the clip range swapped", {"clip_ratio_low": high, "clip_ratio_high": low}),
        ("no clip", UNCLIPPED),
        ("no dual clip", {"clip_ratio_c": None}),
        ("the lower side on both sides", {"clip_ratio_high": low}),
        ("the upper side on both sides", {"clip_ratio_low": high}),
    ]
    tries = [(CLIP, name, changes) for name, changes in clips]
    tries += [(NORMALISER, f"aggregated as {mode}", {"loss_agg_mode": mode})
              for mode in AGGREGATION_MODES if mode != s.loss_agg_mode]  # fmt: skip
    found = mini.wrong["pg_loss"][0]
    for cause, name, changes in tries:
        if _alike(found, mini.loss(**changes)["pg_loss"]):
            yield cause, name


def _other_aggregation(mini: MiniBatch, got: float) -> Iterator[tuple[str, str]]:
    """Another aggregation than configured, where only the total was reported."""
    for mode in AGGREGATION_MODES:
        if mode != mini.settings.loss_agg_mode:
            made = mini.loss(loss_agg_mode=mode)
            if _alike(got, made["total"]):
                yield NORMALISER, f"aggregated as {mode}"


def _other_kl(mini: MiniBatch, got: float) -> Iterator[tuple[str, str]]:
    """Another estimator, or arguments in the other order."""
    new, ref = mini.fields["log_probs"], mini.fields["ref_log_prob"]
    mask = mini.fields["response_mask"] != 0
    distance = (new.double() - ref.double())[mask]
    kind = mini.settings.kl_loss_type or "low_var_kl"
    exact = mini.wrong["kl_loss"][1]
    right = float(kl_of_difference(distance, kind).mean())
    if not right:
        return
    scale = exact / right  # what the aggregation makes of a mean, about
    for other in ("k1", "k2", "k3", "abs"):
        for sign, name in ((1.0, other), (-1.0, f"{other} with swapped arguments")):
            tried = float(kl_of_difference(sign * distance, other).mean())
            if _alike(got, scale * tried):
                yield KL, name
