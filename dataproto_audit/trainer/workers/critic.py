"""A value model's two jobs on one rank: scoring rows, and one mini-batch of its update.

The backend must have been built with ``ModelSpec(head="value")``. Not wired into the loop: no role
of a run is a critic yet, and advantages come from groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.trainer.algorithms.losses import token_weights, value_loss
from dataproto_audit.trainer.backends.base import Backend, TokenOutputs
from dataproto_audit.trainer.batching import Index
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers.inputs import micro_batch, scatter
from dataproto_audit.trainer.workers.spec import ValueLossOptions


@dataclass(frozen=True)
class ValueResult:
    """This rank's shares of the value loss and of the clipped fraction, and the gradient norm."""

    vf_loss: float
    vf_clipfrac: float
    grad_norm: float


def compute_values(
    backend: Backend,
    batch: Any,
    micro_batches: Sequence[Index],
    *,
    before: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """f32[rows, response]: column t is the value of the state before ``responses[:, t]``, 0 where
    the response is not attended. Collective; zeros on ranks that do not collect."""
    micros = [micro_batch(batch, rows, device=backend.device) for rows in micro_batches]
    outputs = backend.infer(micros, temperature=1.0, entropy=False, before=before)
    values_BR = torch.zeros(batch["responses"].shape)
    scatter(values_BR, micro_batches, [out.values_BR for out in outputs])
    return values_BR


def train_values(
    backend: Backend,
    batch: Any,
    plan: MiniBatchPlan,
    *,
    options: ValueLossOptions,
    before: Callable[[int], None] = lambda _: None,
) -> ValueResult:
    """Accumulate the gradient of the mini-batch's value loss, clip and step. Collective.

    ``batch`` holds the forward fields, response_mask, ``values`` (as scored before the update) and
    ``returns`` f32[rows, response].
    """
    sums: list[Tensor] = []

    def loss(position: int, outputs: TokenOutputs) -> Tensor:
        assert outputs.values_BR is not None, "a value model"
        rows, width = torch.from_numpy(plan.micro_batches[position]), outputs.values_BR.shape[1]
        mask_BR, old_BR, returns_BR = (
            batch[name][rows, :width].to(backend.device)
            for name in ("response_mask", "values", "returns")
        )
        weights_BR = token_weights(mask_BR, mode=options.loss_agg_mode, counts=plan.counts)
        loss_BR, clipped_BR = value_loss(
            outputs.values_BR, old_BR, returns_BR, clip=options.cliprange_value
        )
        share = (loss_BR * weights_BR).sum()
        clipped = (clipped_BR * mask_BR).sum() / max(plan.counts.tokens, 1)
        sums.append(torch.stack([share.detach(), clipped.to(share.dtype)]))
        return share

    micros = [micro_batch(batch, rows, device=backend.device) for rows in plan.micro_batches]
    backend.accumulate(micros, loss, temperature=1.0, entropy=False, before=before)
    norm = backend.optimizer_step()
    total = torch.stack(sums).double().sum(0).tolist() if sums else [0.0, 0.0]
    return ValueResult(total[0], total[1], norm)
