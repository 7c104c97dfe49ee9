"""FSDP2: every weight cut along dimension 0 over the ranks, gathered around its use.

The same code runs over gloo on CPUs and NCCL on GPUs. Each rank builds the whole model in host
memory before it is cut, so start-up needs as much host memory as the model has, per rank.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import fsdp_limits, hf, layers
from dataproto_audit.trainer.backends.base import (
    Backend,
    FSDPOptions,
    MicroBatch,
    ModelSpec,
    OptimSpec,
    TokenOutputs,
)
from dataproto_audit.trainer.backends.moments import STATELESS, moments_of, set_rates, weight_of
from dataproto_audit.trainer.backends.scoring import TokenScoring
from dataproto_audit.trainer.backends.shards import ShardSpec, dtype_name
from dataproto_audit.trainer.backends.ulysses import gather_tokens, sequence_group
from dataproto_audit.trainer.backends.whole import Whole, fsdp_state


class FSDPBackend(Backend):
    """One rank of a model sharded with ``fully_shard``. Build it on all ranks together.

    ``optim`` None makes a frozen model. Raises DPA851, DPA852 and DPA854 for options, folders and
    sizes. Ranks that share sequences get the same rows; the first of them collects.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        device: torch.device,
        optim: OptimSpec | None,
        options: FSDPOptions = FSDPOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        fsdp_limits.check_layout(model, options, world_size=self.world_size, device=device.type)
        shared = options.sequence_parallel
        self.dp_rank, self.dp_size = self.rank // shared, self.world_size // shared
        self.collects = self.speaks = self.rank % shared == 0
        self.device, self.trainable = device, optim is not None
        fsdp_limits.check_model(model, options, hf.model_config(model))
        self.model = hf.build_model(model)
        self.model.requires_grad_(self.trainable)
        self.aliases = _aliases(self.model)
        self._keep = hf.takes_logits_to_keep(self.model)
        self._scoring: TokenScoring | None = None
        if model.remove_padding or model.fused_kernels or model.values:
            group = sequence_group(shared)
            self._scoring = TokenScoring(model.remove_padding, model.fused_kernels, group)
            self._scoring.install(self.model)
        self._accumulate_whole = options.wrap == "root"
        self._syncing = True
        self._mesh = _mesh(options, device, self.world_size)
        _shard(self.model, options, self._mesh)
        self._params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self._shards = {name: self._piece(param) for name, param in self._params.items()}
        self._shards |= _persistent_buffers(self.model)
        # The optimizer works on each rank's piece as a plain tensor: same storage as the DTensor,
        # same update, without a dispatch through DTensor for every operation.
        self._local = {
            name: nn.Parameter(self._shards[name][0], requires_grad=self.trainable)
            for name in self._params
            if self._shards[name][0].numel()
        }
        self._optimizer: torch.optim.Optimizer | None = None
        self.grad_clip = 0.0
        if optim is not None:
            self.reset_optimizer(optim)

    def forward(self, micro: MicroBatch, *, temperature: float, entropy: bool) -> TokenOutputs:
        """See :meth:`Backend.forward`. Collective."""
        if self._scoring is not None:
            return self._scoring.score(self.model, micro, temperature=temperature, entropy=entropy)
        logits = hf.response_logits(self.model, micro, keep=self._keep)
        return hf.token_outputs(logits, micro, temperature=temperature, entropy=entropy)

    def layers(self) -> dict[str, nn.Module]:
        """See :meth:`Backend.layers`."""
        return layers.modules_of(self.model)

    def hidden_states(self, micro: MicroBatch, output: Tensor) -> Tensor:
        """See :meth:`Backend.hidden_states`. Collective where ranks share tokens."""
        if self._scoring is not None and self._scoring.packed:
            group = self._scoring.group
            line = output[0] if group is None else gather_tokens(output[0], group)
            return line[layers.line_positions(micro)]
        rows, columns, _ = layers.compared_tokens(micro.attention_mask_BT)
        return output[rows, columns]

    def packed_notes(self) -> list[dict[str, Any]]:
        """See :meth:`Backend.packed_notes`."""
        if self._scoring is None:
            return []
        notes, self._scoring.notes = self._scoring.notes, []
        return notes

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See :meth:`Backend.backward`. Collective.

        FSDP averages gradients over ranks, so the loss is multiplied by their number; ranks that
        share sequences each bring the gradient of their own tokens. A model
        wrapped at the root is whole on every rank in any case: its gradients are reduced once
        per mini-batch. Wrapped by layer, every micro-batch reduces, which keeps memory low.
        """
        if self._accumulate_whole and last != self._syncing:
            root = cast(FSDPModule, self.model)
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
            self._syncing = last
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]  # torch's signature

    @torch.no_grad()
    def optimizer_step(self) -> float:
        """See :meth:`Backend.optimizer_step`. Collective: one scalar is summed over ranks."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        grads = self._local_gradients()
        for name, param in self._local.items():
            param.grad = grads.get(name)
        present = list(grads.values())
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if present:
            norms = torch._foreach_norm(present)
            squares = torch.stack(norms).double().square().sum().to(self.device)
        if self.world_size > 1:
            dist.all_reduce(squares, group=self._mesh.get_group(self._mesh.ndim - 1))
        norm = math.sqrt(squares.item())
        if math.isfinite(norm):
            factor = self.grad_clip / (norm + 1e-6)
            if 0 < factor < 1:
                torch._foreach_mul_(present, factor)
            self._optimizer.step()
        for param in (*self._params.values(), *self._local.values()):
            param.grad = None
        return norm

    def reset_optimizer(self, spec: OptimSpec) -> None:
        """See :meth:`Backend.reset_optimizer`."""
        self._optimizer = make_optimizer(list(self._local.values()), spec)
        self.grad_clip = spec.grad_clip

    def set_rates(self, lr: float, weight_decay: float | None = None) -> None:
        """See :meth:`Backend.set_rates`."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        set_rates(self._optimizer.param_groups, lr, weight_decay)

    def train_mode(self, training: bool) -> None:
        """See :meth:`Backend.train_mode`."""
        if self.model.training != training:
            self.model.train(training)

    def shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """See :meth:`Backend.shards`."""
        return self._shards

    def gradients(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """See :meth:`Backend.gradients`; a weight without gradient gets zeros."""
        grads = self._local_gradients()
        return {
            name: (grads.get(name, torch.zeros_like(self._shards[name][0])), self._shards[name][1])
            for name in self._params
        }

    def weights_changed(self) -> None:
        """See :meth:`Backend.weights_changed`."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`Backend.state`. Names: ``model/NAME`` and ``optim/NAME/KEY``.

        A weight that had no gradient has no state; that is noted, or it would look lost.
        """
        out = {f"model/{name}": piece.detach() for name, (piece, _) in self._shards.items()}
        if self._optimizer is not None:
            states = {name: self._optimizer.state.get(p, {}) for name, p in self._local.items()}
            for name, kept in states.items():
                for key, value in kept.items():
                    out[f"optim/{name}/{key}"] = value
                if not kept and any(states.values()):
                    out[f"optim/{name}/{STATELESS}"] = torch.empty(0)
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Backend.load_state`."""
        for name, (piece, _) in self._shards.items():
            given = weight_of(state, f"model/{name}", name, piece, wrote="wrapping")
            with torch.no_grad():
                piece.copy_(given)
        self.weights_changed()
        if self._optimizer is not None:
            self._load_optimizer(state)

    def state_from(self, whole: Whole) -> dict[str, Tensor]:
        """See :meth:`Backend.state_from`."""
        return fsdp_state(whole, self._shards, list(self._local) if self.trainable else [])

    def _load_optimizer(self, state: dict[str, Tensor]) -> None:
        assert self._optimizer is not None
        found = moments_of(state, self._local)
        per_param = {position: kept for position, kept in enumerate(found) if kept}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": per_param, "param_groups": groups})

    def _local_gradients(self) -> dict[str, Tensor]:
        """This rank's non-empty gradient pieces, sharing memory with the DTensors."""
        return {
            name: cast(DTensor, self._params[name].grad).to_local()
            for name in self._local
            if self._params[name].grad is not None
        }

    def _piece(self, param: nn.Parameter) -> tuple[Tensor, ShardSpec]:
        whole = cast(DTensor, param)
        with torch.no_grad():
            local: Tensor = whole.to_local()
        rows, dim = whole.shape[0], self._mesh.ndim - 1
        part = self._mesh.get_local_rank(dim)
        start = min(part * math.ceil(rows / self._mesh.size(dim)), rows)
        copied = dim == 1 and self._mesh.get_local_rank(0) > 0
        return local, ShardSpec(tuple(whole.shape), dtype_name(whole.dtype), start, copy=copied)


def make_optimizer(params: list[nn.Parameter], spec: OptimSpec) -> torch.optim.Optimizer:
    """AdamW (fused kernel) or SGD; raises DPA851 for another name."""
    if spec.name == "adamw":
        return torch.optim.AdamW(
            params,
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )
    if spec.name == "sgd":
        return torch.optim.SGD(params, lr=spec.lr, weight_decay=spec.weight_decay)
    raise UsageError("DPA851", f"unknown actor.optim.name {spec.name!r}.", "Choose adamw or sgd.")


def _mesh(options: FSDPOptions, device: torch.device, world_size: int) -> DeviceMesh:
    """All ranks in one dimension, or copies x ranks of a copy."""
    size = world_size if options.fsdp_size == -1 else options.fsdp_size
    if size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    shape = (world_size // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _shard(model: nn.Module, options: FSDPOptions, mesh: DeviceMesh) -> None:
    if options.wrap not in ("root", "layer"):
        raise UsageError(
            "DPA851", f"unknown fsdp_config.wrap {options.wrap!r}.", "Choose root or layer."
        )
    if options.param_dtype not in hf.DTYPES:
        raise UsageError(
            "DPA851",
            f"unknown fsdp_config.param_dtype {options.param_dtype!r}.",
            f"Choose one of {', '.join(hf.DTYPES)}.",
        )
    by_layer = options.wrap == "layer"
    reshard = by_layer if options.reshard_after_forward is None else options.reshard_after_forward
    common: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if options.param_dtype != "float32":
        common["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=hf.DTYPES[options.param_dtype], reduce_dtype=torch.float32
        )
    if options.offload:
        common["offload_policy"] = CPUOffloadPolicy()
    if by_layer:
        layers = set(getattr(model, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, **common)
    fully_shard(model, **common)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Second names of tied weights: alias -> the name under which it is trained."""
    first: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(param), name)
        if kept != name:
            aliases[name] = kept
    return aliases


def _persistent_buffers(model: nn.Module) -> dict[str, tuple[Tensor, ShardSpec]]:
    kept = set(model.state_dict().keys())
    return {
        name: (buffer, ShardSpec(tuple(buffer.shape), dtype_name(buffer.dtype), 0, True))
        for name, buffer in model.named_buffers()
        if name in kept
    }
