"""Entropies against the tokens that were sampled, and against their own history (DPA604, DPA611).

The mean of ``-log p`` over sampled tokens estimates the mean entropy before them, without a bias
where the tokens were sampled from the policy whose entropy it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import sum_of

SAMPLED = ("entropys", "rollout_log_probs", "old_log_probs", "response_mask")
TOKENS = 200
"""Tokens from which their mean is compared."""
SIGMAS = 5.0
OFF = 0.1
"""The two differ by this many standard errors, this many nats, and this share of the entropy."""
SAME = 0.05
"""Mean nats that old and rollout log-probs may lie apart for them to be of one policy."""
WARM_UP = 20
WINDOW = 50
RECENT = 10
COLLAPSE = 0.1
"""Entropy collapses when it falls to this share of what it was, within the recent steps."""


def _excess(block: Block) -> Any:
    """Tokens; sums of entropy, of ``-log p`` less entropy, of its square, of the engines' gap."""
    mask = block.mask
    rollout = block["rollout_log_probs"][mask].astype(np.float64)
    entropy = block["entropys"][mask].astype(np.float64)
    gap = np.abs(block["old_log_probs"][mask] - rollout)
    off = -rollout - entropy
    kept = np.isfinite(off) & np.isfinite(gap)
    off = off[kept]
    return np.array(
        [off.size, entropy[kept].sum(), off.sum(), float(off @ off), gap[kept].sum()], np.float64
    )


def _biased(ctx: Context) -> str:
    s = ctx.settings
    if s.filtered:
        return "a filter makes likely tokens likelier"
    if s.temperature is not None and s.temperature <= 0:
        return "greedy decoding samples nothing"
    return "rollouts may come from older weights" if s.on_policy is False else ""


@probe(
    "DPA611",
    stages=("old_log_prob",),
    needs=(*SAMPLED, "settings.top_p", "settings.top_k", "settings.on_policy"),
    stats=(sum_of("entropy_excess", SAMPLED, _excess),),
    applies=_biased,
    severity="warn",
    later=False,
)
def entropy_of_the_sampled(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Entropy [B,R] is on average ``-log p`` of the tokens that were sampled.

    Not covered: logit biases and forced tokens, which sample from another distribution; a few of
    them stay below the bounds.
    """
    tokens, entropy, off, square, gap = (float(x) for x in stats["entropy_excess"])
    if tokens < TOKENS:
        ctx.unknown(f"{tokens:.0f} sampled tokens; their mean tells from {TOKENS} on")
    if gap / tokens > SAME:
        ctx.skip("old and rollout log-probs are not of one policy")
    mean, error = off / tokens, math.sqrt(square) / tokens
    usual = entropy / tokens
    if error > 0 and abs(mean) > max(SIGMAS * error, OFF, OFF * abs(usual)):
        negated = abs(mean + 2 * usual) < OFF * abs(usual)
        yield ctx.fail(
            "entropys",
            expected=f"a mean near {usual + mean:.4g}, as the sampled tokens have it",
            actual=f"{usual:.4g} over {tokens:.0f} tokens",
            evidence={"standard errors": mean / error},
            causes=("wrong_sign",) if negated else ("temperature_mismatch", "wrong_normaliser"),
            hint="entropy belongs to the logits divided by the sampling temperature",
        )


@probe(
    "DPA604",
    stages=("old_log_prob",),
    needs=("entropys", "response_mask"),
    severity="warn",
    later=False,
)
def entropy_stays(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The mean entropy does not fall to a tenth within ten steps."""
    before = [v for v in ctx.history.get("actor/entropy", ())[-WINDOW:] if math.isfinite(v)]
    if len(before) < WARM_UP:
        ctx.unknown(f"fewer than {WARM_UP} earlier steps of actor/entropy")
    values = view.numpy("entropys")[view.numpy("response_mask") != 0]
    if not values.size:
        return
    now, usual = float(values.mean(dtype=np.float64)), statistics.median(before)
    if 0 <= now < COLLAPSE * min(usual, max(before[-RECENT:])):
        yield ctx.fail(
            "actor/entropy",
            expected=f"near its median {usual:.4g} of the last steps",
            actual=f"{now:.4g}",
            evidence={"steps before": len(before), f"{RECENT} steps ago": before[-RECENT]},
            causes=("policy_collapse", "learning_rate_too_high"),
        )
