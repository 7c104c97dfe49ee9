"""Megatron's optimizers behind the calls that a backend needs, and what a checkpoint keeps.

Weight decay and learning rate are set on the groups directly: ``OptimizerParamScheduler`` would
multiply both from a schedule of its own, while here the driver says the rate of every step, and
every weight decays alike (as with FSDP; Megatron by itself leaves norms and biases out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import OptimSpec
from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.backends.moments import REMEDY, moments_of

NAMES = {"adamw": "adam", "sgd": "sgd"}


def wrap(chunks: Sequence[Any], config: Any, *, distributed: bool) -> list[Any]:
    """Chunks with their gradient buffers; gradients are summed in float32."""
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
    )
    with shims.region():
        return [
            DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]


class Optimizer:
    """One optimizer over all chunks of a rank. Build it on all ranks together."""

    def __init__(self, spec: OptimSpec, chunks: Sequence[Any], *, distributed: bool) -> None:
        if spec.name not in NAMES:
            known = ", ".join(NAMES)
            raise UsageError(
                "DPA851", f"unknown actor.optim.name {spec.name!r}.", f"Choose one of {known}."
            )
        self._chunks = chunks
        dtype = next(chunks[0].parameters()).dtype
        config = OptimizerConfig(
            optimizer=NAMES[spec.name],
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_eps=spec.eps,
            sgd_momentum=0.0,
            clip_grad=spec.grad_clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        with shims.region():
            # No overrides: the standard ones would take decay off norms and biases.
            self._whole = get_megatron_optimizer(
                config, list(chunks), config_overrides={}, use_gloo_process_groups=False
            )
        self._clip = spec.grad_clip
        self._separate = dtype != torch.float32

    @property
    def _members(self) -> list[Any]:
        return list(self._whole.chained_optimizers)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self._whole.param_groups:
            group["lr"] = lr

    def step(self) -> float:
        """Clip, step, clear; the norm before clipping. One that is not finite leaves weights."""
        with shims.region():
            self._whole.prepare_grads()
            norm = float(self._whole.get_grad_norm())
            if math.isfinite(norm):
                for member in self._members:
                    parameters = member.get_parameters()
                    if self._clip > 0 and parameters:
                        clip_grad_by_total_norm_fp32(parameters, self._clip, norm)
                self._whole.step_with_ready_grads()
            self.clear()
        return norm

    def clear(self) -> None:
        """Set gradients to zero."""
        with shims.region():
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._whole.zero_grad()

    def follow_weights(self) -> None:
        """Take over weights that were written from outside into float32 masters."""
        with torch.no_grad(), shims.region():
            self._whole.reload_model_params()

    def state(self) -> dict[str, Tensor]:
        """Moments, counters and float32 masters of this rank, by position.

        Masters of a float32 model are views of its weights and left out.
        """
        out: dict[str, Tensor] = {}
        for m, member in enumerate(self._members):
            for p, param in enumerate(member.get_parameters()):
                for key, value in member.optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        out[f"optim/{m}/{p}/{key}"] = value
                if self._separate:
                    out[f"main/{m}/{p}"] = param.detach()
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back :meth:`state`. Every parameter gets a step counter of its own: one that is
        shared is counted up once for each of them (distrib_optimizer.py:818).

        Raises DPA804 if a parameter lacks its float32 master, or state that others have.
        """
        for m, member in enumerate(self._members):
            parameters = member.get_parameters()
            found = moments_of(state, [f"{m}/{p}" for p in range(len(parameters))])
            per_param = {position: kept for position, kept in enumerate(found) if kept}
            for p, param in enumerate(parameters if self._separate else ()):
                master = state.get(f"main/{m}/{p}")
                if master is None or master.shape != param.shape:
                    raise UsageError(
                        "DPA804",
                        f"the checkpoint lacks the float32 master of parameter {m}/{p}, of shape "
                        f"{tuple(param.shape)}.",
                        REMEDY,
                    )
                with torch.no_grad():
                    param.copy_(master)
            groups = member.optimizer.state_dict()["param_groups"]
            member.optimizer.load_state_dict({"state": per_param, "param_groups": groups})
