"""The list of all names that files of batches may use, and reading a whole file with it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit._protocol.nested import nested_from_rows
from dataproto_audit._protocol.safe import (
    numpy_values,
    python_values,
    tensordict_values,
    torch_values,
)
from dataproto_audit._protocol.safe.archive import (
    LEGACY_MAGIC,
    is_archive,
    read_archive,
    read_legacy,
    read_legacy_body,
)
from dataproto_audit._protocol.safe.errors import Budget, Opaque, RefusedError
from dataproto_audit._protocol.safe.machine import Global, Node, run
from dataproto_audit._protocol.safe.tensordict_values import Fields
from dataproto_audit._protocol.safe.torch_values import Storage
from dataproto_audit._protocol.safe.values import Maker, Names, Values


@dataclass(frozen=True, eq=False)
class Proto:
    """A saved DataProto: tensors (None without any), per-row arrays, meta entries."""

    batch: Fields | None
    arrays: dict[Any, Any]
    meta: dict[Any, Any]


@dataclass(frozen=True, eq=False)
class Record:
    """An instance of a class whose state is all there is to it, with that state."""

    name: str
    state: dict[Any, Any]


def _proto(values: Values, node: Node) -> Proto:
    packed, arrays, meta = values.value(node.state)
    return Proto(_tensors(values, packed), dict(arrays or {}), dict(meta or {}))


def _tensors(values: Values, packed: Any) -> Fields | None:
    """The tensors of a DataProto, in either of verl's encodings."""
    if packed is None:
        return None
    if isinstance(packed, bytes):
        loaded = read_archive(packed, NAMES, values.budget)
        if loaded is not None and not isinstance(loaded, Fields):
            raise RefusedError(f"a {name_of(loaded)} where a TensorDict belongs")
        return loaded
    if not isinstance(packed, tuple):
        raise RefusedError(f"a {name_of(packed)} where tensors belong")
    from dataproto_audit._protocol.wire import deserialize_tensordict  # tensordict takes seconds

    decoded = deserialize_tensordict((packed[0], None, packed[2]))
    return Fields(
        tuple(decoded.batch_size), {name: _clean(field) for name, field in decoded.items()}
    )


def _clean(field: Tensor) -> Tensor:
    """``field`` with the bytes of its bools as 0 and 1."""
    if field.dtype is not torch.bool:
        return field
    if not field.is_nested:
        return field.view(torch.uint8) != 0
    rows = [row.contiguous().view(torch.uint8) != 0 for row in field.unbind()]
    return nested_from_rows(rows, like=field)


def _record(values: Values, node: Node) -> Record:
    state = values.value(node.state) if node.has_state else {}
    if not isinstance(state, dict):
        raise RefusedError(f"a state of {node.what.path} that is no mapping")
    return Record(node.what.path, state)


def _storage_of_bytes(values: Values, node: Node) -> Storage:
    """``torch.storage._load_from_bytes``: a file of ``torch.save`` inside a pickle."""
    (data,) = values.value(node.args)
    if not isinstance(data, bytes):
        raise RefusedError("a storage that is not made of bytes")
    if is_archive(data):
        loaded = read_archive(data, NAMES, values.budget)
    else:
        loaded = read_legacy(io.BytesIO(data), NAMES, values.budget)
    if not isinstance(loaded, Storage):
        raise RefusedError(f"a {type(loaded).__name__} where a storage belongs")
    return loaded


_PROTO = Maker(_proto, state=True)
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience.Experience"
NAMES = Names(
    calls={
        **python_values.CALLS,
        **numpy_values.CALLS,
        **torch_values.CALLS,
        **tensordict_values.CALLS,
        Global("torch.storage", "_load_from_bytes"): Maker(_storage_of_bytes),
    },
    instances={
        **python_values.INSTANCES,
        **tensordict_values.INSTANCES,
        Global("verl.protocol", "DataProto"): _PROTO,
        Global("dataproto_audit.protocol", "DataProto"): _PROTO,
        Global("openrlhf.trainer.ppo_utils.experience", "Experience"): Maker(_record, state=True),
    },
    constants=torch_values.CONSTANTS,
)


def name_of(value: Any) -> str:
    """What a loaded value is, in the words of its writer."""
    if isinstance(value, Opaque):
        return value.name
    return "TensorDict" if isinstance(value, Fields) else type(value).__name__


def load(data: bytes) -> tuple[Any, tuple[str, ...]]:
    """Read a pickle or an archive of ``torch.save`` as plain values; nothing of it is executed.

    Returns the value and the names that became :class:`Opaque` in it. DataProtos come back as
    :class:`Proto`, TensorDicts as :class:`Fields`. Errors: :class:`RefusedError` for a name or
    operation off the list, :class:`TooLargeError` for claims beyond the file's size; anything else
    means a broken file.
    """
    budget = Budget(len(data))
    if is_archive(data):
        value = read_archive(data, NAMES, budget)
    else:
        file = io.BytesIO(data)
        value = Values(NAMES, budget).value(run(file, NAMES.calls.keys()))
        if type(value) is int and value == LEGACY_MAGIC:
            value = read_legacy_body(file, NAMES, budget)
        elif rest := len(data) - file.tell():
            raise ValueError(f"{rest} bytes follow the end of its pickle")
    return value, tuple(budget.opaque)
