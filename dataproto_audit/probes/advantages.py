"""Group-relative advantages against their float64 recomputation (DPA408, DPA409).

Covered: the estimators that need rewards, mask and uid alone; those that walk over tokens are in
:mod:`.returns`. Not covered: several outputs of one session that share one advantage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_range, row_sum
from dataproto_audit.probes.advantage_causes import (
    NORMALISED,
    Rule,
    explain_group_advantages,
)
from dataproto_audit.probes.context import Context, filling_rows, group_codes, group_sizes
from dataproto_audit.probes.estimates import PLUS, PLUS_BASELINE
from dataproto_audit.probes.registry import probe, unchecked
from dataproto_audit.probes.scan import any_of, per_row, some
from dataproto_audit.reasons import SettingUnknown
from dataproto_audit.reference import rules
from dataproto_audit.reference.groups import GroupStats, rounding_bound, stats_of_codes

NEEDS = ("advantages", "token_level_rewards", "response_mask", "uid", "settings.adv_estimator")
RULES: dict[str, dict[bool, Rule]] = {
    "grpo": {True: rules.scaled_by_std, False: rules.mean_only},
    "grpo_passk": {True: rules.best_only, False: partial(rules.best_only, by_std=False)},
    "rloo": {False: rules.leave_one_out},
    "gpg": {False: rules.global_factor},
    "opo": {False: rules.length_weighted_baseline},
}
"""By estimator, and by whether it divides by the group's std."""
ALIASES = {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"}
"""Second implementations of one estimator."""
RELATIVE = 1e-5


def _group_relative(ctx: Context) -> str:
    estimator = ctx.settings.adv_estimator
    known = estimator is None or _named(estimator) in RULES
    return "" if known else f"{estimator} is not group-relative"


def _named(estimator: str | None) -> str:
    return ALIASES.get(str(estimator), str(estimator))


def _groups(view: BatchView, ctx: Context) -> Any:
    """The group of each row ``[B]``; a row that fills the batch up is one of its own."""
    codes, filling = group_codes(view, ctx)[0], filling_rows(view)
    if filling is None or not filling.any():
        return codes
    alone = codes.max() + 1 + np.arange(len(codes))
    return np.where(filling, alone, codes)


def cut_groups(view: BatchView, ctx: Context) -> bool:
    """Whether groups have other sizes than n, as those of one rank's rows."""
    counts, n = group_sizes(view, ctx), ctx.settings.n
    return n is not None and n > 1 and bool(((counts != n) & (counts > 0)).any())


def group_stats(view: BatchView, ctx: Context, *, with_lengths: bool) -> GroupStats:
    """Statistics of the rows' scores by uid; lengths only where a rule looks at them."""
    scores = row_sum(view.numpy("token_level_rewards"), np.float64)
    codes = torch.from_numpy(_groups(view, ctx))
    lengths = None
    if with_lengths:
        trained = view.numpy("response_mask") != 0
        lengths = torch.from_numpy(trained.sum(1, dtype=np.float64))
    return stats_of_codes(torch.from_numpy(scores), codes, lengths)


def coarsest(view: BatchView, *names: str) -> torch.dtype:
    """The least precise dtype of these fields."""
    return max((view.tensors[name].dtype for name in names), key=lambda d: torch.finfo(d).eps)


def _trained_range(block: Block) -> Any:
    """Smallest and largest trained advantage of each row ``[block, 2]``; inf and -inf of none."""
    return np.stack(row_range(block["advantages"], block.mask), axis=1)


TRAINED_RANGE = per_row("advantage_range", ("advantages", "response_mask"), _trained_range)


@probe(
    "DPA408", stages=("advantage",), needs=NEEDS, stats=(TRAINED_RANGE,), applies=_group_relative
)
def advantage_recomputed(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """advantages [B,R] equal the estimator's formula on trained tokens.

    The tolerance is what rounding of rewards, mean and std can explain in each group. Where it is
    not known whether the estimator divides by the std, either form will do. Where groups are cut,
    as in one rank's rows, only what another rule explains is a finding. What is not finite is
    left to DPA407 and DPA420. With groups of different sizes and no n it is a
    ``warn``: rows may be several outputs of one session, which share an advantage.
    """
    estimator = _named(ctx.settings.adv_estimator)
    known, by_std = RULES[estimator], ctx.settings.norm_adv_by_std
    forms = [by_std] if by_std in known else sorted(known, reverse=True)
    with torch.inference_mode():  # nothing is differentiated: half the cost of small tensors
        groups = group_stats(view, ctx, with_lengths=estimator == "opo")
        wants = [unchecked(known[bool(form)])(groups).numpy()[:, None] for form in forms]
    within = stats[TRAINED_RANGE.name]
    nothing = within[:, :1] > within[:, 1:]
    for want in wants:
        close = np.abs(within - want) <= RELATIVE * np.maximum(1.0, np.abs(want))
        if (close | nothing).all():
            yield from _returns_differ(view, ctx)
            return
    found, skipped = view.numpy("advantages"), view.numpy("response_mask") == 0
    size = np.abs(view.numpy("token_level_rewards")).sum(1, dtype=np.float64)
    worst: tuple[Rule, Any, Any, Any] | None = None
    for form, want in zip(forms, wants, strict=True):
        bound = rounding_bound(
            groups,
            norm_by_std=bool(form),
            magnitude=torch.from_numpy(size),
            dtype=coarsest(view, "advantages", "token_level_rewards"),
        ).numpy()
        error = np.abs(found - want)
        bad = ~(error <= bound[:, None] + RELATIVE * np.maximum(1.0, np.abs(want)))
        bad &= np.isfinite(want) & np.isfinite(found) & ~skipped
        if not bad.any():
            return
        if worst is None or bad.sum() < worst[1].sum():  # the form that explains most
            worst = known[bool(form)], bad, want, bound
    if worst is not None:
        groups = group_stats(view, ctx, with_lengths=True)
        yield _wrong(ctx, groups, worst[0], found, ~skipped, *worst[1:], cut=cut_groups(view, ctx))


def _wrong(
    ctx: Context, groups: GroupStats, rule: Rule, found: Any, on: Any, bad: Any, want: Any,
    bound: Any, *, cut: bool,
) -> Finding:  # fmt: skip
    row, column = np.argwhere(bad)[0]
    told = explain_group_advantages(groups, rule, found, on, bad, want)
    if cut and not any("max error" in str(said) for said in told.evidence.values()):
        ctx.unknown(f"groups of other sizes than n = {ctx.settings.n}: rows of them are elsewhere")
    sessions = ctx.settings.n is None and bool((groups.size != groups.size[0]).any())
    return ctx.fail(
        "advantages",
        cells=bad,
        severity="warn" if sessions else None,
        expected=f"{want[row, 0]:.6g} at row {row}, column {column}",
        actual=f"{found[row, column]:.6g}",
        evidence={
            "estimator": ctx.settings.adv_estimator,
            "max error": float(np.abs(found - want)[bad].max()),
            "bound": float(bound[row]),
            **told.evidence,
        },
        causes=told.causes,
        hint="all right where rows of one session share one advantage" if sessions else told.hint,
    )


def _returns_differ(view: BatchView, ctx: Context) -> Iterable[Finding]:
    """Returns, where there are any, are the advantages: there is no critic to learn from them."""
    if "returns" not in view.tensors or "returns" in ctx.broken:
        return
    found, want = view.numpy("returns"), view.numpy("advantages")
    if found is want or np.array_equal(found, want):
        return
    bad = ~(np.abs(found - want) <= RELATIVE * np.maximum(1.0, np.abs(want)))
    bad &= (view.numpy("response_mask") != 0) & ~(np.isnan(found) & np.isnan(want))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        yield ctx.fail(
            "returns",
            cells=bad,
            severity="warn",
            expected=f"the advantage {want[row, column]:.6g} at row {row}, column {column}",
            actual=f"{found[row, column]:.6g}",
            evidence={"estimator": ctx.settings.adv_estimator},
            causes=("field_overwritten", NORMALISED),
        )


MASKED = frozenset({*RULES, PLUS, PLUS_BASELINE, "gdpo", "optimal_token_baseline",
                    "tir_optimal_token_baseline"})  # fmt: skip
"""Estimators that multiply by the mask at the end (``core_algos.py`` of verl 0.9.1). GAE whitens
last and ReMax takes a baseline off returns, so both leave values off it; of others nothing is
known."""
LEAVING = ("values", "reward_baselines")
"""Inputs of the estimators that do not."""


def may_leave_values(ctx: Context) -> str:
    """Why advantages need not be 0 off the mask; '' where they are, or are of nobody knows what."""
    estimator = ctx.settings.adv_estimator
    known = estimator is None or _named(estimator) in MASKED
    return "" if known else f"{estimator} may leave values off the mask"


def leaves_values(view: BatchView, ctx: Context) -> bool:
    """True where advantages off the mask say nothing, as far as settings and the batch tell."""
    untold = ctx.settings.adv_estimator is None
    return bool(may_leave_values(ctx)) or (untold and any(name in view for name in LEAVING))


@probe(
    "DPA409",
    stages=("advantage",),
    needs=("advantages", "response_mask"),
    stats=(
        any_of(
            "advantage_off_mask",
            ("advantages", "response_mask"),
            lambda block: some((block["advantages"] != 0) > block.mask),
        ),
    ),
    applies=may_leave_values,
)
def advantage_off_mask(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Advantages [B,R] of an estimator that masks them are exactly 0 off the mask.

    Where nobody says which estimator it was, and the batch has neither values nor baselines, the
    batch tells: behind its last trained token a row is 0 if most others are. Between trained tokens
    that is not asked then.
    """
    if not stats["advantage_off_mask"]:
        return
    advantages, on = view.numpy("advantages"), view.numpy("response_mask") != 0
    bad = (advantages != 0) & ~on
    told = {}
    if ctx.settings.adv_estimator is None:
        behind = ~on & (np.flip(np.maximum.accumulate(np.flip(on, 1), 1), 1) == 0)
        bad, odd = bad & behind, (bad & behind).any(1)
        clean = behind.any(1) & ((advantages != 0) & on).any(1) & ~odd
        if not 0 < odd.sum() < clean.sum() or leaves_values(view, ctx):
            ctx.unknown(SettingUnknown.of("adv_estimator"))
        told = {"rows that are 0 there": int(clean.sum())}
    yield ctx.fail(
        "advantages",
        cells=bad,
        expected="0 off the response mask",
        actual=f"{int(bad.sum())} values in {int(bad.any(1).sum())} rows",
        evidence=told,
        causes=("advantage_off_mask", "mask_from_prompt"),
    )
