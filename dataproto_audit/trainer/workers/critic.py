"""A value model's jobs on one rank: scoring rows, one mini-batch of its update, all of them.

The backend must have been built with ``ModelSpec(head="value")``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.trainer.algorithms.losses import token_weights, value_loss
from dataproto_audit.trainer.backends.base import Backend, TokenOutputs
from dataproto_audit.trainer.batching import Index
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers.inputs import micro_batch, scatter
from dataproto_audit.trainer.workers.spec import ValueLossOptions

VALUE_TERMS = ("vf_loss", "vf_clipfrac", "vpred_mean")
"""The value loss, the fraction of tokens whose value is held, and the mean value."""


@dataclass(frozen=True)
class ValueResult:
    """What a rank did with one mini-batch: ``outputs`` belong to ``plan.micro_batches`` and were
    computed before the optimizer step, ``sums`` are this rank's shares of :data:`VALUE_TERMS`."""

    outputs: list[TokenOutputs]
    sums: dict[str, float]
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
        means_BR = mask_BR.to(torch.float32) / max(plan.counts.tokens, 1)
        clipped, mean = ((x * means_BR).sum() for x in (clipped_BR, outputs.values_BR))
        sums.append(torch.stack([share, clipped, mean]).detach())
        return share

    micros = [micro_batch(batch, rows, device=backend.device) for rows in plan.micro_batches]
    outputs = backend.accumulate(micros, loss, temperature=1.0, entropy=False, before=before)
    norm = backend.optimizer_step()
    # Nothing was summed on a pipeline stage that is not the last one.
    total = torch.stack(sums).double().sum(0).tolist() if sums else [0.0] * len(VALUE_TERMS)
    return ValueResult(outputs, dict(zip(VALUE_TERMS, total, strict=True)), norm)


def update_values(
    backend: Backend,
    batch: Any,
    plan: Sequence[MiniBatchPlan],
    *,
    options: ValueLossOptions,
    before: Callable[[int, int, int], None],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Run the mini-batches of ``plan`` in order, one optimizer step each. Collective.

    Returns per row ``update_values`` f32[rows, response], computed in the row's mini-batch of the
    first epoch before its step, and ``value_mini_batch`` i64[rows]; and of each mini-batch the
    ``sums`` and ``grad_norm`` of :class:`ValueResult`. ``before(mini_batch, k, count)`` is called
    ahead of micro-batch k.
    """
    rows, width = batch["responses"].shape
    values_BR, mini_batch_B = torch.zeros(rows, width), torch.zeros(rows, dtype=torch.int64)
    steps = []
    for mini in plan:
        result = train_values(
            backend,
            batch,
            mini,
            options=options,
            before=partial(_before, before, mini),
        )
        steps.append({"sums": result.sums, "grad_norm": result.grad_norm})
        if mini.epoch == 0:
            scatter(values_BR, mini.micro_batches, [out.values_BR for out in result.outputs])
            mini_batch_B[torch.from_numpy(mini.rows)] = mini.index
    return {"update_values": values_BR, "value_mini_batch": mini_batch_B}, steps


def _before(tell: Callable[[int, int, int], None], mini: MiniBatchPlan, position: int) -> None:
    tell(mini.index, position, len(mini.micro_batches))
