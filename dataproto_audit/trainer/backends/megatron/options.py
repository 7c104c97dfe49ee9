"""How Megatron-core spreads a model over ranks; plain data that travels to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECOMPUTE = ("selective", "full")


@dataclass(frozen=True)
class MegatronOptions:
    """Sizes of the layout and what goes with them.

    ``tp`` tensor, ``pp`` pipeline, ``cp`` context-parallel ranks; the rest of the world is data
    parallel. ``vpp`` chunks of layers on each pipeline rank (interleaved schedule), None for one.
    ``sp`` splits norms and residuals along the sequence over the tensor-parallel ranks.
    ``distributed_optimizer`` cuts optimizer state over data-parallel ranks. ``recompute``:
    ``selective`` attention, ``full`` every layer, None nothing.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    sp: bool = False
    distributed_optimizer: bool = True
    recompute: str | None = None

    @property
    def model_ranks(self) -> int:
        """Ranks that share the rows of one data-parallel chunk."""
        return self.tp * self.pp * self.cp

    def layout(self) -> dict[str, Any]:
        """What a rank's file of a checkpoint depends on; changing the rest resumes."""
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp or 1, "cp": self.cp}
        return {**sizes, "distributed_optimizer": self.distributed_optimizer}


def options_from(section: Any, *, defaults: MegatronOptions | None = None) -> MegatronOptions:
    """The options of a ``megatron`` section in verl's key names; null takes the default's."""
    given = defaults or MegatronOptions()

    def take(key: str, default: Any) -> Any:
        value = getattr(section, key)
        return default if value is None else value

    vpp = take("virtual_pipeline_model_parallel_size", given.vpp)
    recompute = take("recompute_granularity", given.recompute)
    return MegatronOptions(
        tp=int(take("tensor_model_parallel_size", given.tp)),
        pp=int(take("pipeline_model_parallel_size", given.pp)),
        vpp=None if vpp is None else int(vpp),
        cp=int(take("context_parallel_size", given.cp)),
        sp=bool(take("sequence_parallel", given.sp)),
        distributed_optimizer=bool(take("use_distributed_optimizer", given.distributed_optimizer)),
        recompute=None if recompute is None else str(recompute),
    )
