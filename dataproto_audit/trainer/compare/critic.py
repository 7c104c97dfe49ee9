"""The value model of a comparison: the same layers under a drawn head, scored and updated once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.base import VALUE_HEAD, Backend, OptimSpec
from dataproto_audit.trainer.batching import Index
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers.critic import compute_values, train_values
from dataproto_audit.trainer.workers.engines import make_backend
from dataproto_audit.trainer.workers.spec import ValueLossOptions, WorkerSpec

LOSS = ValueLossOptions(cliprange_value=0.5)


def drawn_head(hidden_size: int) -> dict[str, Tensor]:
    """Weight and bias of the value head under their Hugging Face names; values of about 1 where
    the last norm gives states of about 1."""
    random = torch.Generator().manual_seed(17)
    weight = torch.randn(1, hidden_size, generator=random) / hidden_size**0.5
    return dict(zip(VALUE_HEAD, (weight, torch.full((1,), 0.1)), strict=True))


@dataclass
class ValueAnswer:
    """What a rank computed: values of its rows (zeros unless it collects) and pieces of the
    gradients."""

    values: Tensor
    gradients: shards.ShardPayload


def value_step(
    spec: WorkerSpec,
    chunk: DataProto,
    forward: tuple[Index, ...],
    plan: MiniBatchPlan,
    *,
    optim: OptimSpec,
    like: Backend,
) -> ValueAnswer:
    """Build the value model in the layout of ``like``, score ``chunk`` and make one step on it.

    Collective. The gradients are those ahead of the step.
    """
    backend = make_backend(
        replace(spec, model=replace(spec.model, head="value")), device=like.device, optim=optim
    )
    set_head(backend)
    values = compute_values(backend, chunk.batch, forward)
    kept: list[shards.ShardPayload] = []
    step = backend.optimizer_step

    def looking() -> float:
        kept.append(_payload(backend))
        return step()

    backend.optimizer_step = looking  # type: ignore[method-assign]  # this instance only
    train_values(backend, chunk.batch, plan, options=LOSS)
    return ValueAnswer(values, kept[0])


def set_head(backend: Backend) -> None:
    """Write the drawn head into a value model. *Local.*"""
    found = backend.shards()
    # The last stage alone holds the head; its width is that of a row of the weight.
    weight, _ = VALUE_HEAD
    if weight not in found:
        return
    drawn = drawn_head(found[weight][1].shape[1])
    with torch.no_grad():
        for name, whole in drawn.items():
            piece, spec = found[name]
            shards.fill(piece, spec, whole)
    backend.weights_changed()


def _payload(backend: Backend) -> shards.ShardPayload:
    payload = shards.pack(
        backend.gradients(), rank=backend.rank, world_size=backend.world_size, version=0,
        aliases=backend.aliases,
    )  # fmt: skip
    copies: dict[str, Any] = {name: array.copy() for name, array in payload.arrays.items()}
    payload.arrays.update(copies)
    return payload
