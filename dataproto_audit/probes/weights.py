"""Importance weights against the log-probs that they are made of (DPA418), and rows that nothing
could score (DPA419)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.finite import uncorrected
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import any_of, some

BOUND = 20.0
"""Log-ratios are cut here before they are exponentiated."""
CLOSE = 1e-4
MOST = 0.8
"""Share of the weights that one rule must explain for the others to be wrong."""
WEIGHTS = "rollout_is_weights"


@probe(
    "DPA418",
    stages=("advantage",),
    needs=(WEIGHTS, "response_mask"),
    stats=(
        any_of(
            "negative_weight",
            (WEIGHTS, "response_mask"),
            lambda block: some((block[WEIGHTS] < 0) & block.mask),
        ),
    ),
    absent=uncorrected,
    basic=True,
)
def weights_nonnegative(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """rollout_is_weights [B,R], ratios of probabilities, are at least 0 on trained tokens.

    0 is let pass: a weight that underflows, or that a rule of its own cuts to nothing.
    """
    if stats["negative_weight"]:
        weights = view.numpy(WEIGHTS)
        bad = (weights < 0) & (view.numpy("response_mask") != 0)
        yield ctx.fail(
            WEIGHTS,
            cells=bad,
            expected="at least 0: a ratio of probabilities",
            actual=f"{weights[bad].min():.6g} at the least, below 0 on {int(bad.sum())} tokens",
            causes=("wrong_sign", "field_overwritten"),
            hint="exponentiate the difference of the log-probs",
        )


@probe(
    "DPA418",
    stages=("advantage",),
    needs=(WEIGHTS, "old_log_probs", "rollout_log_probs"),
    absent=uncorrected,
)
def importance_weights(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """rollout_is_weights [B,R] are exp(old - rollout), of a token or of its whole row.

    The weights may be cut at either end, and divided by their mean. Tokens with a weight of 0 have
    none. Rules that this does not know are ``not_checkable``.
    """
    weights = view.numpy(WEIGHTS).astype(np.float64)
    old, rollout = (view.numpy(name).astype(np.float64) for name in
                    ("old_log_probs", "rollout_log_probs"))  # fmt: skip
    ratio = old - rollout
    given = (weights > 0) & np.isfinite(weights) & np.isfinite(ratio)
    if not given.any():
        ctx.skip("no token has a weight")
    kinds = [view.tensors[name].dtype for name in (WEIGHTS, "old_log_probs", "rollout_log_probs")]
    computed = torch.finfo(torch.promote_types(*kinds[1:])).eps
    slack = CLOSE + 8 * max(torch.finfo(kinds[0]).eps, computed)
    logs = np.log(np.where(given, weights, 1.0))
    token = ratio.clip(-BOUND, BOUND)
    kept = np.where(given, ratio, 0.0)
    rules = {"token": token}
    if not _explained(logs, token, given, slack)[given].all():  # the usual case goes no further
        total = kept.sum(1, keepdims=True)
        rules["row"] = np.broadcast_to(total.clip(-BOUND, BOUND), ratio.shape)
        mean = total / np.maximum(given.sum(1, keepdims=True), 1)
        rules["row, per token"] = np.broadcast_to(mean, ratio.shape)
        if any(_fits(logs, rule, given, slack) for rule in rules.values()):
            return
        yield from _wrong(ctx, weights, logs, rules, given, slack)


def _explained(logs: Any, rule: Any, given: Any, slack: float, scale: float = 0.0) -> Any:
    """Cells where the weight is exp(rule + scale), or cut at the largest or smallest weight."""
    error = logs - rule - scale
    own = logs[given]
    top, bottom = logs >= own.max() - 1e-6, logs <= own.min() + 1e-6
    return (np.abs(error) <= slack) | (top & (error <= slack)) | (bottom & (error >= -slack))


def _fits(logs: Any, rule: Any, given: Any, slack: float) -> bool:
    """True where the rule explains every weight, as it is or after a division by the mean."""
    if _explained(logs, rule, given, slack)[given].all():
        return True
    scale = float(np.median((logs - rule)[given]))
    return bool(_explained(logs, rule, given, slack, scale)[given].all())


def _wrong(
    ctx: Context, weights: Any, logs: Any, rules: Mapping[str, Any], given: Any, slack: float
) -> Iterable[Finding]:
    for name, rule in rules.items():
        if _fits(logs, -rule, given, slack):
            bad = given & (np.abs(weights - np.exp(rule)) > CLOSE)
            yield _finding(ctx, weights, rule, bad, f"{name}, inverted",
                           ("is_weights_inverted", "wrong_sign"))  # fmt: skip
            return
    explained = _explained(logs, rules["token"], given, slack)
    if explained[given].mean() < MOST:
        ctx.unknown("no known rule explains the weights")
    yield _finding(ctx, weights, rules["token"], given & ~explained, "token, at most tokens",
                   ("field_overwritten", "row_permutation"))  # fmt: skip


def _finding(
    ctx: Context, weights: Any, rule: Any, bad: Any, name: str, causes: tuple[str, ...]
) -> Finding:
    row, column = np.argwhere(bad)[0]
    return ctx.fail(
        WEIGHTS,
        cells=bad,
        expected=f"exp(old - rollout) = {np.exp(rule[row, column]):.6g} at row {row}, "
        f"column {column}",
        actual=f"{weights[row, column]:.6g}",
        evidence={"rule that fits": name},
        causes=causes,
    )


@probe("DPA419", stages=("advantage",), needs=("advantages", "response_mask"))
def unscorable_rows(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows that are marked as unscorable (``scorable`` is 0) have no advantage [B,R]."""
    if "scorable" not in view:
        ctx.skip("no row is marked as scorable or not")
    flags = view.numpy("scorable").reshape(-1).tolist()
    if len(flags) != view.rows or not all(isinstance(f, (bool, int, float)) for f in flags):
        ctx.unknown("scorable is not one flag a row")
    rows = np.array(flags, np.float64) == 0
    mask = view.numpy("response_mask") != 0
    bad = rows[:, None] & mask & (view.numpy("advantages") != 0)
    if bad.any():
        yield ctx.fail(
            "advantages",
            cells=bad,
            expected="0 in rows that nothing could score",
            actual=f"an advantage in {int(bad.any(1).sum())} of {int(rows.sum())} such rows",
            causes=("unscorable_counted", "wrong_group_normalisation"),
            hint="leave such rows out of the mask and out of their group's mean",
        )
