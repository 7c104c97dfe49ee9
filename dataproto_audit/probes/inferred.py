"""Advantages whose estimator nobody told: what rule in use explains them (DPA408).

The rules of :data:`~dataproto_audit.reference.rules.GROUP_RULES`, and the estimators that walk over
tokens with usual discounts. One that explains most rows exactly is taken for the one that was used;
what it does not explain is a ``warn``, since a rule of one's own may treat some rows otherwise.

Not covered: batches that no rule explains, such as with advantages of a wrong formula throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.advantage_causes import explain_group_advantages
from dataproto_audit.probes.advantages import RELATIVE, coarsest, cut_groups, group_stats
from dataproto_audit.probes.context import Context, NotChecked
from dataproto_audit.probes.estimates import GAE, PLUS, PLUS_BASELINE, REMAX, Estimate
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.return_causes import Explained, explain_advantages
from dataproto_audit.reasons import SettingUnknown
from dataproto_audit.reference.groups import GroupStats, rounding_bound
from dataproto_audit.reference.rules import GROUP_RULES, GroupRule

MOST = 0.8
"""Share of the telling rows that a rule must explain to be the one that was used."""
LEAST = 8
"""Telling rows, of groups whose scores differ, below which a rule may fit by chance."""


@dataclass(frozen=True)
class Fit:
    """What a rule makes of a batch: ``want [B,1]``, and the trained cells it does not explain."""

    rule: GroupRule
    want: Any
    bad: Any
    sign: float = 1.0


@probe(
    "DPA408",
    stages=("advantage",),
    needs=("advantages", "token_level_rewards", "response_mask"),
    applies=lambda ctx: "the estimator is told" if ctx.settings.adv_estimator else "",
    severity="warn",
)
def advantage_inferred(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """advantages [B,R] follow, in all rows, from the rule that explains most of them."""
    found, on = view.numpy("advantages"), view.numpy("response_mask") != 0
    if not (on & (found != 0)).any() or not np.isfinite(found[on]).all():
        ctx.unknown("advantages that are all 0, or not finite, tell no rule")
    groups = None
    if "uid" in view and "uid" not in ctx.broken and not cut_groups(view, ctx):
        groups = group_stats(view, ctx, with_lengths=True)
    fits: list[Fit] = []
    for fit in _fits(view, groups, found, on) if groups is not None else ():
        if fit.sign > 0 and not fit.bad.any():
            return
        fits.append(fit)
    walks = list(_walks(view, ctx))
    if any(wrong is None for _, wrong in walks):
        return
    if groups is not None and (best := _best(groups, fits, on)) is not None:
        yield _by_rule(ctx, groups, best, found, on)
        return
    if not walks:
        tried = "no rule in use explains the advantages"
        if groups is None:
            tried = "groups that are cut, or without uid, tell no rule"
        ctx.unknown(SettingUnknown.of("adv_estimator", then=tried))
    yield _by_walk(ctx, *walks[0])


def _fits(view: BatchView, groups: GroupStats, found: Any, on: Any) -> Iterator[Fit]:
    size = np.abs(view.numpy("token_level_rewards")).sum(1, dtype=np.float64)
    bound = rounding_bound(
        groups,
        magnitude=torch.from_numpy(size),
        dtype=coarsest(view, "advantages", "token_level_rewards"),
    ).numpy()[:, None]
    for rule in GROUP_RULES.values():
        with torch.inference_mode():
            want = rule(groups).numpy()[:, None]
        slack = bound + RELATIVE * np.maximum(1.0, np.abs(want))
        for sign in (1.0, -1.0):
            yield Fit(rule, sign * want, on & ~(np.abs(found - sign * want) <= slack), sign)


def _telling(groups: GroupStats, on: Any) -> Any:
    """Trained rows ``[B]`` of groups whose scores differ: all rules give 0 in the others."""
    differs = np.zeros(groups.num_groups, bool)
    codes = groups.codes.numpy()
    np.logical_or.at(differs, codes, groups.deviation.abs().numpy() > RELATIVE)
    return differs[codes] & on.any(1)


def _best(groups: GroupStats, fits: list[Fit], on: Any) -> Fit | None:
    telling = _telling(groups, on)
    if telling.sum() < LEAST:
        return None
    explained = [int((telling & ~fit.bad.any(1)).sum()) for fit in fits]
    most = int(np.argmax(explained))
    best = fits[most]
    whole = best.sign > 0 or not best.bad.any()  # a sign is of all rows or of none
    return best if explained[most] >= MOST * telling.sum() and whole else None


def _by_rule(ctx: Context, groups: GroupStats, best: Fit, found: Any, on: Any) -> Finding:
    right = best.sign * best.want
    bad = on & (np.abs(found - right) > RELATIVE) if best.sign < 0 else best.bad
    told = explain_group_advantages(groups, best.rule, found, on, bad, right)
    inferred = {
        "rule, inferred": f"{best.rule.name}: {best.rule.formula}",
        "rows that it explains": f"{int((~bad & on).any(1).sum())} of {int(on.any(1).sum())}",
    }
    return _said(ctx, bad, np.broadcast_to(right, found.shape), found, inferred, told)


def _walks(view: BatchView, ctx: Context) -> Iterator[tuple[Estimate, Any]]:
    """Estimators over tokens that explain the returns, each with the advantages ``[B,R]`` that do
    not follow from them; None where all do."""
    for name, field in ((GAE, "values"), (REMAX, "reward_baselines"), (PLUS_BASELINE, "uid"),
                        (PLUS, "response_mask")):  # fmt: skip
        if field not in view:
            continue
        try:
            made = Estimate.of(view, ctx, name)
        except NotChecked:  # lacks what this one needs; the next may not
            continue
        if made.returns is None or not (made.settled or made.inferred()):
            continue
        returns = made.apart(made.returns, made.want_returns, scaled=False)
        wrong = made.apart(made.advantages, made.finished(made.raw), scaled=True)
        if returns is None or (name == PLUS_BASELINE and wrong is None):
            yield made, wrong


def _by_walk(ctx: Context, made: Estimate, wrong: Any) -> Finding:
    want = made.finished(made.raw)
    told = explain_advantages(made, wrong, want, ranks=ctx.settings.world_size)
    few = wrong.any(1).sum() <= (1 - MOST) * made.on.any(1).sum()
    if told.causes[0] == "wrong_whitening" if told.evidence else not few:
        # Some rows of a larger batch, or a rule of one's own for this step.
        then = "advantages may be whitened otherwise"
        ctx.unknown(SettingUnknown.of("adv_estimator", then=then))
    inferred = {
        "estimator, inferred from the returns": made.name,
        "gamma": made.gamma,
        "lambda": made.lam,
    }
    return _said(ctx, wrong, want, made.advantages, inferred, told)


def _said(
    ctx: Context, bad: Any, want: Any, found: Any, inferred: dict[str, Any], told: Explained
) -> Finding:
    row, column = np.argwhere(bad)[0]
    return ctx.fail(
        "advantages",
        cells=bad,
        expected=f"{want[row, column]:.6g} at row {row}, column {column}",
        actual=f"{found[row, column]:.6g}",
        evidence={**inferred, **told.evidence},
        causes=told.causes,
        hint=told.hint or "tell adv_estimator to have this judged",
    )
