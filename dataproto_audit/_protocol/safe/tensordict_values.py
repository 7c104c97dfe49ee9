"""TensorDicts and the objects they hold, as plain mappings; tensordict itself is not asked.

Three forms are known: a pickled ``TensorDict`` (``_make_td``), a consolidated one (one buffer and a
table of leaves) and ``NonTensorData``/``NonTensorStack`` inside either. Sources: the reductions of
tensordict 0.8 to 0.10. Not covered, and refused: lazy stacks of tensors, memory-mapped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit._protocol.safe.errors import RefusedError
from dataproto_audit._protocol.safe.machine import Global, Node
from dataproto_audit._protocol.safe.numpy_values import shape_of
from dataproto_audit._protocol.safe.torch_values import DTYPES, as_dtype, jagged
from dataproto_audit._protocol.safe.values import Maker, Values


@dataclass(frozen=True, eq=False)
class Fields:
    """A TensorDict: its batch size, and what it holds by name."""

    batch_size: tuple[int, ...]
    fields: dict[str, Any]


@dataclass(frozen=True, eq=False)
class OneObject:
    """``NonTensorData``: one object for the whole batch."""

    data: Any


@dataclass(frozen=True, eq=False)
class ObjectColumn:
    """``NonTensorStack``: one object a row."""

    entries: list[Any]


def _named(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict) or not all(type(name) is str for name in fields):
        raise RefusedError("a TensorDict whose fields have no names")
    return fields


def _tensordict(values: Values, node: Node) -> Fields:
    """``_make_td(TensorDict, state)``."""
    kind, state, *_ = node.args
    if type(kind) is not Global or kind.module != "tensordict._td" or kind.name != "TensorDict":
        raise RefusedError("another class where TensorDict belongs")
    made = values.value(state)
    return Fields(shape_of(made["_batch_size"]), _named(made["_tensordict"]))


def _tensordict_instance(values: Values, node: Node) -> Fields:
    made = values.value(node.state)
    return Fields(shape_of(made["_batch_size"]), _named(made["_tensordict"]))


def _one_object(values: Values, node: Node) -> OneObject:
    state = values.value(node.state)
    data = state["non_tensordict"]["data"]
    return OneObject(data.data if isinstance(data, OneObject) else data)


def _object_column(values: Values, node: Node) -> ObjectColumn:
    state = values.value(node.state)
    if state.get("stack_dim", 0) != 0:
        raise RefusedError("objects stacked along another axis than rows")
    rows = []
    for entry in state["tensordicts"]:
        if isinstance(entry, OneObject):
            rows.append(entry.data)
        elif isinstance(entry, ObjectColumn):
            rows.append(entry.entries)
        else:
            raise RefusedError(f"a {type(entry).__name__} among the objects of a column")
    return ObjectColumn(rows)


def _consolidated(values: Values, node: Node) -> Fields:
    """``_rebuild_tensordict_files_consolidated(metadata, storage)``, from plain data alone.

    ``metadata["leaves"]`` maps a name to (dtype, shape, start, stop, padding), in bytes of
    ``storage``; jagged fields are two or three leaves. Objects and sub-dictionaries are refused:
    a DataProto keeps those elsewhere.
    """
    metadata, storage = values.value(node.args)
    known = {"cls", "non_tensors", "leaves", "cls_metadata", "size"}
    if metadata["non_tensors"] or set(metadata) - known:
        raise ValueError("the saved TensorDict holds fields that are not tensors")
    if not isinstance(storage, Tensor) or storage.dtype != torch.uint8 or storage.dim() != 1:
        raise RefusedError("a consolidated TensorDict without its buffer")
    fields: dict[str, Any] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, leaf in _named(metadata["leaves"]).items():
        tensor = _leaf(values, storage, leaf)
        if name.startswith("<NJT_"):
            role, _, field = name[len("<NJT_") :].partition(">")
            parts.setdefault(field, {})[role] = tensor
        else:
            fields[name] = tensor
    for field, part in parts.items():
        fields[field] = jagged(part["VALUES"], part["OFFSETS"], part.get("LENGTHS"))
    return Fields(shape_of(metadata["cls_metadata"]["batch_size"]), fields)


def _leaf(values: Values, storage: Tensor, leaf: Any) -> Tensor:
    name, shape, start, stop, *_ = leaf
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None or not all(type(place) is int for place in (start, stop)):
        raise RefusedError("a field of no known dtype or place")
    size = torch.Size(shape_of(shape))
    if not 0 <= start <= stop <= storage.numel() or size.numel() * dtype.itemsize > stop - start:
        raise ValueError("a field reaches outside the buffer of its TensorDict")
    values.budget.charge(size.numel() * dtype.itemsize, "a field of a TensorDict")
    raw = storage[start : start + size.numel() * dtype.itemsize]
    return as_dtype(raw, dtype).view(size) if raw.numel() else torch.empty(size, dtype=dtype)


_REDUCTIONS = "tensordict._reductions"
CALLS: Mapping[Global, Maker] = {
    Global(_REDUCTIONS, "_make_td"): Maker(_tensordict),
    Global(_REDUCTIONS, "_rebuild_tensordict_files_consolidated"): Maker(_consolidated),
}
INSTANCES: Mapping[Global, Maker] = {
    Global("tensordict._td", "TensorDict"): Maker(_tensordict_instance, state=True),
    Global("tensordict.tensorclass", "NonTensorData"): Maker(_one_object, state=True),
    Global("tensordict.tensorclass", "NonTensorStack"): Maker(_object_column, state=True),
}
