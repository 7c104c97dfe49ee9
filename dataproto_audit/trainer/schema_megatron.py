"""The keys of Megatron-core's layout, under verl's names: the actor's, and those of other roles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MegatronConfig:
    """How Megatron-core spreads the model over ranks; what is left is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Interleaved parts of each stage; null for one."""
    context_parallel_size: int = 1
    """Ranks that share each row's tokens."""
    sequence_parallel: bool = False
    """Share the activations between matrices over the tensor-parallel ranks, too."""
    use_distributed_optimizer: bool = True
    """Cut the optimizer's state over data-parallel ranks."""
    recompute_granularity: str | None = None
    """Recompute activations in the backward pass: `full`, `selective` or null."""


@dataclass
class RoleMegatronConfig:
    """The role's layout; null takes the actor's."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool | None = None
    recompute_granularity: str | None = None
