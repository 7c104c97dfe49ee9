"""A checkpoint of another layout or number of ranks, on one rank of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dataproto_audit.trainer.backends.checkpoint import RankFile, read_rank_file
from dataproto_audit.trainer.backends.whole import Whole, whole_of_fsdp
from dataproto_audit.trainer.model_config import read_config

Files = list[dict[str, Tensor]]


def read_files(folder: Path, entries: Sequence[RankFile]) -> Files:
    """The files of all ranks; raises DPA804."""
    return [read_rank_file(folder, entry) for entry in entries]


def whole_of_role(
    files: Files, role: str, layout: Mapping[str, Any], *, model: Path
) -> Whole | None:
    """The weights and moments of ``actor``, ``ref`` or ``critic`` put together; None if they were
    not kept.

    ``layout`` is the index's (:func:`.spec.checkpoint_layout`); ``model`` the folder of the model.
    """
    own = [under(f"{role}/", file) for file in files]
    if not own[0]:
        return None
    strategy = layout.get(f"{role}_strategy") or layout["strategy"]
    if strategy == "megatron":
        from dataproto_audit.trainer.backends.megatron.whole import whole_of_megatron

        config = read_config(model)
        if role == "critic":  # nothing is tied to a value head
            config["tie_word_embeddings"] = False
        return whole_of_megatron(own, config)
    return whole_of_fsdp(own, ranks=int(layout.get("fsdp_size", len(files))))


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries below ``prefix``, without it."""
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
