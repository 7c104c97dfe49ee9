"""Megatron's optimizers behind the calls that a backend needs, and what a checkpoint keeps.

Weight decay and learning rate are set on the groups directly: the driver says both for every
update, by Megatron's own schedule if asked for (:mod:`dataproto_audit.trainer.rates`), and every
weight decays alike (as with FSDP; Megatron by itself leaves norms and biases out).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import OptimSpec
from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.backends.moments import REMEDY, STATELESS, moments_of, set_rates

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


class Owned(NamedTuple):
    """A parameter, ``CHUNK/NAME``, as one of the optimizer's ``members`` steps on it: ``main``, the
    run ``part`` of it (None: all)."""

    name: str
    member: Any
    main: Any
    part: tuple[int, int] | None


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
        self.separate: bool = dtype != torch.float32
        """Whether float32 masters are kept beside the weights."""

    @property
    def _members(self) -> list[Any]:
        return list(self._whole.chained_optimizers)

    def set_rates(self, lr: float, weight_decay: float | None) -> None:
        """Learning rate, and weight decay if given, of the next steps."""
        set_rates(self._whole.param_groups, lr, weight_decay)

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

    def owned(self) -> Iterator[Owned]:
        """What this rank's optimizer steps on, in its order."""
        names = {
            id(param): f"{number}/{name}"
            for number, chunk in enumerate(self._chunks)
            for name, param in chunk.module.named_parameters()
        }
        for member in self._members:
            places = getattr(member, "model_param_group_index_map", None)  # the distributed one
            groups = member.optimizer.param_groups
            if places is not None:
                by_place = {place: param for param, place in places.items()}
                for g, group in enumerate(groups):
                    for o, main in enumerate(group["params"]):
                        param = by_place[g, o]
                        part = member._get_model_param_range_map(param)["param"]
                        yield Owned(names[id(param)], member, main, (part.start, part.end))
                continue
            mains = {
                id(param if getattr(param, "main_param", None) is None else param.main_param): name
                for chunk in self._chunks
                for param in chunk.module.parameters()
                for name in (names[id(param)],)
            }
            for group in groups:
                for main in group["params"]:
                    yield Owned(mains[id(main)], member, main, None)

    def state(self) -> dict[str, Tensor]:
        """Moments, counters and float32 masters of this rank, by chunk and name.

        Masters of a float32 model are views of its weights and left out. ``range/NAME`` is the run
        of the flattened parameter that a moment of the distributed optimizer is of.
        """
        out: dict[str, Tensor] = {}
        owned = list(self.owned())
        states = [one.member.optimizer.state.get(one.main, {}) for one in owned]
        for one, kept in zip(owned, states, strict=True):
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    out[f"optim/{one.name}/{key}"] = value
            step = group_step(one.member.optimizer, one.main) if kept else None
            if step is not None and "step" not in kept:
                out[f"optim/{one.name}/step"] = torch.tensor(float(step))
            if not kept and any(states):  # taken over from FSDP, and not stepped on yet
                out[f"optim/{one.name}/{STATELESS}"] = torch.empty(0)
            if self.separate:
                out[f"main/{one.name}"] = one.main.detach()
            if one.part is not None:
                out[f"range/{one.name}"] = torch.tensor(one.part)
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back :meth:`state`. Every parameter gets a step counter of its own: one that is
        shared is counted up once for each of them (distrib_optimizer.py:818).

        Raises DPA804 if a parameter lacks its float32 master, or state that others have.
        """
        owned = list(self.owned())
        found = moments_of(state, [one.name for one in owned])
        for member in self._members:
            mine = [(one, kept) for one, kept in zip(owned, found, strict=True)
                    if one.member is member]  # fmt: skip
            for one, _ in mine if self.separate else ():
                master = state.get(f"main/{one.name}")
                if master is None or master.shape != one.main.shape:
                    raise UsageError(
                        "DPA804",
                        f"the checkpoint lacks the float32 master of parameter {one.name}, of "
                        f"shape {tuple(one.main.shape)}.",
                        REMEDY,
                    )
                with torch.no_grad():
                    one.main.copy_(master)
            per_param = {position: kept for position, (_, kept) in enumerate(mine) if kept}
            groups = member.optimizer.state_dict()["param_groups"]
            if not isinstance(member.optimizer, torch.optim.Adam):
                steps_to_groups(groups, per_param)
            member.optimizer.load_state_dict({"state": per_param, "param_groups": groups})


def group_step(optimizer: Any, param: Any) -> float | None:
    """The step counter of the group of ``param``; None where the optimizer keeps none there.

    Transformer Engine's and apex's FusedAdam do, torch's Adam has one for each parameter.
    """
    for group in optimizer.param_groups:
        if "step" in group and any(param is held for held in group["params"]):
            return float(group["step"])
    return None


def steps_to_groups(
    groups: Sequence[dict[str, Any]], per_param: Mapping[int, dict[str, Tensor]]
) -> None:
    """Move step counters to the groups, in place, for an optimizer that reads them there.

    ``groups`` name parameters by position, as a state dict does. Without a counter FusedAdam begins
    at step 1 again, and corrects a bias that the moments no longer have.
    """
    for group in groups:
        held = [per_param[place] for place in group["params"] if place in per_param]
        steps = [int(kept.pop("step")) for kept in held if "step" in kept]
        if steps:
            group["step"] = max(steps)
