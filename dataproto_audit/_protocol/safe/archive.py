"""Files of ``torch.save``: the zip archive of today and the row of pickles of before.

Both are a pickle whose storages lie outside of it. Layouts: ``torch/serialization.py`` (``_save``
and ``_legacy_save``) of torch 2. Not covered, and refused: TorchScript archives, compressed ones
and files of big-endian machines.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any, BinaryIO

import torch

from dataproto_audit._protocol.safe.errors import Budget, RefusedError, TooLargeError
from dataproto_audit._protocol.safe.machine import Node, run
from dataproto_audit._protocol.safe.torch_values import Storage
from dataproto_audit._protocol.safe.values import Names, Values

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_COUNT_BYTES = 8


def is_archive(data: bytes) -> bool:
    """Whether the bytes begin as a zip archive does."""
    return data[:4] == b"PK\x03\x04"


def read_archive(data: bytes, names: Names, budget: Budget) -> Any:
    """The value in a zip archive of ``torch.save``."""
    if data[:2] != b"PK":
        return read_legacy(io.BytesIO(data), names, budget)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if sum(info.file_size for info in archive.infolist()) > len(data):
            raise TooLargeError("its members claim more bytes than the archive has")
        pickles = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("a zip archive that torch.save did not write")
        folder = pickles[0].removesuffix("data.pkl")

        def member(name: str) -> bytes:
            info = members.get(folder + name)
            if info is None:
                raise ValueError("a part of the archive is missing")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise RefusedError("a compressed or encrypted archive, which torch never writes")
            return archive.read(info)

        if folder + "byteorder" in members and member("byteorder") != b"little":
            raise RefusedError("the byte order of another machine")
        found: dict[str, Storage] = {}

        def storage(reference: Any) -> Storage:
            key, dtype, count, _ = _reference(values, reference)
            if key not in found:
                found[key] = Storage.of(member(f"data/{key}"), dtype)
            return _checked(found[key], dtype, count)

        values = Values(names, budget, storage)
        tree = run(io.BytesIO(member("data.pkl")), names.calls.keys(), persistent=True)
        return values.value(tree)


def _reference(values: Values, reference: Any) -> tuple[str, torch.dtype, int, Any]:
    """Take ``("storage", type, key, device, count[, view])`` apart."""
    mark, dtype, key, _, count, *view = values.value(reference)
    if mark != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
        raise RefusedError("a reference that is no storage")
    if type(count) is not int or count < 0:
        raise ValueError("a storage of a negative or broken size")
    return key, dtype, count, view[0] if view else None


def _checked(storage: Storage, dtype: torch.dtype, count: int) -> Storage:
    """``storage``, if it is what a reference to it says."""
    held = storage.raw.numel()
    if dtype is not storage.dtype:
        raise RefusedError("one storage with two dtypes")
    if count * dtype.itemsize > held:
        raise TooLargeError(f"a storage claims {count * dtype.itemsize} bytes and has {held}")
    return storage


def read_legacy(file: BinaryIO, names: Names, budget: Budget) -> Any:
    """The value in the older format: magic, version, system, value, keys, storages."""
    magic = Values(names, budget).value(run(file, names.calls.keys()))
    if magic != LEGACY_MAGIC:
        raise ValueError("an archive that torch.save did not write")
    return read_legacy_body(file, names, budget)


def read_legacy_body(file: BinaryIO, names: Names, budget: Budget) -> Any:
    """What follows the magic number of the older format."""
    plain = Values(names, budget)
    plain.value(run(file, names.calls.keys()))  # protocol version
    system = plain.value(run(file, names.calls.keys()))
    if not system.get("little_endian", True):
        raise RefusedError("the byte order of another machine")
    tree = run(file, names.calls.keys(), persistent=True)
    keys = plain.value(run(file, names.calls.keys()))
    # The storages come last and without a dtype of their own, so they are found first by reference.
    references: dict[str, tuple[torch.dtype, int]] = {}
    for node in _references(tree):
        key, dtype, count, view = _reference(plain, node.args)
        if view is not None:
            raise RefusedError("a view of a storage, which torch stopped writing long ago")
        references.setdefault(key, (dtype, count))
    found: dict[str, Storage] = {}
    for key in keys:
        dtype, _ = references[key]
        count = int.from_bytes(file.read(_COUNT_BYTES), "little", signed=True)
        if not 0 <= count * dtype.itemsize <= budget.file_bytes:
            raise TooLargeError(f"a storage claims {count} items of {dtype.itemsize} bytes")
        data = file.read(count * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise EOFError
        found[key] = Storage.of(data, dtype)

    def storage(reference: Any) -> Storage:
        key, dtype, count, _ = _reference(plain, reference)
        return _checked(found[key], dtype, count)

    return Values(names, budget, storage).value(tree)


def _references(tree: Any) -> list[Node]:
    """All references out of a tree, in a walk without recursion."""
    found, seen, todo = [], set(), [tree]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float)):
            continue
        seen.add(id(item))
        if isinstance(item, Node):
            if item.how == "persistent":
                found.append(item)
                continue
            todo.extend((item.args, item.state, item.items, item.pairs))
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif hasattr(item, "items"):  # a dictionary or a set of the machine
            todo.append(item.items)
    return found
