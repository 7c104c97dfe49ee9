"""The interface of a training engine.

An engine holds one model (its shard on this rank) and, if it trains, an optimizer. It turns
micro-batches into per-token log-probs and entropies, and a scalar into gradients. Loss, masks,
mini-batches and metrics are not its business.

Suffix legend: ``_BT`` rows x (prompt + response), ``_BR`` rows x response.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.shards import ShardSpec
from dataproto_audit.trainer.backends.whole import Whole


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build. ``path`` is a local folder in Hugging Face layout; nothing is loaded
    from elsewhere and no code of the folder runs.

    ``head``: ``lm`` scores tokens, ``value`` gives one number at each position (a critic; the
    folder is that of a token classifier with one label, or of a language model: then the value
    head begins at 0).

    ``remove_padding`` lays the rows of a micro-batch on one line; attention is then ours, whatever
    ``attn_implementation`` says. ``fused_kernels`` scores tokens without keeping their logits.
    """

    path: str
    dtype: str = "float32"
    attn_implementation: str = "eager"
    remove_padding: bool = False
    fused_kernels: bool = False
    head: str = "lm"

    @property
    def values(self) -> bool:
        """Whether this is a value model."""
        return self.head == "value"


VALUE_HEAD = ("score.weight", "score.bias")
"""Hugging Face names of a value head."""


@dataclass(frozen=True)
class OptimSpec:
    """The optimizer, ``adamw`` or ``sgd`` (without momentum), in torch's meaning of the keys."""

    name: str = "adamw"
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    grad_clip: float = 1.0


@dataclass(frozen=True)
class FSDPOptions:
    """How FSDP wraps the model.

    ``wrap``: ``layer`` gathers one decoder layer at a time, ``root`` the whole model at once
    (fewer collectives; for models that fit). ``reshard_after_forward`` frees gathered weights
    between forward and backward; None does so for ``layer`` only; a number keeps them cut over so
    many neighbouring ranks instead. ``param_dtype`` is the precision of compute; weights and
    gradients stay in the model's.

    ``fsdp_size`` ranks share one copy of the weights, and the copies are kept equal by summing
    gradients over them (HSDP); -1 takes all ranks. ``offload`` keeps weights, gradients and
    optimizer in host memory between uses. ``sequence_parallel`` neighbouring ranks get the same
    rows and share their tokens (Ulysses); it needs the model's ``remove_padding``.
    """

    wrap: str = "root"
    reshard_after_forward: bool | int | None = None
    param_dtype: str = "float32"
    fsdp_size: int = -1
    offload: bool = False
    sequence_parallel: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """i64 tensors of one forward pass on the engine's device, outer padding columns cut away."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    responses_BR: Tensor

    @property
    def response_width(self) -> int:
        """Columns of the response after the cut."""
        return self.responses_BR.shape[1]

    @property
    def response_attention_BR(self) -> Tensor:
        """The response part of the attention mask, bool."""
        return self.attention_mask_BT[:, -self.response_width :].bool()


@dataclass(frozen=True)
class TokenOutputs:
    """Log-prob of each response token and entropy of its distribution (nats), f32[B, R];
    0 where the response is not attended. ``entropy_BR`` is None unless asked for.

    A value model gives ``values_BR`` instead, that of the state before each response token, and
    zeros for log-probs.
    """

    log_probs_BR: Tensor
    entropy_BR: Tensor | None = None
    values_BR: Tensor | None = None

    @classmethod
    def of_values(cls, values_BR: Tensor) -> TokenOutputs:
        """The outputs of a value model."""
        return cls(torch.zeros_like(values_BR.detach()), None, values_BR)

    def detach(self) -> TokenOutputs:
        """The same values without their graph."""
        entropy = None if self.entropy_BR is None else self.entropy_BR.detach()
        values = None if self.values_BR is None else self.values_BR.detach()
        return TokenOutputs(self.log_probs_BR.detach(), entropy, values)


Loss = Callable[[int, TokenOutputs], Tensor]
"""Position of the micro-batch and its outputs -> this rank's share of the mini-batch's loss."""


class Backend(ABC):
    """One rank's part of one model.

    Every method is called on all ranks of the model in the same order; methods marked *local*
    need no peer.
    """

    rank: int
    world_size: int
    dp_rank: int
    """Which part of a batch this rank gets; ranks that share a model's parts share it."""
    dp_size: int
    collects: bool
    """Whether this rank's outputs are the ones to keep, of those with the same ``dp_rank``."""
    speaks: bool
    """The same for what layers give, of those that hold the same layers."""
    device: torch.device
    trainable: bool
    aliases: dict[str, str]
    """Second names of tied weights -> the name under which they are trained."""

    def packed_notes(self) -> list[dict[str, Any]]:
        """What was noted about each packed micro-batch since the last call: whether every row's
        positions begin at 0 (``restarts``), and the ``mask`` over them. *Local.*"""
        return []

    def bubble(self) -> float | None:
        """Share 0..1 of the last call in which this rank's pipeline stage stood idle, from the
        order of its schedule in unit costs (:func:`..schedules.pipeline_bubble`); None without a
        pipeline. *Local.*"""
        return None

    @abstractmethod
    def layers(self) -> dict[str, nn.Module]:
        """Layers of this rank by the names of :mod:`.layers`. *Local.*"""

    @abstractmethod
    def hidden_states(self, micro: MicroBatch, output: Tensor) -> Tensor:
        """[N, H] at the compared tokens (:func:`.layers.compared_tokens`) from what one of
        :meth:`layers` gave for ``micro``."""

    @abstractmethod
    def forward(self, micro: MicroBatch, *, temperature: float, entropy: bool) -> TokenOutputs:
        """Score the responses of a micro-batch; log-probs and entropy are those of
        ``softmax(logits / temperature)``."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of ``loss``, summed over ranks; ``last`` ends an accumulation."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step and clear gradients. Returns the gradient norm before clipping; a norm that
        is not finite leaves the weights as they are."""

    @abstractmethod
    def reset_optimizer(self, spec: OptimSpec) -> None:
        """Start over with a fresh optimizer. *Local.*"""

    @abstractmethod
    def set_rates(self, lr: float, weight_decay: float | None = None) -> None:
        """Learning rate, and weight decay if given, of the next steps. *Local.*"""

    @abstractmethod
    def train_mode(self, training: bool) -> None:
        """Switch dropout and the like on or off. *Local.*"""

    @abstractmethod
    def shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """This rank's part of every weight, by its Hugging Face name, sharing memory. *Local.*"""

    @abstractmethod
    def gradients(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """This rank's part of every accumulated gradient, as in :meth:`shards`. *Local.*"""

    @abstractmethod
    def weights_changed(self) -> None:
        """To be called after writing into :meth:`shards`: drops gathered copies. *Local.*"""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, weights and optimizer, as named tensors.
        *Local.*"""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave, in the same layout. Raises DPA804. *Local.*"""

    @abstractmethod
    def state_from(self, whole: Whole) -> dict[str, Tensor]:
        """What :meth:`state` would give, from a checkpoint of any layout put together. Raises
        DPA804. *Local.*"""

    def infer(
        self,
        micros: Sequence[MicroBatch],
        *,
        temperature: float,
        entropy: bool,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[TokenOutputs]:
        """Score micro-batches without gradients, in evaluation mode.

        ``before(k)`` is called ahead of micro-batch k, that is ahead of its collectives.
        """
        self.train_mode(False)
        outputs = []
        with torch.no_grad():  # FSDP2 cannot use weights gathered in inference mode again
            for k, micro in enumerate(micros):
                before(k)
                outputs.append(self.forward(micro, temperature=temperature, entropy=entropy))
        return outputs

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        loss: Loss,
        *,
        temperature: float,
        entropy: bool,
        before: Callable[[int], None] = lambda _: None,
    ) -> list[TokenOutputs]:
        """Forward and backward of every micro-batch of a mini-batch; returns detached outputs.

        ``loss(k, outputs)`` gives micro-batch k's share. A pipelined engine overrides this.
        """
        self.train_mode(True)
        outputs = []
        for k, micro in enumerate(micros):
            before(k)
            scored = self.forward(micro, temperature=temperature, entropy=entropy)
            self.backward(loss(k, scored), last=k + 1 == len(micros))
            outputs.append(scored.detach())
        return outputs

    def copy_weights(self, other: Backend, *, but: Collection[str] = ()) -> None:
        """Take the weights of another engine, all that this one has ``but`` the named ones.
        *Local* if it is of the same kind and layout; otherwise every rank gets the whole model for
        a moment."""
        theirs = other.shards()
        whole: dict[str, Tensor] = {}
        if type(self) is not type(other):
            mine = shards.pack(
                theirs, rank=self.rank, world_size=self.world_size, version=0, aliases={}
            )
            payloads: list[Any] = [None] * self.world_size
            dist.all_gather_object(payloads, mine)
            whole = shards.join(payloads)
        with torch.no_grad():
            for name, (piece, spec) in self.shards().items():
                if name in but:
                    continue
                if whole:
                    shards.fill(piece, spec, whole[name])
                else:
                    piece.copy_(theirs[name][0])
        self.weights_changed()
