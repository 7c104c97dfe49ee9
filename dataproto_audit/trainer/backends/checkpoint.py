"""Sharded checkpoints: one safetensors file a rank, and an index that is written last.

``rank_0003.safetensors`` holds what rank 3 needs for the next step; ``checkpoint.json`` names the
files, their sizes and CRCs, the step and the layout. Each file goes to a temporary name, is
flushed to disk and renamed; without an index the folder is no checkpoint. Opening one executes
nothing.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from dataproto_audit.atomic import atomic_write_bytes
from dataproto_audit.codes import UsageError

SCHEMA = 1
INDEX = "checkpoint.json"
NAMED = re.compile(r"step_(\d{6,})")
"""Names that the trainer gives to folders of checkpoints."""
STRATEGIES = ("fsdp", "fsdp2", "megatron")
SEATS = "seats"
"""Key of a layout with Megatron ranks: their files say where each one sat."""
PIECE = 2**22
"""Bytes read at once while a file is only compared."""


@dataclass(frozen=True)
class RankFile:
    """One rank's file as it was written."""

    name: str
    size: int
    crc32: int


def begin(folder: Path) -> None:
    """Make ``folder``, and no checkpoint of it until :func:`write_index`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)


def write_rank_file(folder: Path, *, rank: int, tensors: Mapping[str, torch.Tensor]) -> RankFile:
    """Write one rank's tensors; they are copied, so they may share memory."""
    folder.mkdir(parents=True, exist_ok=True)
    data = save_tensors({key: value.detach().cpu().clone() for key, value in tensors.items()})
    name = f"rank_{rank:04d}.safetensors"
    atomic_write_bytes(folder / name, data)
    return RankFile(name, len(data), zlib.crc32(data))


def read_rank_file(folder: Path, entry: RankFile) -> dict[str, torch.Tensor]:
    """One rank's tensors; raises DPA804 if the file is not what the index says."""
    try:
        data = (folder / entry.name).read_bytes()
    except OSError as error:
        raise _unreadable(folder, f"{entry.name}: {error.strerror}") from error
    if len(data) != entry.size or zlib.crc32(data) != entry.crc32:
        raise _unreadable(folder, f"{entry.name} is not the file that was written")
    try:
        tensors: dict[str, torch.Tensor] = load_tensors(data)
    except SafetensorError as error:
        raise _unreadable(folder, f"{entry.name}: {error}") from error
    return tensors


def write_index(
    folder: Path,
    files: Sequence[RankFile],
    *,
    step: int,
    layout: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Path:
    """Write the index, which makes the folder a checkpoint. ``extra`` is the driver's own."""
    index = {
        "schema": SCHEMA,
        "step": step,
        "world_size": len(files),
        "layout": dict(layout),
        "files": [asdict(file) for file in files],
        "extra": dict(extra),
    }
    index["crc32"] = _crc_of(index)
    atomic_write_bytes(folder / INDEX, json.dumps(index, indent=1).encode())
    return folder / INDEX


def _crc_of(index: Mapping[str, Any]) -> int:
    """CRC of an index but for its own entry, over the values: layout of the text is free."""
    rest = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


@dataclass(frozen=True)
class Index:
    """The index of a complete checkpoint."""

    step: int
    layout: dict[str, Any]
    files: tuple[RankFile, ...]
    extra: dict[str, Any]

    def fits(self, *, world_size: int, layout: Mapping[str, Any]) -> bool:
        """Whether each rank of such a run finds all it needs in its own file."""
        return len(self.files) == world_size and self.layout == dict(layout)


def read_index(folder: Path) -> Index:
    """The index of ``folder``; raises DPA804 if the checkpoint is incomplete, of a layout that
    nothing is known of, or of Megatron ranks whose files do not say where they sat."""
    raw = _raw_index(folder)
    try:
        files = tuple(RankFile(**entry) for entry in raw["files"])
        index = Index(int(raw["step"]), dict(raw["layout"]), files, dict(raw["extra"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder, f"{INDEX} lacks {error}") from error
    if index.layout.get("strategy") not in STRATEGIES or not files:
        raise _unreadable(folder, f"it is of layout {index.layout} and {len(files)} ranks")
    engines = [index.layout.get(key) for key in ("strategy", "ref_strategy", "critic_strategy")]
    if "megatron" in engines and not index.layout.get(SEATS):
        raise UsageError(
            "DPA804",
            f"the checkpoint {folder} was written by an earlier version of dataproto-audit, whose "
            "Megatron files do not say which part of the model each of them holds.",
            "Go on with the version that wrote it, or start the run again.",
        )
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            raise _unreadable(folder, f"{file.name} is missing or cut short")
    return index


def _raw_index(folder: Path) -> dict[str, Any]:
    """The index as it was written; DPA804 for one that is missing, damaged, or in a folder whose
    name says another step."""
    try:
        raw = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError as error:
        raise _unreadable(folder, f"{INDEX} is missing, so it was not finished") from error
    except OSError as error:
        raise _unreadable(folder, f"{INDEX}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(folder, f"{INDEX} is damaged ({error})") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise _unreadable(folder, f"{INDEX} is of another version, or damaged")
    if "crc32" in raw and raw["crc32"] != _crc_of(raw):
        raise _unreadable(folder, f"{INDEX} is not the file that was written")
    step, named = raw.get("step"), NAMED.fullmatch(folder.name)
    if not isinstance(step, int) or (named and int(named[1]) != step):
        raise _unreadable(folder, f"{INDEX} says step {step}")
    return raw


def verify_files(folder: Path, files: Sequence[RankFile]) -> None:
    """Read every rank's file once; raises DPA804 for one that is not what the index says."""
    for file in files:
        crc = 0
        try:
            with (folder / file.name).open("rb") as stream:
                while piece := stream.read(PIECE):
                    crc = zlib.crc32(piece, crc)
        except OSError as error:
            raise _unreadable(folder, f"{file.name}: {error.strerror}") from error
        if crc != file.crc32:
            raise _unreadable(folder, f"{file.name} is not the file that was written")


def _unreadable(folder: Path, why: str) -> UsageError:
    return UsageError(
        "DPA804", f"the checkpoint {folder} cannot be read: {why}.", "Resume from an earlier one."
    )


@dataclass(frozen=True)
class Passed:
    """A folder that was passed over because its index cannot be read, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


def latest(folder: Path) -> tuple[Path | None, tuple[Passed, ...]]:
    """The newest complete checkpoint among the subfolders of ``folder``, None where there is none,
    and the folders without a readable index that would come after it.

    Only indexes are read here; whether the ranks' files are whole is :func:`verify_files`.
    """
    found: list[tuple[int, Path]] = []
    passed: list[Passed] = []
    for candidate in sorted(folder.glob("*/")):
        try:
            found.append((int(_raw_index(candidate)["step"]), candidate))
        except UsageError as error:
            why = error.message.partition(" cannot be read: ")[2].rstrip(".")
            passed.append(Passed(candidate, why or error.message))
    newest = max(found, default=None)
    later = [gone for gone in passed if newest is None or _after(gone.path, newest)]
    return (newest[1] if newest else None), tuple(later)


def _after(path: Path, newest: tuple[int, Path]) -> bool:
    """Whether ``path`` would have been newer, as far as its name tells."""
    named = NAMED.fullmatch(path.name)
    return named is None or int(named[1]) > newest[0]
