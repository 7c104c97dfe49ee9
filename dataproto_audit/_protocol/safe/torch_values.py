"""Tensors, rebuilt from checked storages, offsets and lengths."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit._protocol.safe.errors import RefusedError
from dataproto_audit._protocol.safe.machine import Global, Node
from dataproto_audit._protocol.safe.numpy_values import shape_of
from dataproto_audit._protocol.safe.values import Maker, Values
from dataproto_audit.storage import jagged_of_parts

DTYPES: dict[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}
STORAGE_DTYPES: dict[Global, torch.dtype] = {
    Global("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
        "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32,
        "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
        "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
}  # fmt: skip
STORAGE_DTYPES[Global("torch.storage", "UntypedStorage")] = torch.uint8
STORAGE_DTYPES[Global("torch", "UntypedStorage")] = torch.uint8


@dataclass(eq=False, frozen=True)
class Storage:
    """The bytes behind one or more tensors, and the dtype they were saved with.

    Bytes of bools are 0 and 1: any other would be neither true nor false to torch.
    """

    raw: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, data: bytes, dtype: torch.dtype) -> Storage:
        """A storage on a copy of ``data``."""
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _nothing()
        return cls((raw != 0).view(torch.uint8) if dtype is torch.bool else raw, dtype)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes ``raw`` as numbers; a bool is any byte but 0."""
    return raw != 0 if dtype is torch.bool else raw.view(dtype)


def _strided(values: Values, args: Any, dtype: torch.dtype | None) -> Tensor:
    """Cut a tensor out of its storage, if it lies inside."""
    storage, offset, size, stride, *_ = args
    if not isinstance(storage, Storage):
        raise RefusedError("a tensor without a storage")
    dtype = dtype or storage.dtype
    size, stride = shape_of(size), shape_of(stride)
    if type(offset) is not int or len(size) != len(stride):
        raise ValueError("a tensor whose offset, size and stride do not fit together")
    count, held = math.prod(size), storage.raw.numel() // dtype.itemsize
    values.budget.charge(count * dtype.itemsize, f"a tensor of shape {_short(size)}")
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if count and not 0 <= offset <= held - 1 - last:
        raise ValueError("a tensor reaches outside its storage")
    if not count:
        return torch.empty(size, dtype=dtype)
    flat = storage.raw[: held * dtype.itemsize]
    if dtype is torch.bool and storage.dtype is not torch.bool:
        return torch.as_strided(flat, size, stride, offset) != 0
    return torch.as_strided(flat.view(dtype), size, stride, offset)


def _short(size: tuple[int, ...]) -> str:
    return str(list(size))[:80]


def _tensor(values: Values, node: Node) -> Tensor:
    return _strided(values, values.value(node.args), None)


def _tensor_of_dtype(values: Values, node: Node) -> Tensor:
    """``_rebuild_tensor_v3``: as before, with the dtype named, on untyped bytes."""
    args = values.value(node.args)
    if not isinstance(args[6], torch.dtype):
        raise RefusedError("a tensor without a dtype")
    return _strided(values, args, args[6])


def _parameter(values: Values, node: Node) -> Any:
    return values.value(node.args[0])


def _from_type(values: Values, node: Node) -> Any:
    """``_rebuild_from_type_v2(function, type, args, state)``; the state is dropped."""
    function, _, args, *_ = node.args
    return values.call(function, args)


def jagged(values: Tensor, offsets: Tensor, lengths: Tensor | None, axis: int = 1) -> Tensor:
    """A nested tensor, if its rows lie inside ``values``: kernels do not look.

    ``axis`` is the ragged axis of the nested tensor, so rows lie along ``axis - 1`` of ``values``.
    """
    if values.is_nested or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError("the offsets of a jagged field are no list of integers")
    if not 1 <= axis <= values.dim() or not len(offsets):
        raise ValueError("a jagged field without a ragged axis")
    starts, ends = offsets[:-1], offsets[1:]
    if lengths is not None:
        if lengths.shape != starts.shape or lengths.is_floating_point():
            raise ValueError("a jagged field has other lengths than rows")
        ends = starts + lengths
    if lengths is None and (int(offsets[0]) or int(offsets[-1]) != values.shape[axis - 1]):
        raise ValueError("a jagged field whose rows do not cover its values")
    inside = (starts >= 0) & (starts <= ends) & (ends <= values.shape[axis - 1])
    if not bool(inside.all()):
        raise ValueError("a jagged field reaches outside its values")
    return jagged_of_parts(values, offsets, lengths, axis=axis)


def _njt(values: Values, node: Node) -> Tensor:
    given = values.value(node.args[0])
    inner, offsets, lengths = given["values"], given["offsets"], given.get("lengths")
    if not all(isinstance(part, Tensor) for part in (inner, offsets)) or not (
        lengths is None or isinstance(lengths, Tensor)
    ):
        raise RefusedError("a jagged tensor whose parts are no tensors")
    return jagged(inner, offsets, lengths, int(given.get("_ragged_idx", 1)))


def _strided_nested(values: Values, node: Node) -> Tensor:
    """``_rebuild_nested_tensor(buffer, sizes, strides, offsets)``: the older nested layout."""
    buffer, sizes, strides, offsets = values.value(node.args)
    if not all(
        isinstance(part, Tensor) and part.layout is torch.strided
        for part in (buffer, sizes, strides, offsets)
    ):
        raise RefusedError("a nested tensor whose parts are no tensors")
    flat = Storage(buffer.contiguous().reshape(-1).view(torch.uint8), buffer.dtype)
    places = zip(offsets.tolist(), sizes.tolist(), strides.tolist(), strict=True)
    rows = [_strided(values, (flat, *place), None) for place in places]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)


def _size(values: Values, node: Node) -> torch.Size:
    args = values.value(node.args)
    return torch.Size(shape_of(args[0] if args else ()))


def _device(values: Values, node: Node) -> torch.device:
    return torch.device("cpu")


CALLS: dict[Global, Maker] = {
    Global("torch._utils", "_rebuild_tensor"): Maker(_tensor),
    Global("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor),
    Global("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_of_dtype),
    Global("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    Global("torch._tensor", "_rebuild_from_type_v2"): Maker(_from_type),
    Global("torch.nested._internal.nested_tensor", "_rebuild_njt"): Maker(_njt),
    Global("torch._utils", "_rebuild_nested_tensor"): Maker(_strided_nested),
    Global("torch", "Size"): Maker(_size),
    Global("torch", "device"): Maker(_device),
}
CONSTANTS: dict[Global, Any] = {
    **{Global("torch", name): dtype for name, dtype in DTYPES.items()},
    **STORAGE_DTYPES,
}
