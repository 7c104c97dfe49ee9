"""The KL that was taken off the rewards (DPA417).

rewards = scores - beta * kl(old - ref) on trained tokens, and equal to the scores elsewhere. beta
is not looked up: one positive number must explain all tokens, with any of the known estimators.

Not covered: a KL over the whole vocabulary, and a penalty with a coefficient of its own per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.reference.kl import kl_of_difference

KINDS = ("k1", "k3", "k2", "abs")
FIELDS = ("token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_prob")
VISIBLE = 1e-2
"""Nats between policy and reference from which a penalty is looked for."""
LEAST_BETA = 1e-4
"""Coefficient below which nobody sets one: a penalty has to be visible beside the rounding with it,
also where it is the square of the distance."""
CLOSE = 1e-4
"""Rewards that are off by less are not listed where others are off by more."""
MOST = 0.8
"""Share of the tokens that one coefficient must explain for the others to be wrong."""
ROUNDINGS = 8
MARK = "kl in reward"


@probe(
    "DPA417",
    stages=("kl_reward", "advantage"),
    needs=(*FIELDS, "response_mask", "settings.use_kl_in_reward"),
    applies=lambda ctx: "" if ctx.settings.use_kl_in_reward is not False else "no KL in the reward",
)
def kl_in_reward(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """token_level_rewards [B,R] are the scores less a KL penalty on trained tokens.

    At ``advantage``, and in a batch saved after it, tokens may have been rejected since: what is
    off the mask is not judged there unless nothing is rejected. Said once a step.
    """
    if MARK in ctx.cache:
        ctx.skip("reported at the stage kl_reward")
    for finding in _judged(view, ctx):
        ctx.cache[MARK] = True
        yield finding


def _judged(view: BatchView, ctx: Context) -> Iterable[Finding]:
    scores, rewards, old, ref = (view.numpy(name).astype(np.float64) for name in FIELDS)
    mask = view.numpy("response_mask") != 0
    penalty, distance = scores - rewards, old - ref
    unit = torch.finfo(view.tensors["token_level_rewards"].dtype).eps
    slack = ROUNDINGS * unit * (np.abs(scores) + np.abs(rewards))
    before = ctx.stage == "kl_reward" and "advantages" not in view.whole.tensors
    if before or ctx.settings.rejection is False:
        uncut = view.whole.tensors.get("loss_mask")  # before a rejection, where it is kept
        kept = mask if uncut is None or uncut.shape != mask.shape else mask | (
            view.whole.numpy("loss_mask") != 0
        )  # fmt: skip
        yield from _off_mask(view, ctx, penalty, slack, kept)
    judged = mask & np.isfinite(distance) & np.isfinite(penalty)
    if not judged.any():
        ctx.skip("no trained token")
    yield from _on_mask(view, ctx, penalty, distance, slack, judged)


def _off_mask(
    view: BatchView, ctx: Context, penalty: Any, slack: Any, mask: Any
) -> Iterable[Finding]:
    bad = ~mask & (np.abs(penalty) > slack)
    if not bad.any():
        return
    bad = _listed(np.abs(penalty), bad)
    attention, tool = view.attention, False
    if attention is not None and attention.ndim == 2:
        tool = bool((attention[:, -mask.shape[1] :] != 0)[bad].all())
    row, column = np.argwhere(bad)[0]
    yield ctx.fail(
        "token_level_rewards",
        cells=bad,
        expected="the score, off the response mask",
        actual=f"{penalty[row, column]:.4g} less at row {row}, column {column}",
        causes=("mask_on_tool" if tool else "mask_on_padding", "wrong_kl_estimator"),
        hint="multiply the penalty by the response mask",
    )


def _listed(error: Any, bad: Any) -> Any:
    """The cells of ``bad`` that are off by enough to be looked at; all where none is."""
    visible = bad & (error > CLOSE)
    return visible if visible.any() else bad


def _on_mask(
    view: BatchView, ctx: Context, penalty: Any, distance: Any, slack: Any, judged: Any
) -> Iterable[Finding]:
    if (np.abs(penalty) <= slack)[judged].all():
        apart = judged & (np.abs(distance) > VISIBLE)
        if (apart & (LEAST_BETA * distance**2 / 2 > slack)).any():
            yield ctx.fail(
                "token_level_rewards",
                cells=apart,
                expected="scores less a KL penalty",
                actual=f"the scores themselves, with {np.abs(distance)[apart].max():.3g} nats "
                "between policy and reference",
                causes=("field_forgotten", "wrong_kl_estimator"),
            )
        return
    step = _precision(view) * (1.0 + np.abs(distance))

    def rounding(beta: float) -> Any:
        return slack + abs(beta) * step

    negative = None
    for name, kl in _estimates(distance):
        beta = _coefficient(kl[judged], penalty[judged], slack[judged])
        close = np.abs(penalty - beta * kl) <= rounding(beta)
        if not close[judged].all():
            continue
        if beta >= 0 and not name.startswith("swapped"):
            ctx.measure("audit/kl_in_reward_beta", beta)
            return
        negative = negative or (name, abs(beta), kl if beta < 0 else -kl)
    if negative is not None:
        yield from _wrong_way(ctx, penalty, rounding(negative[1]), judged, *negative)
        return
    for name, kl in _estimates(distance):
        beta = _middle(kl[judged], penalty[judged])
        error = np.abs(penalty - beta * kl)
        close = error <= rounding(beta)
        if beta > 0 and close[judged].mean() >= MOST:
            bad = _listed(error, judged & ~close)
            if not bad.any() and name.startswith("swapped"):
                yield from _wrong_way(ctx, penalty, rounding(beta), judged, name, beta, -kl)
                return
            if not bad.any():
                ctx.measure("audit/kl_in_reward_beta", beta)
                return
            row, column = np.argwhere(bad)[0]
            yield ctx.fail(
                "token_level_rewards",
                cells=bad,
                expected=f"a penalty of {beta * kl[row, column]:.6g} at row {row}, column {column}",
                actual=f"{penalty[row, column]:.6g}",
                evidence={"estimator": name, "beta": beta, "tokens explained":
                          float(close[judged].mean())},
                causes=("wrong_kl_estimator", "field_overwritten"),
            )  # fmt: skip
            return
    ctx.unknown("no known KL estimator explains the penalty")


def _wrong_way(
    ctx: Context, penalty: Any, slack: Any, judged: Any, name: str, beta: float, kl: Any
) -> Iterable[Finding]:
    error = np.abs(penalty - beta * kl)
    bad = _listed(error, judged & (error > slack))
    if not bad.any():
        ctx.unknown("the penalty is within rounding")
    row, column = np.argwhere(bad)[0]
    yield ctx.fail(
        "token_level_rewards",
        cells=bad,
        expected=f"a penalty of {beta * kl[row, column]:.6g} at row {row}, column {column}",
        actual=f"{penalty[row, column]:.6g}",
        evidence={"estimator": name, "beta": beta, "tokens explained": 1.0},
        causes=("wrong_kl_estimator", "wrong_sign"),
        hint="distance to the reference is rewarded: sign, or the order of the arguments",
    )


def _precision(view: BatchView) -> float:
    kinds = [view.tensors[name].dtype for name in FIELDS[2:]]
    return float(ROUNDINGS * torch.finfo(torch.promote_types(*kinds)).eps)


def _estimates(distance: Any) -> Iterator[tuple[str, Any]]:
    """Each estimator's value ``[B,R]``; k3 with swapped arguments last."""
    finite = torch.from_numpy(np.where(np.isfinite(distance), distance, 0.0))
    for kind in KINDS:
        yield kind, kl_of_difference(finite, kind).numpy()
    yield "swapped k3", kl_of_difference(-finite, "k3").numpy()


def _coefficient(kl: Any, penalty: Any, slack: Any) -> float:
    """The least-squares coefficient of the penalty on the KL; tokens with a score count less."""
    weight = 1.0 / (slack + 1e-12 + 1e-6 * np.abs(penalty))
    kl, penalty = kl * weight, penalty * weight
    square = float(kl @ kl)
    return float(kl @ penalty) / square if square > 0 else 0.0


def _middle(kl: Any, penalty: Any) -> float:
    """The median quotient where the KL is large enough to divide by; 0 without such tokens."""
    large = np.abs(kl) >= np.median(np.abs(kl))
    large &= kl != 0
    return float(np.median(penalty[large] / kl[large])) if large.any() else 0.0
