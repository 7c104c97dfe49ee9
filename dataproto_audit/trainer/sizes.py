"""What must divide and what must fit, for every role that trains."""

from __future__ import annotations

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.layout import check_ranks
from dataproto_audit.trainer.backends.megatron.options import options_from
from dataproto_audit.trainer.idle import refuse_idle


def check_limit(key: str, limit: int | None, data: DictConfig) -> None:
    """Raise DPA851 without a token limit, DPA856 for one that a single row may exceed."""
    longest = data.max_prompt_length + data.max_response_length
    if limit is None:
        raise UsageError("DPA851", f"{key} is not set.", "Dynamic micro-batches need a limit.")
    if limit < longest:
        raise UsageError(
            "DPA856",
            f"{key}={limit} is below the longest possible row of {longest} tokens "
            f"(max_prompt_length + max_response_length).",
            f"Set it to {longest} or more; a row cannot be split.",
        )


def refuse_limit(key: str, limit: int | None, *, switch: str) -> None:
    """Raise DPA851 for a token limit while ``switch``, which reads it, is off."""
    if limit is not None:
        refuse_idle({key: limit}, f"{switch} is false")


def world_size(config: DictConfig) -> int:
    """Training ranks of the run."""
    return int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)


def section_of(role: str) -> str:
    """The section of the configuration that ``actor``, ``ref`` or ``critic`` is set in."""
    return role if role == "critic" else f"actor_rollout_ref.{role}"


def data_parallel_size(config: DictConfig, role: str = "actor") -> int:
    """Chunks that a batch is cut into for ``actor``, ``ref`` or ``critic``; ranks that share a
    model's parts or a sequence get the same one. Raises DPA854 for a layout of Megatron that does
    not divide the ranks."""
    actor, world = config.actor_rollout_ref.actor, world_size(config)
    own = config.critic if role == "critic" else config.actor_rollout_ref[role]
    if (own.strategy or actor.strategy) != "megatron":
        return max(1, world // int(actor.ulysses_sequence_parallel_size))
    layout = options_from(own.megatron, defaults=options_from(actor.megatron))
    check_ranks(layout, world_size=world, key=f"{section_of(role)}.megatron")
    return world // layout.model_ranks


def check_rows(config: DictConfig, role: str) -> None:
    """Raise DPA854 where the rows that ``actor``, ``ref`` or ``critic`` gets at once do not divide
    over its data-parallel ranks: those of a mini-batch if it trains, else those of a step. Of one
    that trains also where steps do not divide into mini-batches, or these into micro-batches."""
    chunks = data_parallel_size(config, role)
    if role == "ref":
        _check_step(config, chunks=chunks)
        return
    actor = config.actor_rollout_ref.actor
    own = actor if role == "actor" else config.critic
    mini = own.ppo_mini_batch_size or actor.ppo_mini_batch_size
    micro = None if own.use_dynamic_bsz else own.ppo_micro_batch_size_per_gpu
    ranks = f"{chunks} ranks" if role == "actor" else f"the {role}'s {chunks} data-parallel ranks"
    _check_mini_batches(role, config, mini=mini, micro=micro, chunks=chunks, ranks=ranks)


def _check_step(config: DictConfig, *, chunks: int) -> None:
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if rows % chunks:
        section = section_of("ref")
        raise UsageError(
            "DPA854",
            f"{rows} rows of a step do not divide over the reference's {chunks} data-parallel "
            "ranks.",
            f"Change data.train_batch_size, rollout.n or the layout ({section}.strategy, "
            f"{section}.megatron).",
        )


def _check_mini_batches(
    role: str, config: DictConfig, *, mini: int, micro: int | None, chunks: int, ranks: str
) -> None:
    """``mini`` counts prompts, ``micro`` rows."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    rows, key = mini * n, f"{role}.ppo_mini_batch_size"
    if prompts % mini:
        raise UsageError(
            "DPA854",
            f"data.train_batch_size={prompts} prompts do not divide into mini-batches of "
            f"{key}={mini}.",
            f"Make data.train_batch_size a multiple of {mini}, or {key} a divisor of {prompts}.",
        )
    if rows % chunks:
        raise UsageError(
            "DPA854",
            f"a mini-batch of {mini} prompts x n={n} is {rows} rows, which do not divide over "
            f"{ranks}.",
            f"Change {key}, rollout.n or n_gpus_per_node.",
        )
    if micro and (rows // chunks) % micro:
        raise UsageError(
            "DPA854",
            f"{rows // chunks} rows of a mini-batch on each rank do not divide into "
            f"micro-batches of {role}.ppo_micro_batch_size_per_gpu={micro}.",
            f"Make it a divisor of {rows // chunks}, or {key} * rollout.n / ranks a multiple of "
            f"{micro}.",
        )
