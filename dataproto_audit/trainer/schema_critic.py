"""The keys of the critic and of a KL penalty in the rewards, under verl's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataproto_audit.trainer.schema_megatron import RoleMegatronConfig
from dataproto_audit.trainer.schema_optim import OptimConfig


@dataclass
class CriticConfig:
    """The value model of ``algorithm.adv_estimator=gae``: the policy's model under a value head of
    zeros, with the policy's precision and FSDP options. Sizes count as the actor's do. Without a
    critic these keys are refused.
    """

    strategy: str | None = None
    """Training engine; null takes the actor's."""
    ppo_mini_batch_size: int | None = None
    """Prompts of an optimizer step; null takes the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows of one forward and backward pass of a rank."""
    forward_micro_batch_size_per_gpu: int | None = None
    """Rows of one forward pass of a rank, when values are computed."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of rows, in both."""
    ppo_max_token_len_per_gpu: int | None = None
    """Most attended tokens of a micro-batch, with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: int | None = None
    """The same when values are computed; null takes that of the update."""
    ppo_epochs: int | None = None
    """Passes over the batch of a step; null takes the actor's."""
    shuffle: bool = True
    """Draw mini-batches in random order."""
    cliprange_value: float = 0.5
    """How far a value may move from the one before the update."""
    loss_agg_mode: str | None = None
    """How token losses become one number; null takes the actor's."""
    grad_clip: float = 1.0
    """Largest norm of the critic's gradient."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    megatron: RoleMegatronConfig = field(default_factory=RoleMegatronConfig)


@dataclass
class KlCtrlConfig:
    """The weight of the KL in the rewards."""

    type: str = "fixed"
    """How the weight changes."""
    kl_coef: float = 0.001
    """The weight."""
