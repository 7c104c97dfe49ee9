"""Whether there is anything to learn from: rewards that differ, advantages that do not vanish
(DPA411, DPA412, DPA416)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_sum
from dataproto_audit.probes.advantages import RELATIVE, RULES, group_stats
from dataproto_audit.probes.context import Context, group_codes
from dataproto_audit.probes.registry import probe, unchecked
from dataproto_audit.probes.rewards import SCORE_SUM
from dataproto_audit.probes.scan import per_row, some
from dataproto_audit.reasons import SettingUnknown

NOTHING_LEFT = ("grpo_passk", "opo")
"""Estimators that may leave no advantage where the rewards of a group differ."""
VISIBLE = 1e-5
"""Share of a row's largest return and value below which a return may be lost in rounding."""


@probe(
    "DPA411",
    stages=("reward",),
    needs=("token_level_scores",),
    stats=(SCORE_SUM,),
    severity="info",
    later=False,
)
def scores_differ(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Not all rows have the same score, unless it is 0."""
    scores = stats["score_sum"]
    if len(scores) > 1 and scores[0] != 0 and (scores == scores[0]).all():
        yield ctx.fail(
            "token_level_scores",
            rows=range(view.rows),
            expected="scores of their own",
            actual=f"{scores[0]:.4g} in every row",
            causes=("broadcast_reward", "dead_groups"),
            hint="all right, or one value spread over the batch: record what the reward returned",
        )


@probe(
    "DPA412",
    stages=("advantage",),
    needs=("advantages", "token_level_rewards", "response_mask", "uid"),
    applies=lambda ctx: (
        "only the best row counts, and equal ones leave nothing"
        if ctx.settings.adv_estimator == "grpo_passk"
        else ""
    ),
    severity="warn",
    later=False,
)
def advantages_alive(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Advantages [B,R] are not 0 everywhere where rewards differ within a group or group by group.

    Groups of one row count as differing: without a baseline the reward itself is the advantage.
    Estimators that leave nothing for these very rewards (best of a group whose best ones tie, a
    baseline weighted by lengths of which all but one are 0) are in order where they are configured,
    and leave no verdict where nobody told which one it was.
    """
    mask = view.numpy("response_mask") != 0
    if (view.numpy("advantages")[mask] != 0).any() or not mask.any():
        return
    scores = view.numpy("token_level_rewards").sum(1, dtype=np.float64)
    codes, uids = group_codes(view, ctx)
    high, low = np.full(len(uids), -np.inf), np.full(len(uids), np.inf)
    np.maximum.at(high, codes, scores)
    np.minimum.at(low, codes, scores)
    alone = len(uids) == view.rows and bool((scores != scores[0]).any())
    if (high > low).any() or alone:
        estimator = ctx.settings.adv_estimator
        for name in NOTHING_LEFT if estimator is None else {estimator} & {*NOTHING_LEFT}:
            if not _left(view, ctx, name, mask).any():
                if estimator is None:
                    then = f"{name} leaves nothing here"
                    ctx.unknown(SettingUnknown.of("adv_estimator", then=then))
                return
        yield ctx.fail(
            "advantages",
            rows=range(view.rows),
            expected="advantages that follow the rewards",
            actual="0 on every trained token, while rewards differ",
            causes=("zero_advantage", "wrong_group_normalisation"),
        )


def _left(view: BatchView, ctx: Context, name: str, mask: Any) -> Any:
    """Rows with trained tokens that this estimator leaves an advantage."""
    groups = group_stats(view, ctx, with_lengths=True)
    want = unchecked(RULES[name][False])(groups).numpy()
    size = np.abs(view.numpy("token_level_rewards")).sum(1, dtype=np.float64).max(initial=0.0)
    return ~(np.abs(want) <= RELATIVE * size) & mask.any(1)


def _has_gap(block: Block) -> Any:
    """Rows whose mask begins more than once, ``[block]``."""
    mask = block.mask
    begins = mask[:, 1:] & ~mask[:, :-1]
    if not some(begins):
        return np.zeros(len(mask), bool)
    return row_sum(begins) + mask[:, 0] > 1


@probe(
    "DPA416",
    stages=("advantage",),
    needs=("returns", "response_mask"),
    stats=(per_row("mask_gap", ("response_mask",), _has_gap),),
)
def returns_cross_gaps(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Returns [B,R] do not drop to exactly 0 in front of a gap of the mask.

    Between two tool replies no reward is paid, so a return in front of a reply is that behind it,
    discounted. Rows whose return behind the gap is 0, or is small enough against the row's values
    to vanish in rounding, say nothing; neither do rows where a reward in front of the gap may
    cancel it.
    """
    gaps = np.flatnonzero(stats["mask_gap"])
    if not len(gaps):
        ctx.skip("no gap in the mask")
    mask, returns = view.numpy("response_mask")[gaps] != 0, view.numpy("returns")[gaps]
    terms = np.abs(returns)
    if "values" in view.tensors and "values" not in ctx.broken:
        terms = terms + np.abs(view.numpy("values")[gaps])
    least = VISIBLE * np.where(mask, terms, 0.0).max(1)
    at, column = np.arange(len(gaps)), np.arange(mask.shape[1])
    first = (mask & (returns != 0)).argmax(1)  # the first return that is not 0, or column 0
    behind = (first > 0) & ~mask[at, first - 1] & (np.abs(returns[at, first]) > least)
    bad = np.zeros((view.rows, len(column)), bool)
    bad[gaps] = mask & (column < first[:, None]) & behind[:, None]
    if bad.any():
        yield ctx.fail(
            "returns",
            cells=bad,
            expected="the return behind the gap, discounted",
            actual=f"exactly 0 in front of it in {int(bad.any(1).sum())} rows",
            causes=("returns_reset_at_gap",),
            hint="carry the running return over tokens that the mask leaves out",
        )
