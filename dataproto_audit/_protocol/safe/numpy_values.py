"""numpy's arrays, scalars and dtypes, rebuilt from checked numbers and bytes.

numpy's own ``dtype`` and ``ndarray`` states are not used: they trust flags and lengths in the file
and read outside their buffers when those lie. Not covered, and refused: structured dtypes.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit._protocol.safe.errors import RefusedError
from dataproto_audit._protocol.safe.machine import Global, Node
from dataproto_audit._protocol.safe.values import Maker, Values

_CODE = re.compile(r"[biufcSUO]\d{1,6}|[mM]8")
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")


def shape_of(shape: Any) -> tuple[int, ...]:
    """``shape`` as sizes, if that is what it is."""
    if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a shape that is no list of sizes")
    return tuple(shape)


def _dtype(values: Values, node: Node) -> np.dtype[Any]:
    """Plain numbers, text, bytes, times or object; byte order and time unit come as state."""
    code = values.value(node.args)[0]
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise RefusedError(f"the numpy dtype {str(code)[:80]!r}")
    dtype = np.dtype(code)
    if not dtype.itemsize:  # any shape would fit into no bytes
        raise RefusedError(f"the numpy dtype {code!r}")
    if node.has_state:
        state = values.value(node.state)
        if state[2:5] != (None, None, None):
            raise RefusedError("a structured numpy dtype")
        if dtype.kind in "mM" and len(state) > 8:
            dtype = np.dtype(f"{code}[{_unit(state[8][1])}]")
        if state[1] in ("<", ">"):
            dtype = dtype.newbyteorder(state[1])
    return dtype


def _unit(given: Any) -> str:
    unit, count = given[0], given[1]
    name = unit.decode("ascii") if isinstance(unit, bytes) else str(unit)
    if name not in _UNITS or type(count) is not int or not 1 <= count < 1 << 31:
        raise RefusedError("a numpy time unit that does not exist")
    return name if name == "generic" else f"{count}{name}"


def _from_bytes(
    values: Values, data: Any, dtype: Any, shape: tuple[int, ...], order: Any
) -> NDArray[Any]:
    if not isinstance(dtype, np.dtype):
        raise RefusedError("an array without a dtype")
    if dtype.kind == "O" or not isinstance(data, (bytes, bytearray)):
        raise RefusedError(f"an array of {dtype} given as {type(data).__name__}")
    count = math.prod(shape)
    if len(data) != count * dtype.itemsize:
        raise ValueError("an array's bytes do not have the length of its shape")
    values.budget.charge(len(data), "an array")
    flat = np.frombuffer(bytearray(data), dtype=dtype) if data else np.empty(count, dtype)
    if dtype.kind == "b":  # other bytes than 0 and 1 would be neither true nor false
        flat = flat.view(np.uint8) != 0
    if dtype.kind == "U" and flat.size:
        letters = flat.view(np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if int(letters.max()) > 0x10FFFF:
            raise ValueError("text of an array with letters that do not exist")
    return flat.reshape(shape, order=order)


def _frombuffer(values: Values, node: Node) -> NDArray[Any]:
    data, dtype, shape, order, *_ = values.value(node.args)
    if order not in ("C", "F"):
        raise RefusedError("an array in an order that does not exist")
    return _from_bytes(values, data, dtype, shape_of(shape), order)


def _scalar(values: Values, node: Node) -> Any:
    dtype, data = values.value(node.args)
    if isinstance(dtype, np.dtype) and dtype.kind == "O":
        raise RefusedError("a scalar of dtype object given as bytes")
    return _from_bytes(values, data, dtype, (1,), "C")[0]


def _array(values: Values, node: Node) -> NDArray[Any]:
    """An array whose shape, dtype and content arrive as state."""
    if not node.has_state:
        raise RefusedError("an array without content")
    shape, dtype, fortran, content = values.value(node.state)[-4:]
    shape = shape_of(shape)
    if not isinstance(dtype, np.dtype) or dtype.kind != "O":
        return _from_bytes(values, content, dtype, shape, "F" if fortran else "C")
    count = math.prod(shape)
    if not isinstance(content, list) or len(content) != count:
        raise ValueError("an object array does not have the length of its shape")
    flat = np.empty(count, dtype=object)
    for place, item in enumerate(content):
        flat[place] = item
    return flat.reshape(shape)


CALLS: dict[Global, Maker] = {
    Global("numpy", "dtype"): Maker(_dtype, state=True),
    Global("numpy._core.multiarray", "_reconstruct"): Maker(_array, state=True),
    Global("numpy._core.multiarray", "scalar"): Maker(_scalar),
    Global("numpy._core.numeric", "_frombuffer"): Maker(_frombuffer),
}
