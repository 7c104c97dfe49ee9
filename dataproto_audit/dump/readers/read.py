"""Opening files: which format one is, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from dataproto_audit._protocol.safe.explain import explained, one_line, read_bytes
from dataproto_audit._protocol.safe.load import Proto, Record, load, name_of
from dataproto_audit._protocol.safe.tensordict_values import Fields
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.portable import FORMAT, is_safetensors, read_portable
from dataproto_audit.dump.readers import frameworks, tables
from dataproto_audit.dump.readers.confined import confine
from dataproto_audit.dump.readers.keys import (
    columns_of,
    read_keys,
    split_keys,
    with_keys_beside,
)
from dataproto_audit.dump.readers.names import hint_of, order_of
from dataproto_audit.dump.readers.saved import (
    Hint,
    Kind,
    Saved,
    of_fields,
    of_mapping,
    of_proto,
    parts,
)
from dataproto_audit.dump.readers.traces import of_trace
from dataproto_audit.dump.readers.walk import data_files, is_run_folder
from dataproto_audit.dump.trace import is_trace

REMEDY = (
    "Read are files of DataProto.save_to_disk, torch.save, JSONL (also gzipped), parquet, "
    "*.kvmeta.json, safetensors, traces and metric logs (docs/reading-files.md); save the batch as "
    "one of these."
)
TEXT = frozenset({".txt", ".md", ".log", ".yaml", ".yml", ".toml", ".py"})
OTHERS = {
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image",
    b"%PDF": "a PDF document", b"\x7fELF": "a program or library", b"GGUF": "a GGUF model",
    b"\x89HDF": "an HDF5 file", b"\x93NUMPY": "a NumPy array", b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive", b"(\xb5/\xfd": "a Zstandard archive",
    b"ARROW1": "an Arrow file", b"SQLite format 3": "an SQLite database",
}  # fmt: skip
"""What other files begin with."""


@dataclass(frozen=True)
class Folder:
    """What a folder holds: batches in the order of the run, and files that could not be read."""

    saved: tuple[Saved, ...]
    unreadable: tuple[UsageError, ...]


def read_batches(path: str | PathLike[str]) -> list[Saved]:
    """All batches of a file, or of the files in a folder. Nothing of them is executed.

    Errors: :class:`UsageError` for what is missing, broken or of no known format (``DPA810``),
    asks for a name off the list (``DPA811``), or claims more than it holds (``DPA812``). Of a
    folder, the first such file is reported; :func:`read_folder` reports all.
    """
    place = Path(path)
    if is_folder(place):
        if is_trace(place):
            return of_trace(place)
        folder = read_folder(place)
        if folder.unreadable:
            raise folder.unreadable[0]
        return list(folder.saved)
    if place.name.endswith(".kvmeta.json"):
        return [_of_keys(place)]
    data = read_bytes(place)
    if place.suffix == ".json" and FORMAT.encode() in data[:200]:  # the JSON beside the tensors
        place = place.with_suffix(".safetensors")
        data = read_bytes(place)
    try:
        return _of_bytes(place, data)
    except Exception as error:  # the bytes of a broken file can make a decoder raise anything
        raise explained(error, place, data, what="a saved batch", remedy=REMEDY) from error


def read_folder(path: str | PathLike[str]) -> Folder:
    """All batches under a folder, in the order of the run; other files are passed over
    (:mod:`.walk` says which), as are hidden folders, environments and run folders of ours.

    Keys and tags beside a store snapshot are part of it and do not count as files of their own.
    Errors: :class:`UsageError` when there is nothing to read.
    """
    root = Path(path)
    if is_trace(root):
        return Folder(tuple(of_trace(root)), ())
    saved: list[Saved] = []
    unreadable: list[UsageError] = []
    if is_run_folder(root):
        raise UsageError(
            "DPA810", f"{shown(root)} is a run folder: it holds tables and no batches.",
            "`dataproto-audit report` sums it up.",
        )  # fmt: skip
    files = data_files(root)
    if not files:
        raise UsageError("DPA810", f"{shown(root)} holds no file of batches.", REMEDY)
    for file in files:
        try:
            saved += read_batches(file)
        except UsageError as error:
            unreadable.append(error)
    saved.sort(key=lambda one: order_of(one.hint, one.path))
    return Folder(tuple(saved), tuple(unreadable))


def is_folder(path: Path) -> bool:
    """True for a folder. Raises :class:`UsageError` for what can be no path at all."""
    try:
        return path.is_dir()
    except OSError as error:
        raise UsageError(
            "DPA810", f"{one_line(path)} cannot be read: {error.strerror}.", "Check the path."
        ) from error


def shown(path: Path) -> str:
    """A path without what its name could write to a terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(path))


def _of_keys(path: Path) -> Saved:
    keys, tags, rest = read_keys(path)
    columns = {name: tables.column(values) for name, values in columns_of(keys, tags).items()}
    return Saved(path, "", "keys", parts({}, columns, rest), hint_of(path))


def _of_bytes(path: Path, data: bytes) -> list[Saved]:
    if is_safetensors(data):
        batch, opaque = read_portable(path, data)
        return [Saved(path, "", "safetensors", batch, _with_step(hint_of(path), batch["meta_info"]),
                      opaque=opaque)]  # fmt: skip
    if data.startswith(b"PAR1"):
        return frameworks.of_rows(path, "parquet", tables.parquet_rows(data))
    if path.suffix in TEXT:
        raise ValueError("it is text")
    if data.startswith(b"\x1f\x8b") or data.lstrip(b" \t\r\n\xef\xbb\xbf")[:1] == b"{":
        return frameworks.of_rows(path, "jsonl", tables.json_rows(data))
    other = next((kind for magic, kind in OTHERS.items() if data.startswith(magic)), None)
    if other is not None:  # the first letters of most are opcodes, too
        raise ValueError(f"it is {other}")
    confine(path, len(data))
    try:
        value, opaque = load(data)
    except (IndexError, KeyError) as error:  # text: its letters are opcodes without operands
        raise ValueError("its bytes are neither a pickle nor an archive") from error
    found = list(_of_value(path, value, ""))
    if not found:
        raise ValueError(f"it holds a {name_of(value)} and no batch")
    return [replace(one, opaque=opaque) for one in found]


def _of_value(path: Path, value: Any, place: str) -> Iterable[Saved]:
    """Batches in what a pickle or archive holds."""
    hint = hint_of(path)
    if isinstance(value, Proto):
        yield Saved(path, place, "dataproto", of_proto(value), _with_step(hint, value.meta))
    elif isinstance(value, Fields):
        saved = Saved(path, place, "tensordict", of_fields(value), hint)
        yield with_keys_beside(saved) if path.name.startswith("v1.tq_all") else saved
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _of_value(path, item, f"{place}[{index}]")
    elif isinstance(value, Record):
        yield from _of_value(path, value.state, place)
    elif isinstance(value, Mapping):
        yield from _of_dict(path, value, place, hint)


def _of_dict(path: Path, value: Mapping[Any, Any], place: str, hint: Hint) -> Iterable[Saved]:
    if isinstance(value.get("tensordict"), Fields):  # verl's V1 rollout skip: tq_batch.pt
        keys, tags, rest = split_keys(dict(value))
        rest.pop("tensordict")
        saved = Saved(path, place, "tensordict", of_fields(value["tensordict"]), hint)
        yield saved.with_columns(columns_of(keys, tags), **rest)
    elif known := frameworks.of_dict(path, place, value):
        yield from known
    elif isinstance(value.get("batch"), (Mapping, Fields)):
        made = of_mapping(value)
        yield Saved(path, place, "tensors", made, _with_step(hint, made["meta_info"]))
    elif any(isinstance(item, (torch.Tensor, Fields)) for item in value.values()):
        yield Saved(path, place, "tensors", of_mapping(value), _with_step(hint, value))


def _with_step(hint: Hint, meta: Mapping[Any, Any]) -> Hint:
    """The trainer's own count of steps, where the batch carries it, before the file's name."""
    step = meta.get("global_steps")
    return replace(hint, step=step) if type(step) is int else hint


__all__ = ["Folder", "Kind", "read_batches", "read_folder"]
