"""Advantages against their float64 recomputation (DPA408, DPA409).

Covered: the group-relative estimators, which need rewards, mask and uid alone. Not covered: GAE and
the others that need values or a discount, and several outputs of one session that share one
advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, group_codes
from dataproto_audit.probes.registry import probe, unchecked
from dataproto_audit.reference import rules
from dataproto_audit.reference.groups import GroupStats, rounding_bound, stats_of_codes

Rule = Callable[[GroupStats], Tensor]

NEEDS = ("advantages", "token_level_rewards", "response_mask", "uid", "settings.adv_estimator")
RULES: dict[str, dict[bool, Rule]] = {
    "grpo": {True: rules.scaled_by_std, False: rules.mean_only},
    "grpo_passk": {True: rules.best_only, False: partial(rules.best_only, by_std=False)},
    "rloo": {False: rules.leave_one_out},
    "gpg": {False: rules.global_factor},
    "opo": {False: rules.length_weighted_baseline},
}
"""By estimator, and by whether it divides by the group's std."""
RELATIVE = 1e-5


def _group_relative(ctx: Context) -> str:
    estimator = ctx.settings.adv_estimator
    return "" if estimator is None or estimator in RULES else f"{estimator} is not group-relative"


def _group_stats(view: BatchView, ctx: Context, *, with_lengths: bool) -> GroupStats:
    """Statistics of the rows' scores by uid; lengths only where a rule looks at them."""
    scores = view.numpy("token_level_rewards").sum(1, dtype=np.float64)
    codes = torch.from_numpy(group_codes(view, ctx)[0])
    lengths = None
    if with_lengths:
        trained = view.numpy("response_mask") != 0
        lengths = torch.from_numpy(trained.sum(1, dtype=np.float64))
    return stats_of_codes(torch.from_numpy(scores), codes, lengths)


def _coarsest(view: BatchView, *names: str) -> torch.dtype:
    return max((view.tensors[name].dtype for name in names), key=lambda d: torch.finfo(d).eps)


@probe("DPA408", stages=("advantage",), needs=NEEDS, applies=_group_relative)
def advantage_recomputed(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """advantages [B,R] equal the estimator's formula on trained tokens.

    The tolerance is what rounding of rewards, mean and std can explain in each group. Where it is
    not known whether the estimator divides by the std, either form will do. Groups with a reward
    that is not finite are left to the finite check.
    """
    estimator = str(ctx.settings.adv_estimator)
    groups = _group_stats(view, ctx, with_lengths=estimator == "opo")
    known, by_std = RULES[estimator], ctx.settings.norm_adv_by_std
    forms = [by_std] if by_std in known else sorted(known, reverse=True)
    wants = [unchecked(known[bool(form)])(groups).numpy()[:, None] for form in forms]
    found, skipped = view.numpy("advantages"), view.numpy("response_mask") == 0
    for want in wants:
        close = np.abs(found - want) <= RELATIVE * np.maximum(1.0, np.abs(want))
        if (close | skipped).all():
            return
    size = np.abs(view.numpy("token_level_rewards")).sum(1, dtype=np.float64)
    worst: tuple[Any, Any, Any] | None = None
    for form, want in zip(forms, wants, strict=True):
        bound = rounding_bound(
            groups,
            norm_by_std=bool(form),
            magnitude=torch.from_numpy(size),
            dtype=_coarsest(view, "advantages", "token_level_rewards"),
        ).numpy()
        error = np.abs(found - want)
        bad = ~(error <= bound[:, None] + RELATIVE * np.maximum(1.0, np.abs(want)))
        bad &= np.isfinite(want) & ~skipped
        if not bad.any():
            return
        if worst is None or bad.sum() < worst[0].sum():  # the form that explains most
            worst = bad, want, bound
    if worst is not None:
        groups = _group_stats(view, ctx, with_lengths=True)
        yield _wrong(ctx, groups, found, ~skipped, *worst)


def _wrong(
    ctx: Context, groups: GroupStats, found: Any, trained: Any, bad: Any, want: Any, bound: Any
) -> Finding:
    row, column = np.argwhere(bad)[0]
    evidence: dict[str, Any] = {
        "estimator": ctx.settings.adv_estimator,
        "max error": float(np.abs(found - want)[bad].max()),
        "bound": float(bound[row]),
    }
    causes = []
    rule = _rule_that_fits(groups, found, trained)
    if rule:
        evidence["rule that fits"] = rule
        causes.append("wrong_group_normalisation")
    else:
        whole = np.broadcast_to(want, found.shape)
        mine, theirs = np.sort(found[trained]), np.sort(whole[trained])
        tiled = ["tiled_groups"] if np.allclose(mine, theirs, atol=1e-4) else []
        causes += ["row_permutation", *tiled, "wrong_group_normalisation"]
    return ctx.fail(
        "advantages",
        cells=bad,
        expected=f"{want[row, 0]:.6g} at row {row}, column {column}",
        actual=f"{found[row, column]:.6g}",
        evidence=evidence,
        causes=causes,
    )


def _rule_that_fits(groups: GroupStats, found: Any, trained: Any) -> str:
    """The group rule that explains advantages ``[B,R]`` constant along each row; '' if none."""
    rows = trained.any(1)
    high = np.where(trained, found, -np.inf).max(1)
    low = np.where(trained, found, np.inf).min(1)
    if not (high == low)[rows].all():
        return ""
    advantage = torch.from_numpy(np.where(rows, high, np.nan).astype(np.float64))
    if not bool(rows.all()):  # rows without trained tokens say nothing: judge the others
        kept = torch.from_numpy(np.flatnonzero(rows))
        groups = stats_of_codes(groups.scores[kept], groups.codes[kept], groups.lengths[kept])
        advantage = advantage[kept]
    fits = [f for f in rules.fit_group_rules(groups, advantage) if f.max_error < 1e-4]
    return f"{fits[0].rule.name} (max error {fits[0].max_error:.2g})" if fits else ""


@probe(
    "DPA409",
    stages=("advantage",),
    needs=("advantages", "response_mask", "settings.adv_estimator"),
    applies=_group_relative,
)
def advantage_off_mask(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Group-relative advantages [B,R] are exactly 0 off the mask. (GAE's are not.)"""
    bad = (view.numpy("advantages") != 0) & (view.numpy("response_mask") == 0)
    if bad.any():
        yield ctx.fail(
            "advantages",
            cells=bad,
            expected="0 off the response mask",
            actual=f"{int(bad.sum())} values in {int(bad.any(1).sum())} rows",
            causes=("advantage_off_mask", "mask_from_prompt"),
        )
