"""Faults of the policy loss: what it is made of and what it is divided by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dataproto_audit.reference.kl import kl_estimate
from dataproto_audit.reference.losses import aggregate, policy_loss
from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene

LOSS = ("losses", "loss", "pg_loss", "batch_num_tokens")
SPLIT = "loss_depends_on_split"
TERMS = ("pg_loss", "kl_loss", "entropy_loss", "total")


def _rescaled(scene: Scene, factor: Any, *, terms: tuple[str, ...] = TERMS) -> Truth:
    """Multiply terms of every mini-batch's loss; ``factor`` may depend on its number."""
    losses = [dict(loss) for loss in scene.boundary.evidence["losses"]]
    for number, loss in enumerate(losses):
        scale = factor(number) if callable(factor) else factor
        for name in terms:
            loss[name] *= scale
    return _told(scene, losses)


def _told(scene: Scene, losses: list[dict[str, float]]) -> Truth:
    scene.tell(losses=losses)
    return Truth("losses")


def _micros(scene: Scene, number: int) -> list[list[torch.Tensor]]:
    """Rows of each micro-batch of a mini-batch, by rank."""
    plan = scene.run.plan(scene.batch)
    return [
        [torch.from_numpy(micro + rank * plan.chunk) for micro in minis[number]]
        for rank, minis in enumerate(plan.parts)
    ]


def _loss(scene: Scene, rows: torch.Tensor, **changes: Any) -> dict[str, float]:
    """The loss of some rows by the configuration, but for ``changes``."""
    s, t = scene.options.settings(), scene.tensors
    how: dict[str, Any] = {
        "ref_log_prob": t["ref_log_prob"][rows] if s.use_kl_loss else None,
        "entropy": t["update_entropys"][rows] if s.entropy_coeff else None,
        "clip_ratio_low": s.clip_ratio_low,
        "clip_ratio_high": s.clip_ratio_high,
        "clip_ratio_c": s.clip_ratio_c,
        "loss_agg_mode": s.loss_agg_mode or "token-mean",
        "kl_loss_coef": s.kl_loss_coef or 0.0,
        "kl_loss_type": s.kl_loss_type or "low_var_kl",
        "entropy_coeff": s.entropy_coeff or 0.0,
    } | changes
    parts = ("update_log_probs", "old_log_probs", "advantages", "response_mask")
    terms = policy_loss(*(t[name][rows] for name in parts), **how)
    made: dict[str, Any] = dict(terms)
    return {name: float(value) for name, value in made.items()}


def _remade(scene: Scene, **changes: Any) -> Truth:
    """All losses again with other settings; the reported normaliser stays."""
    numbers = scene.tensors["mini_batch"]
    losses = []
    for number, loss in enumerate(scene.boundary.evidence["losses"]):
        made = _loss(scene, torch.nonzero(numbers == number).squeeze(1), **changes)
        losses.append({**loss, **{name: made[name] for name in TERMS}})
    return _told(scene, losses)


def _averaged(scene: Scene, *, over_ranks: bool) -> Truth:
    """Plain means of the losses of micro-batches, or of ranks."""
    losses = []
    for number, loss in enumerate(scene.boundary.evidence["losses"]):
        parts = _micros(scene, number)
        if over_ranks:
            parts = [[torch.cat(rank) for rank in parts]]
        made = [_loss(scene, rows) for rank in parts for rows in rank]
        mean = {name: float(np.mean([part[name] for part in made])) for name in TERMS}
        losses.append({**loss, **mean})
    return _told(scene, losses)


@seeded("update_actor", *LOSS, cause=SPLIT, origin=("B096",))
def mean_of_micro_batch_means(scene: Scene) -> Truth:
    """Each micro-batch is divided by its own tokens, and the means are averaged."""
    return _averaged(scene, over_ranks=False)


@seeded("update_actor", *LOSS, cause=SPLIT, bases=("plain", "long"))
def mean_of_rank_means(scene: Scene) -> Truth:
    """Each rank divides by its own tokens, and gradients are averaged over ranks."""
    return _averaged(scene, over_ranks=True)


@seeded("update_actor", *LOSS, cause=(SPLIT, "wrong_normaliser"), origin=("B097",))
def accumulation_not_divided(scene: Scene) -> Truth:
    """Micro-batch losses are added without dividing by their number."""
    return _rescaled(scene, lambda number: len(_micros(scene, number)[0]))


@seeded("update_actor", *LOSS, cause="wrong_normaliser", origin=("B099",), tuned=True)
def divided_by_padded_width(scene: Scene) -> Truth:
    """The divisor counts all columns of the padded batch."""
    losses = [dict(loss) for loss in scene.boundary.evidence["losses"]]
    numbers, width = scene.tensors["mini_batch"], scene.tensors["responses"].shape[1]
    for number, loss in enumerate(losses):
        count = float((numbers == number).sum() * width)
        for name in TERMS:
            loss[name] *= loss["normaliser"] / count
        loss["normaliser"] = count
    return _told(scene, losses)


@seeded("update_actor", *LOSS, cause="wrong_normaliser", bases=("tools", "corrected"),
        origin=("B027",), tuned=True)  # fmt: skip
def tokens_counted_before_masking(scene: Scene) -> Truth:
    """The token count was taken before tool tokens and rejected rows were masked."""
    losses = [dict(loss) for loss in scene.boundary.evidence["losses"]]
    numbers, attended = scene.tensors["mini_batch"], scene.attended()
    for number, loss in enumerate(losses):
        count = float(attended[numbers == number].sum())
        for name in TERMS:
            loss[name] *= loss["normaliser"] / count
        loss["normaliser"] = count
    return _told(scene, losses)


@seeded("update_actor", *LOSS, cause="wrong_normaliser", bases=("unbalanced", "far"),
        tuned=True)  # fmt: skip
def whole_batch_count_for_a_mini_batch(scene: Scene) -> Truth:
    """Every mini-batch is divided by the token count of the whole batch."""
    losses = [dict(loss) for loss in scene.boundary.evidence["losses"]]
    count = float(scene.trained().sum())
    for loss in losses:
        for name in TERMS:
            loss[name] *= loss["normaliser"] / count
        loss["normaliser"] = count
    return _told(scene, losses)


@seeded("update_actor", *LOSS, cause=("wrong_normaliser", SPLIT), origin=("B062",))
def reduced_over_too_many_ranks(scene: Scene) -> Truth:
    """Losses are summed over context-parallel peers that each hold the full value."""
    return _rescaled(scene, 2.0)


@seeded("update_actor", *LOSS, cause="wrong_normaliser", bases=("plain", "long"),
        tuned=True)  # fmt: skip
def sequence_mean_instead(scene: Scene) -> Truth:
    """Rows are averaged first although a token mean is configured."""
    return _remade(scene, loss_agg_mode="seq-mean-token-mean")


@seeded("update_actor", *LOSS, cause="wrong_clip", bases=("far",), tuned=True)
def clip_sides_swapped(scene: Scene) -> Truth:
    """The lower and the upper clip range are swapped."""
    s = scene.options.settings()
    return _remade(scene, clip_ratio_low=s.clip_ratio_high, clip_ratio_high=s.clip_ratio_low)


@seeded("update_actor", *LOSS, cause="wrong_clip", bases=("far",), tuned=True)
def clipping_left_out(scene: Scene) -> Truth:
    """The ratio is not clipped."""
    return _remade(scene, clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=None)


@seeded("update_actor", *LOSS, "kl_loss", cause="wrong_kl_estimator")
def another_kl_estimator(scene: Scene) -> Truth:
    """The plain estimator k1 is used instead of the configured low-variance one."""
    return _remade(scene, kl_loss_type="kl")


@seeded("update_actor", *LOSS, "kl_loss", cause="wrong_kl_estimator", bases=("far",))
def kl_arguments_swapped(scene: Scene) -> Truth:
    """The KL of the reference to the policy is taken."""
    return _kl(scene, lambda new, ref, mask: kl_estimate(ref, new, "low_var_kl"))


@seeded("update_actor", *LOSS, "kl_loss", "kl", cause=("wrong_normaliser", "wrong_kl_estimator"),
        origin=("B095",))  # fmt: skip
def kl_averaged_over_padding(scene: Scene) -> Truth:
    """The KL is a plain mean over all columns, padding included."""
    losses = []
    numbers, settings = scene.tensors["mini_batch"], scene.options.settings()
    width = scene.tensors["responses"].shape[1]
    for number, loss in enumerate(scene.boundary.evidence["losses"]):
        count = float((numbers == number).sum() * width)
        tokens = float(scene.trained()[numbers == number].sum())
        kl = loss["kl_loss"] * tokens / count
        total = loss["total"] + (settings.kl_loss_coef or 0.0) * (kl - loss["kl_loss"])
        losses.append({**loss, "kl_loss": kl, "total": total})
    return _told(scene, losses)


@seeded("update_actor", *LOSS, "kl_loss", "total", cause=("engine_setting",
        "wrong_kl_estimator"), bases=("kl_reward_far",), origin=("C03",), tuned=True)  # fmt: skip
def kl_in_reward_and_loss(scene: Scene) -> Truth:
    """The KL is taken off the rewards, and the loss adds it again."""
    losses = []
    for number, loss in enumerate(scene.boundary.evidence["losses"]):
        rows = torch.nonzero(scene.tensors["mini_batch"] == number).squeeze(1)
        t = scene.tensors
        kl = kl_estimate(t["update_log_probs"][rows], t["ref_log_prob"][rows], "low_var_kl")
        value = float(aggregate(kl, t["response_mask"][rows], "token-mean"))
        losses.append({**loss, "kl_loss": value, "total": loss["total"] + 0.5 * value})
    return _told(scene, losses)


@seeded("update_actor", *LOSS, "entropy_loss", "total", cause=("entropy_sign", "wrong_sign",
        "wrong_normaliser"), bases=("entropy",), tuned=True)  # fmt: skip
def entropy_punished(scene: Scene) -> Truth:
    """The entropy bonus is added to the loss instead of being taken off."""
    coefficient = scene.options.settings().entropy_coeff or 0.0
    losses = [
        {**loss, "total": loss["total"] + 2 * coefficient * loss["entropy_loss"]}
        for loss in scene.boundary.evidence["losses"]
    ]
    return _told(scene, losses)


@seeded("update_actor", *LOSS, "entropy_loss", "entropy", cause=(SPLIT, "wrong_normaliser"),
        bases=("entropy",), origin=("B014",))  # fmt: skip
def entropy_broadcast(scene: Scene) -> Truth:
    """A vector times a column makes a square: entropy grows with the micro-batch size."""
    coefficient = scene.options.settings().entropy_coeff or 0.0
    losses = []
    for loss in scene.boundary.evidence["losses"]:
        more = (scene.options.micro_rows - 1) * loss["entropy_loss"]
        losses.append({**loss, "entropy_loss": loss["entropy_loss"] + more,
                       "total": loss["total"] - coefficient * more})  # fmt: skip
    return _told(scene, losses)


@seeded("update_actor", "losses", "actor/grad_norm", "metrics", "loss", "response_mask",
        cause=("non_finite", SPLIT), origin=("B034", "B100"))  # fmt: skip
def empty_micro_batch_divides_by_zero(scene: Scene) -> Truth:
    """A micro-batch without trained tokens is divided by its own count: 0 / 0."""
    metrics = dict(scene.boundary.evidence["metrics"])
    metrics["actor/grad_norm"] = float("nan")
    scene.tell(metrics=metrics)
    return _rescaled(scene, float("nan"))


@seeded("update_actor", "actor/kl_loss", "metrics.kl", "metrics", "kl_loss",
        cause="wrong_kl_estimator", bases=("far", "long"), origin=("B090",),
        tuned=True)  # fmt: skip
def logged_kl_of_another_estimator(scene: Scene) -> Truth:
    """The logged KL is the plain estimator, negative where the trained one cannot be."""
    metrics = dict(scene.boundary.evidence["metrics"])
    metrics["actor/kl_loss"] = -abs(metrics["actor/kl_loss"]) - 0.05
    scene.tell(metrics=metrics)
    return Truth("actor/kl_loss")


def _kl(scene: Scene, estimate: Any) -> Truth:
    losses = []
    t, settings = scene.tensors, scene.options.settings()
    for number, loss in enumerate(scene.boundary.evidence["losses"]):
        rows = torch.nonzero(t["mini_batch"] == number).squeeze(1)
        mask = t["response_mask"][rows]
        values = estimate(t["update_log_probs"][rows], t["ref_log_prob"][rows], mask)
        kl = float(aggregate(values, mask, settings.loss_agg_mode or "token-mean"))
        total = loss["total"] + (settings.kl_loss_coef or 0.0) * (kl - loss["kl_loss"])
        losses.append({**loss, "kl_loss": kl, "total": total})
    return _told(scene, losses)
