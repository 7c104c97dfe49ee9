"""What must divide and what must fit, for every role that trains."""

from __future__ import annotations

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
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


def check_rows(
    role: str, config: DictConfig, *, mini: int, micro: int | None, chunks: int, ranks: str
) -> None:
    """Raise DPA854 where a step's rows do not divide: into mini-batches of ``mini`` prompts, over
    the ``chunks`` of the role's data-parallel ``ranks``, as these are called, into micro-batches of
    ``micro`` rows."""
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
