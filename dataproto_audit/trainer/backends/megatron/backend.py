"""One rank of a model in Megatron-core's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.backends.base import (
    VALUE_HEAD,
    Backend,
    Loss,
    MicroBatch,
    ModelSpec,
    OptimSpec,
    TokenOutputs,
)
from dataproto_audit.trainer.backends.megatron import files, shims, weights
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.backends.megatron.sizes import tied
from dataproto_audit.trainer.backends.megatron.whole import SEAT, Held, megatron_state
from dataproto_audit.trainer.backends.moments import weight_of
from dataproto_audit.trainer.backends.shards import ShardSpec, fill
from dataproto_audit.trainer.backends.whole import Whole
from dataproto_audit.trainer.model_config import read_config

with shims.importing():
    from megatron.core import parallel_state as groups
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from dataproto_audit.trainer.backends.megatron import model as build
    from dataproto_audit.trainer.backends.megatron.optimizer import Optimizer, wrap
    from dataproto_audit.trainer.backends.megatron.schedule import Schedule


class MegatronBackend(Backend):
    """A Qwen2, Qwen3 or Llama cut over tensor, pipeline and context-parallel ranks.

    Build it on all ranks together; ``optim`` None makes a frozen model. megatron's groups are
    global to the process: all models in it share one layout. The layout must have been checked
    with :func:`.layout.check_layout`. Raises DPA852 if the folder lacks weights.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        device: torch.device,
        optim: OptimSpec | None,
        options: MegatronOptions = MegatronOptions(),  # noqa: B008 - frozen
        timeout_s: float = 1800.0,
        seed: int = 0,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.trainable, self.options = device, optim is not None, options
        self._folder = Path(model.path)
        self._hf = read_config(self._folder)
        if model.values:  # nothing is tied to a value head
            self._hf["tie_word_embeddings"] = False
        build.join_groups(options, timeout_s=timeout_s, seed=seed)
        self.dp_rank = groups.get_data_parallel_rank()
        self.dp_size = groups.get_data_parallel_world_size()
        first = groups.get_tensor_model_parallel_rank() + groups.get_context_parallel_rank() == 0
        self.speaks = first
        self.collects = first and groups.is_pipeline_last_stage(ignore_virtual=True)
        self.aliases = {weights.HEAD: weights.EMBEDDING} if tied(self._hf) else {}
        self._config = build.transformer_config(self._hf, options, hf.DTYPES[model.dtype])
        self._chunks = [
            chunk.to(device)
            for chunk in build.build_chunks(self._hf, self._config, options, values=model.values)
        ]
        self._load(self._folder)
        self._modules: list[Any] = list(self._chunks)
        if self.trainable:
            self._modules = wrap(
                self._chunks, self._config, distributed=options.distributed_optimizer
            )
            self._config.finalize_model_grads_func = finalize_model_grads
        else:
            for chunk in self._chunks:
                chunk.requires_grad_(False)
        self._shards = self._pieces(lambda param: param.detach())
        self._schedule = Schedule(
            self._modules,
            options,
            vocabulary=int(self._hf["vocab_size"]),
            packed=model.remove_padding,
            fused=model.fused_kernels,
            values=model.values,
        )
        self._optimizer: Optimizer | None = None
        if optim is not None:
            self.reset_optimizer(optim)

    def layers(self) -> dict[str, nn.Module]:
        """See :meth:`Backend.layers`."""
        found: dict[str, nn.Module] = {}
        for chunk in self._chunks:
            found |= build.layers_of(chunk, first_layer=self._first_layer(chunk))
        return found

    def hidden_states(self, micro: MicroBatch, output: Tensor) -> Tensor:
        """See :meth:`Backend.hidden_states`. Collective where ranks share the sequence."""
        return self._schedule.hidden_states(micro, output)

    def forward(self, micro: MicroBatch, *, temperature: float, entropy: bool) -> TokenOutputs:
        """Scores without a graph; gradients come from :meth:`accumulate` alone. Collective."""
        return self.infer([micro], temperature=temperature, entropy=entropy)[0]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Not to be called: a pipeline runs forward and backward of all micro-batches at once."""
        raise NotImplementedError("MegatronBackend.accumulate runs both passes")

    def infer(
        self,
        micros: Sequence[MicroBatch],
        *,
        temperature: float,
        entropy: bool,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[TokenOutputs]:
        """See :meth:`Backend.infer`. Outputs are zeros on ranks that are not in the last stage."""
        self.train_mode(False)
        with torch.no_grad():
            return self._schedule.run(
                micros, loss=None, temperature=temperature, entropy=entropy, before=before
            )

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        loss: Loss,
        *,
        temperature: float,
        entropy: bool,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[TokenOutputs]:
        """See :meth:`Backend.accumulate`; ``loss`` is asked for in the last stage only."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        self.train_mode(True)
        self._optimizer.clear()
        return self._schedule.run(
            micros, loss=loss, temperature=temperature, entropy=entropy, before=before
        )

    def packed_notes(self) -> list[dict[str, Any]]:
        """See :meth:`Backend.packed_notes`."""
        notes, self._schedule.notes = self._schedule.notes, []
        return notes

    def bubble(self) -> float | None:
        """See :meth:`Backend.bubble`."""
        return self._schedule.bubble(groups.get_pipeline_model_parallel_rank())

    def optimizer_step(self) -> float:
        """See :meth:`Backend.optimizer_step`. Collective."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer.step()

    def reset_optimizer(self, spec: OptimSpec) -> None:
        """See :meth:`Backend.reset_optimizer`. Collective here: ranks compare their groups."""
        self._optimizer = Optimizer(
            spec, self._modules, distributed=self.options.distributed_optimizer
        )

    def set_rates(self, lr: float, weight_decay: float | None = None) -> None:
        """See :meth:`Backend.set_rates`."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        self._optimizer.set_rates(lr, weight_decay)

    def train_mode(self, training: bool) -> None:
        """See :meth:`Backend.train_mode`."""
        for module in self._modules:
            if module.training != training:
                module.train(training)

    def shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """See :meth:`Backend.shards`."""
        return self._shards

    def gradients(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """See :meth:`Backend.gradients`. Collective with the distributed optimizer, which leaves
        each data-parallel rank the sum of its own share only: shares are gathered first."""
        if self.options.distributed_optimizer:
            with shims.region():
                for module in self._modules:
                    for buffer in module.buffers:
                        _gather_shares(buffer)
        return self._pieces(lambda param: param.main_grad)

    def weights_changed(self) -> None:
        """See :meth:`Backend.weights_changed`."""
        if self._optimizer is not None:
            self._optimizer.follow_weights()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`Backend.state`. Names: ``model/CHUNK/NAME``, ``optim/...``, ``main/...``, and
        where this rank sat."""
        out = {f"model/{key}": param.detach() for key, param, _ in self._named()}
        seat = self._seat()
        firsts = [self._first_layer(chunk) for chunk in self._chunks]
        copy = groups.get_data_parallel_rank(with_context_parallel=True)
        out[SEAT] = torch.tensor([seat.rank, seat.ranks, copy, *firsts])
        return out | (self._optimizer.state() if self._optimizer is not None else {})

    def state_from(self, whole: Whole) -> dict[str, Tensor]:
        """See :meth:`Backend.state_from`."""
        optimizer = self._optimizer
        parts = {one.name: one.part for one in optimizer.owned()} if optimizer is not None else {}
        held = [
            Held(key, param.detach(), first, parts.get(key, (0, 0)))
            for key, param, first in self._named()
        ]
        masters = optimizer is not None and optimizer.separate
        return megatron_state(whole, held, self._hf, self._seat(), masters=masters)

    def _named(self) -> Iterator[tuple[str, Any, int]]:
        """``CHUNK/NAME``, parameter, and the place of its chunk's first layer in the model."""
        for number, chunk in enumerate(self._chunks):
            first = self._first_layer(chunk)
            for name, param in chunk.named_parameters():
                yield f"{number}/{name}", param, first

    def _first_layer(self, chunk: Any) -> int:
        return int(get_transformer_layer_offset(self._config, vp_stage=chunk.vp_stage))

    def _seat(self) -> weights.Seat:
        return weights.Seat(
            rank=groups.get_tensor_model_parallel_rank(),
            ranks=groups.get_tensor_model_parallel_world_size(),
            copy=groups.get_data_parallel_rank(with_context_parallel=True) > 0,
        )

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Backend.load_state`."""
        for name, param, _ in self._named():
            given = weight_of(state, f"model/{name}", name, param, wrote="megatron sizes")
            with torch.no_grad():
                param.copy_(given)
        self.weights_changed()
        if self._optimizer is not None:
            self._optimizer.load_state(state)

    def _pieces(self, of: Callable[[Any], Tensor]) -> dict[str, tuple[Tensor, ShardSpec]]:
        """``of`` each parameter (of its shape) as pieces of Hugging Face tensors."""
        cut = partial(weights.pieces, model=self._hf, seat=self._seat())
        found: dict[str, tuple[Tensor, ShardSpec]] = {}
        for key, param, first in self._named():
            for piece_name, view, spec in cut(key.split("/", 1)[1], of(param), first_layer=first):
                found[piece_name] = (view, spec)
        return found

    @torch.no_grad()
    def _load(self, folder: Path) -> None:
        """Fill the parameters from the folder; the vocabulary's padding becomes zero."""
        for chunk in self._chunks:
            for param in chunk.parameters():
                param.zero_()
        with files.open_weights(folder) as read:
            for name, (piece, spec) in self._pieces(lambda param: param.detach()).items():
                begins_at_0 = name in VALUE_HEAD
                whole = read(name, shape=spec.shape if begins_at_0 else None)
                if tuple(whole.shape) != spec.shape:
                    raise UsageError(
                        "DPA852",
                        f"{folder}: {name} has shape {tuple(whole.shape)}, config.json asks for "
                        f"{spec.shape}.",
                        "Save the model there with save_pretrained.",
                    )
                fill(piece, spec, whole)


def _gather_shares(buffer: Any) -> None:
    """Make the whole of each bucket's summed gradients known to each data-parallel rank."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, share, group=group)
