"""What the machine and the engine must be able to take: head sizes, GPUs, cores, a place to write.

Told before anything starts. What only is slow is a warning, and what cannot work an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.sizes import head_dim
from dataproto_audit.trainer.rollout.base import CPU_HEAD_SIZES
from dataproto_audit.trainer.sizes import world_size

RANKS_A_CORE = 4
"""Ranks a core from which on a run on CPU is told to be slow."""


def check_head_size(config: DictConfig, model: Mapping[str, Any], *, gpus: int) -> None:
    """DPA851 for a model whose heads vLLM's attention on CPU does not take.

    ``model`` is the parsed ``config.json``, ``gpus`` those of the machine. Not covered: vLLM on
    GPUs, whose attention backends differ.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or gpus:
        return
    try:
        size = head_dim(model)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return  # an architecture that names its heads otherwise: the engine will tell
    if size not in CPU_HEAD_SIZES:
        own = config.actor_rollout_ref.model.path
        key = f"head_dim of {own}" if own else "actor_rollout_ref.model.tiny.head_dim"
        raise UsageError(
            "DPA851",
            f"{key} is {size}, which vLLM on CPU does not take.",
            f"It takes {', '.join(map(str, CPU_HEAD_SIZES))}; actor_rollout_ref.rollout.name=hf "
            "takes any.",
        )


def check_gpus(config: DictConfig, *, gpus: int) -> None:
    """DPA854 for more ranks than the GPUs of this machine; without GPUs they run on its cores."""
    ranks = world_size(config)
    if 0 < gpus < ranks:
        raise UsageError(
            "DPA854",
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} asks for {ranks} ranks, "
            f"but this machine has {gpus} GPUs.",
            f"Set it to {gpus} or less.",
        )


def warnings_of(config: DictConfig, *, gpus: int) -> Iterator[str]:
    """What will work, but not as one would like: one sentence each."""
    ranks, cores = world_size(config), os.cpu_count() or 1
    if not gpus and ranks > RANKS_A_CORE * cores:
        yield (
            f"{ranks} ranks share {cores} CPU cores (trainer.n_gpus_per_node="
            f"{config.trainer.n_gpus_per_node}): starting and every step will be slow, and each "
            "rank takes about 0.5 GB of memory"
        )


def check_place(folder: Path) -> None:
    """DPA801 where ``folder`` cannot be made: something above it is a file, or may not be written.

    Changes nothing. Not covered: a disk that is full.
    """
    for above in (folder, *folder.absolute().parents):
        if not os.path.lexists(above):
            continue
        what = ""
        if not above.is_dir():
            what = "there is a file of that name"
        elif not os.access(above, os.W_OK | os.X_OK):
            what = "it cannot be written"
        if what:
            of = "" if above == folder else f"{above}: "
            raise UsageError("DPA801", f"{folder}: {of}{what}.", "Choose another run_dir.")
        return
