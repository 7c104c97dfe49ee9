"""The KL that was taken off the rewards (DPA417).

rewards = scores - beta * kl(old - ref) on trained tokens, and equal to the scores elsewhere. beta
is not looked up: one positive number must explain all tokens, with any of the known estimators.
Where no KL is taken off, rewards are the scores (``fit`` of verl 0.7.1 and 0.9.1 sets them so).

Not covered: a KL over the whole vocabulary, and a penalty with a coefficient of its own per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
LEAST_COMMON = 3
"""Trained tokens that two rows share before one may be said to hold the penalty of the other."""
MAX_ROWS = 64
"""Rows that are looked at for whose penalty they hold."""
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


@probe(
    "DPA417",
    stages=("advantage",),
    needs=(*FIELDS[:2], "settings.use_kl_in_reward"),
    applies=lambda ctx: "KL in the reward" if ctx.settings.use_kl_in_reward else "",
)
def rewards_are_scores(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """token_level_rewards [B,R] equal token_level_scores where no KL is taken off them.

    A ``fail`` where rows hold those of other rows or lost theirs, else a ``warn``: a trainer of
    one's own may shape rewards.
    """
    names = FIELDS[:2]
    if np.array_equal(view.row_hashes(names[0]), view.row_hashes(names[1])):
        return
    scores, rewards = (view.numpy(name).astype(np.float64) for name in names)
    if scores.shape != rewards.shape:
        ctx.unknown("scores and rewards have other sizes")
    unit = max(torch.finfo(view.tensors[name].dtype).eps for name in names)
    bad = np.abs(scores - rewards) > ROUNDINGS * unit * (np.abs(scores) + np.abs(rewards))
    if not bad.any():
        return
    wrong = bad.any(1)
    moved = wrong.sum() > 1 and np.array_equal(_in_order(scores[wrong]), _in_order(rewards[wrong]))
    lost = not rewards[bad].any()
    row, column = np.argwhere(bad)[0]
    yield ctx.fail(
        "token_level_rewards",
        severity="fail" if moved or lost else "warn",
        cells=bad,
        expected="the scores: no KL is taken off (use_kl_in_reward is off)",
        actual=f"{rewards[row, column]:.6g} for {scores[row, column]:.6g} at row {row}, column "
        f"{column}",
        evidence={"rows that differ": int(wrong.sum())},
        causes=("row_permutation" if moved else "reward_lost" if lost else "field_overwritten",
                "wrong_kl_estimator"),
    )  # fmt: skip


def _in_order(values: Any) -> Any:
    """Rows in an order that does not depend on the one they come in."""
    return values[np.lexsort(values.T)]


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

    def rounding(beta: float, kl: Any) -> Any:
        # An estimator is as steep as 1 + |kl| + |distance| at most: k3 grows like exp(-distance).
        return slack + abs(beta) * step * (1.0 + np.abs(kl))

    negative = None
    for name, kl in _estimates(distance):
        noise = rounding(_middle(kl[judged], penalty[judged]), kl)
        beta = _coefficient(kl[judged], penalty[judged], noise[judged])
        close = np.abs(penalty - beta * kl) <= rounding(beta, kl)
        if not close[judged].all():
            continue
        if beta >= 0 and not name.startswith("swapped"):
            ctx.measure("audit/kl_in_reward_beta", beta)
            return
        negative = negative or (name, abs(beta), kl if beta < 0 else -kl)
    if negative is not None:
        yield from _wrong_way(ctx, penalty, rounding(*negative[1:]), judged, *negative)
        return
    for name, kl in _estimates(distance):
        beta = _middle(kl[judged], penalty[judged])
        error = np.abs(penalty - beta * kl)
        close = error <= rounding(beta, kl)
        if beta > 0 and close[judged].mean() >= MOST:
            bad = _listed(error, judged & ~close)
            if not bad.any() and name.startswith("swapped"):
                yield from _wrong_way(ctx, penalty, rounding(beta, kl), judged, name, beta, -kl)
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
    others = _of_other_rows(penalty, distance, judged, rounding)
    if others is None:
        ctx.unknown("no known KL estimator explains the penalty")
    name, beta, rows = others
    yield ctx.fail(
        "token_level_rewards",
        cells=judged & rows[:, None],
        expected="a penalty for each row's own distance to the reference",
        actual=f"{int(rows.sum())} rows have that of another row",
        evidence={"estimator": name, "beta": beta},
        causes=("row_permutation", "wrong_kl_estimator"),
    )


def _of_other_rows(
    penalty: Any, distance: Any, judged: Any, rounding: Callable[[float, Any], Any]
) -> tuple[str, float, Any] | None:
    """The estimator and the coefficient with which most rows hold another row's penalty, and which
    rows ``[B]`` do not hold their own; nearly all must hold somebody's. None where none is such."""
    common = judged.all(0)
    if not common.any():
        return None
    looked = range(min(len(penalty), MAX_ROWS))
    for name, kl in _estimates(distance):
        total = np.abs(kl[:, common]).sum()
        beta = float(np.abs(penalty[:, common]).sum() / total) if total else 0.0
        slack = rounding(beta, kl) + 1e-3 * np.abs(beta * kl)
        owners = [_owner(row, penalty, beta * kl, judged, slack) for row in looked]
        others = [owner is not None and owner != row for row, owner in enumerate(owners)]
        known = len(owners) - owners.count(None)
        if sum(others) > len(owners) / 2 and known >= MOST * len(owners):
            moved = np.zeros(len(penalty), bool)
            moved[: len(owners)] = [owner != row for row, owner in enumerate(owners)]
            return name, beta, moved
    return None


def _owner(row: int, penalty: Any, want: Any, judged: Any, slack: Any) -> int | None:
    """The row whose wanted penalty ``row`` holds, itself before others; None for nobody's."""
    both = judged & judged[row]
    fits = ((np.abs(penalty[row] - want) <= slack) | ~both).all(1)
    fits &= both.sum(1) >= min(LEAST_COMMON, judged[row].sum())
    return row if fits[row] else int(fits.argmax()) if fits.any() else None


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


def _coefficient(kl: Any, penalty: Any, noise: Any) -> float:
    """The least-squares coefficient of the penalty on the KL, each token by its rounding: a KL near
    0 is rounding alone, and beside a score there is less room for the penalty."""
    weight = 1.0 / (noise + 1e-12 + 1e-6 * np.abs(penalty))
    kl, penalty = kl * weight, penalty * weight
    square = float(kl @ kl)
    return float(kl @ penalty) / square if square > 0 else 0.0


def _middle(kl: Any, penalty: Any) -> float:
    """The median quotient where the KL is large enough to divide by; 0 without such tokens."""
    large = np.abs(kl) >= np.median(np.abs(kl))
    large &= kl != 0
    return float(np.median(penalty[large] / kl[large])) if large.any() else 0.0
