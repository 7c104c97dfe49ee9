"""What only several steps show (DPA413, DPA607 to DPA610, DPA612). Runs at the end of each step.

A metric that nobody recorded makes its check ``not_checkable``. Thresholds are wide: each names a
state that no healthy run stays in.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.dynamics import WEIGHTS, not_recorded
from dataproto_audit.probes.outliers import REF_GAP
from dataproto_audit.probes.registry import AT_END, probe

GAP = "rollout_corr/abs_log_prob_gap"
STEPS = 3
"""Steps that a state has to last."""
JUMP = 8.0
WIDE = 0.1
"""A gap that jumped is both this many times its median before and this many nats."""
GROWTH = 1.5
DEAD = 0.7
"""Share of groups without a difference in reward that leaves next to nothing to learn from."""
SHARE = 0.05
SAME_WEIGHTS = 1e-5
"""Nats within which two passes with the same weights agree on every token in float32; in half
precision they agree exactly."""
MOVES = 1e-6
"""Sum of learning rates from which on Adam, which moves each weight by about the learning rate,
moves log-probs of small models by more than :data:`SAME_WEIGHTS`."""
ADVANTAGES = ("critic/advantages/max", "critic/advantages/min")


def _now(ctx: Context, name: str) -> float:
    value = ctx.evidence["metrics"].get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        not_recorded(ctx, f".{name}")
    return float(value)


def _series(ctx: Context, name: str) -> list[float]:
    """This step's value after the ones before."""
    return [*ctx.history.get(name, ()), _now(ctx, name)]


def _lasting(ctx: Context, name: str) -> list[float]:
    values = _series(ctx, name)
    if len(values) < STEPS:
        ctx.unknown(f"fewer than {STEPS} steps of {name}")
    return values[-STEPS:]


@probe("DPA607", stages=(AT_END,), needs=("evidence.metrics",))
def gap_stays(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The mean gap between rollout and trainer neither jumps nor grows where nothing explains it.

    A jump of :data:`JUMP` times is a rollout that comes from other weights. Growth while the
    learning rate is 0, or while the engine answers a probe prompt alike, is state in one engine
    that does not follow the other. Runs that are off-policy by design are left out.
    """
    if ctx.settings.on_policy is False:
        ctx.skip("rollouts may come from older weights")
    values = _series(ctx, GAP)
    before, now = values[:-1], values[-1]
    if not before:
        ctx.unknown(f"no earlier steps of {GAP}")
    usual = statistics.median(before)
    if now > WIDE and now > JUMP * usual and all(v < WIDE for v in before[-STEPS:]):
        yield _gap(ctx, usual, now, ("stale_rollout_weights", "stale_prefix_cache"))
        return
    recent = values[-STEPS:]
    if len(recent) < STEPS or not _grows(recent):
        return
    rates = [*ctx.history.get("actor/lr", ()), ctx.evidence["metrics"].get("actor/lr")]
    if len(rates) >= STEPS and all(rate == 0 for rate in rates[-STEPS:]):
        yield _gap(ctx, recent[0], now, ("backend_drift",))
    elif _one_answer(ctx):
        yield _gap(ctx, recent[0], now, ("stale_rollout_weights",))


def _grows(values: Sequence[float]) -> bool:
    rising = all(later > earlier for earlier, later in pairwise(values))
    return rising and values[-1] > GROWTH * values[0]


def _one_answer(ctx: Context) -> bool:
    """True when the engine's answer to a probe prompt was the same in all these steps."""
    name = "rollout/greedy_hash"
    answers = [*ctx.history.get(name, ()), ctx.evidence["metrics"].get(name)][-STEPS:]
    return len(answers) == STEPS and answers[0] is not None and len(set(answers)) == 1


def _gap(ctx: Context, usual: float, now: float, causes: tuple[str, ...]) -> Finding:
    return ctx.fail(
        "rollout_log_probs",
        stage="old_log_prob",
        expected=f"a mean gap near {usual:.4g} nats, as before",
        actual=f"{now:.4g}",
        evidence={"times": now / max(usual, 1e-9)},
        causes=causes,
        hint="compare the weights of engine and trainer after a sync",
    )


@probe("DPA608", stages=(AT_END,), needs=("evidence.metrics",))
def tokens_trained(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Every step trains on at least one token."""
    if _now(ctx, "response_mask/tokens") == 0:
        yield ctx.fail(
            "loss",
            stage="update_actor",
            expected="trained tokens in every step",
            actual="none",
            causes=("empty_mask",),
        )


@probe("DPA609", stages=(AT_END,), needs=("evidence.metrics",))
def ratio_moves(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """With several epochs on one batch, the ratio does not stay exactly 1."""
    epochs = ctx.settings.ppo_epochs or _now(ctx, "actor/ppo_epochs")
    if not epochs >= 2:
        ctx.skip("one epoch: the ratio of a single update is 1")
    clipped, moved = _lasting(ctx, "actor/pg_clipfrac"), _lasting(ctx, "actor/ppo_kl")
    if not any(clipped) and not any(moved):
        yield ctx.fail(
            "ratio",
            stage="update_actor",
            expected=f"a ratio that moves within {epochs:g} epochs",
            actual=f"no clipping and a KL of exactly 0 in {STEPS} steps",
            causes=("ratio_always_one", "old_recomputed_each_epoch"),
        )


@probe("DPA610", stages=(AT_END,), needs=("evidence.metrics",))
def masked_share_stays(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The share of the response that the mask leaves out does not vanish between two steps."""
    values = _series(ctx, "response_mask/masked_share")
    before = values[:-1][-STEPS:]
    if not before:
        ctx.unknown("no earlier steps of response_mask/masked_share")
    if values[-1] == 0 and len(before) > 1 and min(before) > SHARE:
        yield ctx.fail(
            "response_mask",
            stage="rollout",
            expected=f"about {statistics.median(before):.2g} of the response masked, as before",
            actual="none",
            causes=("mask_on_tool",),
        )


@probe("DPA413", stages=(AT_END,), needs=("evidence.metrics",), severity="warn")
def groups_alive(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Less than 70 % of the groups have equal rewards, over three steps."""
    shares = _lasting(ctx, "groups/dead_share")
    if min(shares) >= DEAD:
        yield ctx.fail(
            "token_level_rewards",
            stage="advantage",
            expected=f"less than {DEAD:.0%} of the groups with equal rewards",
            actual=f"{min(shares):.0%} or more in {STEPS} steps",
            causes=("dead_groups",),
            hint="such groups have no gradient: easier or harder prompts, or a larger n",
        )


@probe(
    "DPA612",
    stages=("ref_log_prob",),
    needs=("old_log_probs", "ref_log_prob", "response_mask"),
    severity="warn",
    later=False,
)
def reference_stays(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """While the policy moves, its log-probs do not stay those of the reference.

    That it moves is told by a learning rate and a gradient above 0, or by checksums of the weights
    that differed from step to step. A policy that stood still has no reference to leave: rewards
    that are all alike, a learning rate of 0, or decay of the weights alone. Learning rates that
    sum to less than :data:`MOVES` move no log-prob by a visible amount.
    """
    before = list(ctx.history.get(REF_GAP, ()))[-STEPS + 1 :]
    if len(before) < STEPS - 1:
        ctx.unknown(f"fewer than {STEPS} steps of {REF_GAP}")
    if max(before) > SAME_WEIGHTS:
        return
    _moving_policy(ctx)
    mask = view.numpy("response_mask") != 0
    gap = np.abs(np.subtract(view.numpy("old_log_probs"), view.numpy("ref_log_prob"),
                             dtype=np.float64))[mask]  # fmt: skip
    if gap.size and not gap.max() > SAME_WEIGHTS:
        yield ctx.fail(
            "ref_log_prob",
            expected="log-probs of the frozen reference, away from those of the trained policy",
            actual=f"within {gap.max():.2g} nats of the policy's in {STEPS} steps",
            causes=("reference_not_frozen",),
            hint="switch the adapter off, or load the reference's own weights, for this pass",
        )


def _moving_policy(ctx: Context) -> None:
    """Leave the probe unless the updates of the last steps moved the policy."""
    most = STEPS - 1
    rates, norms, weights, high, low = (
        list(ctx.history.get(name, ()))[-most:]
        for name in ("actor/lr", "actor/grad_norm", WEIGHTS, *ADVANTAGES)
    )
    for told, values in (("the gradient was 0", norms), ("the learning rate was 0", rates)):
        if len(values) == most and not any(values):
            ctx.skip(f"{told} in the last {most} steps: the policy did not move")
    if len(weights) == most and len(set(weights)) == 1:
        ctx.skip(f"the weights were the same in the last {most} steps: the policy did not move")
    if not norms and len(high) == len(low) == most and not any((*high, *low)):
        ctx.unknown("all advantages were 0 and no gradient was recorded: did the policy move?")
    if rates and sum(ctx.history["actor/lr"]) < MOVES:
        ctx.unknown(f"learning rates that sum to less than {MOVES:g} move no log-prob visibly")
    learns = len(rates) == most and min(rates) > 0
    if (norms and min(norms) <= 0) or not (learns or len(set(weights)) == most):
        ctx.unknown("nothing recorded tells that the policy has moved")
