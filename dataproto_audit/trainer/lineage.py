"""What a checkpoint remembers of the model and its optimizers, to refuse a run of other ones.

Compared before anything is written: shapes would differ in a rank only, long after the folder of
the run was taken, and another vocabulary of the same size in no rank at all. Not covered: a user's
model folder whose weights were replaced by others of the same sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.models import TOKENIZER_FILES, ModelFolder
from dataproto_audit.trainer.workers.spec import with_critic

FREE = frozenset(
    {
        "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype",
        "use_cache", "max_position_embeddings", "initializer_range",
    }
)  # fmt: skip
"""Keys of a ``config.json`` that fix neither a shape nor a number of a trained model."""
REMEDY = "Resume with the model and optimizer that the run started with, or start another run."
MADE = ("config.json", *TOKENIZER_FILES)
SHOWN = 6
_ROLES = ("actor", "critic")
_NAMES = {"config": "", "tokenizer": "the tokenizer", "dtype": "model.dtype",
          "optim": "optimizer of the ", "start": "model.tiny."}  # fmt: skip


def lineage(config: DictConfig, model: ModelFolder) -> dict[str, Any]:
    """Plain data for a checkpoint's index: model, vocabulary, precision and optimizers by role."""
    section = config.actor_rollout_ref
    optim = {"actor": str(section.actor.optim.name)}
    if with_critic(config):
        optim["critic"] = str(config.critic.optim.name)
    started = {}
    if not section.model.path:  # the reference starts from them, too
        tiny = section.model.tiny
        started = {"seed": int(tiny.seed), "initializer_range": float(tiny.initializer_range)}
    return {
        "optim": optim,
        "start": started,
        "config": {key: model.config[key] for key in sorted(model.config.keys() - FREE)},
        "tokenizer": _checksum(model.path),
        "dtype": str(section.model.dtype),
    }


def check_lineage(saved: Mapping[str, Any], mine: Mapping[str, Any], *, where: Path) -> None:
    """UsageError DPA804 if the checkpoint ``where`` is of another model, or another optimizer.

    ``saved`` is what :func:`lineage` gave for it. A part that an earlier version did not write is
    not compared.
    """
    differs = [
        f"{_NAMES.get(part, part)}{key} was {was}, now {now}"
        for part, now_all in mine.items()
        if part in saved
        for key, was, now in _differences(saved[part], now_all)
    ]
    if differs:
        more = f" and {len(differs) - SHOWN} more" if len(differs) > SHOWN else ""
        raise UsageError(
            "DPA804",
            f"the checkpoint {where} does not fit this run: {'; '.join(differs[:SHOWN])}{more}. "
            "Nothing was changed.",
            REMEDY,
        )


def check_made(kept: Path, made: Path, *, where: Path) -> None:
    """The same by the files of the tiny model, for checkpoints that say nothing of their model.

    ``kept`` is the folder that the run of the checkpoint wrote, ``made`` what this run made.
    """
    other = [name for name in MADE if (kept / name).is_file() and not _alike(kept, made, name)]
    if other:
        raise UsageError(
            "DPA804",
            f"the checkpoint {where} does not fit this run: {kept} and the model of the "
            f"configuration differ in {', '.join(other)}. Nothing was changed.",
            REMEDY,
        )


def _differences(was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return [] if was == now else [("", was, now)]
    keys = was.keys() | now.keys()
    keys -= (was.keys() ^ now.keys()) & set(_ROLES)  # a role that is new, or no longer used
    absent = "not there"
    pairs = [(key, was.get(key, absent), now.get(key, absent)) for key in sorted(keys)]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _checksum(folder: Path) -> str:
    crc = 0
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.is_file():
            crc = zlib.crc32(file.read_bytes(), zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"


def _alike(kept: Path, made: Path, name: str) -> bool:
    other = made / name
    return other.is_file() and other.read_bytes() == (kept / name).read_bytes()
