"""Advantages and returns of estimators that walk over tokens (DPA408): GAE, REINFORCE++, ReMax.

Returns are recomputed from rewards (and values). Advantages are right when they follow from the
recomputed returns; where the returns are wrong, also when they follow from those, so that what is
wrong is named where it begins. The recursion skips tokens that the mask leaves out, as verl does
since 0.9; verl 0.7.1 starts REINFORCE++'s return at 0 again there, which loses the reward.

Not covered: several outputs of one session, values that bootstrap behind a truncated response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding, Severity
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.estimates import (
    GAE,
    NEEDS,
    PLUS,
    PLUS_BASELINE,
    WHITENED,
    Estimate,
)
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.return_causes import Explained, explain_advantages, explain_returns
from dataproto_audit.reasons import SettingUnknown
from dataproto_audit.reference.recursions import discounted


def _walks(ctx: Context) -> str:
    estimator = ctx.settings.adv_estimator
    known = estimator is None or estimator in NEEDS
    return "" if known else f"{estimator} does not walk over tokens"


@probe(
    "DPA408",
    stages=("advantage",),
    needs=("advantages", "token_level_rewards", "response_mask", "settings.adv_estimator"),
    applies=_walks,
)
def returns_recomputed(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """advantages and returns [B,R] equal the estimator's formula on trained tokens.

    Unknown discounts are tried out: a usual pair that explains the returns will do. With a pair
    that was found so, what is wrong is a ``warn``; with none there is no verdict.
    """
    made = Estimate.of(view, ctx, str(ctx.settings.adv_estimator))
    severity: Severity = "fail"
    if not made.settled:
        if not made.inferred():
            names = ["gamma"] * (made.gamma is None) + ["lam"] * (made.lam is None)
            if made.name == PLUS:
                names = ["gamma"]
            then = "no usual value explains the returns"
            ctx.unknown(SettingUnknown.of(*names, then=then))
        severity = "warn"
    wrong_returns = None
    if made.returns is not None and made.name != PLUS_BASELINE:
        wrong_returns = made.apart(made.returns, made.want_returns, scaled=False)
        if wrong_returns is not None and _rewarded_between(made):
            wrong_returns = None
    found, want = made.advantages, made.finished(made.raw)
    wrong = made.apart(found, want, scaled=True)
    if wrong is not None and made.returns is not None and made.name != PLUS_BASELINE:
        own = made.finished(made.raw_of_returns)
        by_returns = made.apart(found, own, scaled=True)
        if by_returns is None or np.count_nonzero(by_returns) < np.count_nonzero(wrong):
            wrong, want = by_returns, own
    attended = _attended(view)
    if wrong_returns is not None:
        told = explain_returns(made, wrong_returns, attended)
        yield _finding(ctx, "returns", made, wrong_returns, made.returns, made.want_returns, told,
                       severity)  # fmt: skip
    if wrong is not None:
        told = explain_advantages(made, wrong, want, ranks=ctx.settings.world_size)
        yield _finding(ctx, "advantages", made, wrong, found, want, told, severity)


def _rewarded_between(made: Estimate) -> bool:
    """True where the returns are explained by rewards on masked tokens being counted, too.

    The formula loses them; implementations of REINFORCE++ differ there.
    """
    off = np.where(made.on, 0.0, made.rewards)
    if made.name != PLUS or not off.any():
        return False
    everywhere = made.on | (off != 0)
    counted = discounted(made.rewards, everywhere, made.gamma or 0.0)
    return made.apart(made.returns, counted, scaled=False) is None


def _attended(view: BatchView) -> Any:
    """Attention of the response ``[rows, response]``; None where it is not known."""
    attention, width = view.attention, view.response or 0
    if attention is None or attention.ndim != 2 or attention.shape[1] <= width:
        return None
    return attention[:, -width:] != 0


def _finding(
    ctx: Context, field: str, made: Estimate, bad: Any, found: Any, want: Any, told: Explained,
    severity: Severity,
) -> Finding:  # fmt: skip
    row, column = np.argwhere(bad)[0]
    error = np.abs(found - want)[bad]
    discounts = {"gamma": made.gamma} if made.name in (GAE, PLUS) else {}
    discounts |= {"lambda": made.lam} if made.name == GAE else {}
    return ctx.fail(
        field,
        cells=bad,
        severity=severity,
        expected=f"{want[row, column]:.6g} at row {row}, column {column}",
        actual=f"{found[row, column]:.6g}",
        evidence={
            "estimator": made.name,
            **discounts,
            "max error": float(error.max()),
            "whitened": made.name in WHITENED and field == "advantages",
            **told.evidence,
        },
        causes=told.causes,
        hint=told.hint,
    )
