"""One mini-batch of the policy update on one rank: loss, gradients, optimizer step, sums.

The sums of a rank are already divided by the mini-batch's global count, so the driver adds those
of all ranks and has the value over the whole mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.trainer.algorithms.kl import kl_per_token
from dataproto_audit.trainer.algorithms.losses import (
    negative_log_likelihood,
    policy_loss,
    token_weights,
)
from dataproto_audit.trainer.backends.base import Backend, TokenOutputs
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers.inputs import micro_batch
from dataproto_audit.trainer.workers.spec import LossOptions

TERMS = (
    "pg_loss",
    "kl_loss",
    "entropy_loss",
    "total",
    "ppo_kl",
    "pg_clipfrac",
    "pg_clipfrac_lower",
)


@dataclass
class MiniBatchResult:
    """What a rank did with one mini-batch.

    ``outputs`` belong to ``plan.micro_batches`` and were computed before the optimizer step.
    ``sums`` are this rank's shares of :data:`TERMS`. ``stepped`` is False where the gradient norm
    was not finite, so that the step was left out.
    """

    outputs: list[TokenOutputs]
    sums: dict[str, float]
    grad_norm: float
    stepped: bool


def train_mini_batch(
    backend: Backend,
    batch: Any,
    plan: MiniBatchPlan,
    *,
    options: LossOptions,
    temperature: float,
    before: Callable[[int], None],
) -> MiniBatchResult:
    """Accumulate the gradient of the mini-batch, clip and step.

    ``batch`` is this rank's chunk: a TensorDict of the forward fields, response_mask,
    old_log_probs, advantages, and ref_log_prob where the KL loss is on. ``before(k)`` is called
    ahead of micro-batch k's collectives.
    """
    loss = _PolicyLoss(backend, batch, plan, options)
    micros = [micro_batch(batch, rows, device=backend.device) for rows in plan.micro_batches]
    outputs = backend.accumulate(
        micros,
        loss,
        temperature=temperature,
        entropy=options.entropy_coeff != 0.0,
        before=before,
    )
    grad_norm = backend.optimizer_step()
    return MiniBatchResult(
        outputs=outputs,
        sums=dict(zip(TERMS, loss.sums(), strict=True)),
        grad_norm=grad_norm,
        stepped=math.isfinite(grad_norm),
    )


class _PolicyLoss:
    """This rank's share of the loss of each micro-batch; keeps the shares of every term."""

    def __init__(
        self, backend: Backend, batch: Any, plan: MiniBatchPlan, options: LossOptions
    ) -> None:
        self._device, self._batch, self._plan, self._options = backend.device, batch, plan, options
        self._sums: list[Tensor] = []

    def __call__(self, position: int, outputs: TokenOutputs) -> Tensor:
        options, plan = self._options, self._plan
        rows = torch.from_numpy(plan.micro_batches[position])
        width = outputs.log_probs_BR.shape[1]

        def take(name: str) -> Tensor:
            taken: Tensor = self._batch[name][rows, :width].to(self._device)
            return taken

        mask_BR = take("response_mask")
        weights_BR = token_weights(mask_BR, mode=options.loss_agg_mode, counts=plan.counts)
        terms = policy_loss(
            outputs.log_probs_BR,
            take("old_log_probs"),
            take("advantages"),
            clip_low=options.clip_ratio_low,
            clip_high=options.clip_ratio_high,
            clip_c=options.clip_ratio_c,
        )
        policy = (terms.loss * weights_BR).sum()
        total = policy
        kl = entropy = torch.zeros_like(policy.detach())
        if options.use_kl_loss:
            kl_BR = kl_per_token(
                outputs.log_probs_BR, take("ref_log_prob"), estimator=options.kl_loss_type
            )
            kl = (kl_BR * weights_BR).sum()
            total = total + options.kl_loss_coef * kl
        if outputs.entropy_BR is not None:
            entropy = (outputs.entropy_BR * weights_BR).sum()
            total = total - options.entropy_coeff * entropy
        share_BR = mask_BR.to(torch.float32) / max(plan.counts.tokens, 1)
        means = [
            (value_BR * share_BR).sum()
            for value_BR in (terms.kl, terms.clipped, terms.clipped_lower)
        ]
        self._sums.append(torch.stack([policy, kl, entropy, total, *means]).detach())
        return total

    def sums(self) -> list[float]:
        """Shares of :data:`TERMS` over all micro-batches."""
        if not self._sums:  # a pipeline stage that is not the last one
            return [0.0] * len(TERMS)
        values: list[float] = torch.stack(self._sums).double().sum(0).tolist()
        return values


def train_supervised(
    backend: Backend, batch: Any, plan: MiniBatchPlan, *, before: Callable[[int], None]
) -> float:
    """One supervised step: token-mean negative log-likelihood. Returns this rank's share."""
    shares: list[Tensor] = []

    def loss(position: int, outputs: TokenOutputs) -> Tensor:
        rows = torch.from_numpy(plan.micro_batches[position])
        mask_BR = batch["response_mask"][rows, : outputs.log_probs_BR.shape[1]].to(backend.device)
        weights_BR = token_weights(mask_BR, mode="token-mean", counts=plan.counts)
        share = (negative_log_likelihood(outputs.log_probs_BR) * weights_BR).sum()
        shares.append(share.detach())
        return share

    micros = [micro_batch(batch, rows, device=backend.device) for rows in plan.micro_batches]
    backend.accumulate(micros, loss, temperature=1.0, entropy=False, before=before)
    backend.optimizer_step()
    return float(torch.stack(shares).sum()) if shares else 0.0
