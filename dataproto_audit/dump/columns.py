"""Columns of Python values and numpy arrays as arrow arrays of the declared types.

Every array is a copy, so that the caller may reuse its buffers at once. A value that does not fit
its column is ``InternalError`` DPA903 with table and column, never a silent conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dataproto_audit.codes import InternalError
from dataproto_audit.dump.schema import ARROW_TYPES, TABLES, Column, Table

_NUMPY: dict[str, np.dtype[Any]] = {
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "bool": np.dtype(np.bool_),
}
_EXACT = {"i64": int, "i32": int, "f64": float}
"""Lists of this type alone (and None) need no other look: numpy refuses what does not fit."""
_SCALARS = (str, bytes, int, float, bool, type(None), np.generic)


@dataclass(frozen=True)
class Block:
    """Rows of one table, converted once and appended many times. ``step`` is filled in later."""

    table: str
    rows: int
    arrays: tuple[pa.Array, ...]


def make_block(table: str, columns: Mapping[str, Any]) -> Block:
    """Columns of one length, or scalars, as a block; missing nullable columns are empty."""
    spec = TABLES[table]
    unknown = [name for name in columns if name not in spec.by_name or name == "step"]
    if unknown:
        raise InternalError("DPA903", f"the table {table} takes no column {', '.join(unknown)}.")
    lengths = {n: len(v) for n, v in columns.items() if not isinstance(v, _SCALARS)}
    if len(set(lengths.values())) > 1:
        raise InternalError("DPA903", f"columns of {table} have different lengths: {lengths}.")
    rows = next(iter(lengths.values()), 1)
    arrays = [_array(spec, c, columns.get(c.name), rows) for c in spec.given]
    return Block(table, rows, tuple(arrays))


def from_tuples(spec: Table, rows: list[tuple[Any, ...]]) -> Block:
    """Rows as tuples of all columns but ``step``, in the declared order, as a block."""
    try:
        values = list(zip(*rows, strict=True)) if rows else [()] * len(spec.given)
        pairs = list(zip(spec.given, values, strict=True))
    except ValueError as error:
        wanted = f"a row of {spec.name} takes a tuple of {len(spec.given)} values"
        raise InternalError("DPA903", f"{wanted}: {error}") from error
    return Block(spec.name, len(rows), tuple(_array(spec, c, v, len(rows)) for c, v in pairs))


def _array(spec: Table, column: Column, value: Any, rows: int) -> pa.Array:
    """``value`` as an arrow array that shares no memory with it."""
    try:
        if isinstance(value, _SCALARS):
            array = _repeated(column.kind, value, rows)
        elif column.is_text:
            array = _text(value)
        else:
            array = _numbers(value, column.kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        where = f"the column {column.name} of {spec.name}"
        raise InternalError("DPA903", f"{where} takes {column.kind}: {error}") from error
    if array.null_count and not column.nullable:
        raise InternalError("DPA903", f"{spec.name}.{column.name} has empty cells.")
    return array


@lru_cache(maxsize=256, typed=True)
def _repeated(kind: str, value: Any, rows: int) -> pa.Array:
    value = value.item() if isinstance(value, np.generic) else value
    if ARROW_TYPES[kind] == pa.string():
        return _text([value] * rows)
    return _numbers([value] * rows, kind)


# Arrays are made from buffers: `pa.array` and `pa.scalar` import pandas on first use, which costs a
# training process a second of CPU time that it has no use for.


def _text(value: Any) -> pa.Array:
    items = value.tolist() if hasattr(value, "tolist") else value
    try:
        joined = "".join(items)
    except TypeError:  # something is missing, or no string
        return _mixed_text(items)
    if not joined.isascii():
        return _mixed_text(items)
    ends = _ends(map(len, items), len(items))
    return _from_buffers(pa.string(), len(items), None, ends, joined.encode())


def _ends(lengths: Iterable[int], count: int) -> np.ndarray[Any, Any]:
    """Where each of ``count`` texts ends in their joined bytes, behind a zero."""
    ends = np.zeros(count + 1, np.int32)
    np.add.accumulate(np.fromiter(lengths, np.int32, count), out=ends[1:])
    return ends


def _mixed_text(items: Sequence[Any]) -> pa.Array:
    encoded = [b"" if item is None else _utf8(item) for item in items]
    ends = _ends(map(len, encoded), len(encoded))
    missing = np.fromiter((item is None for item in items), bool, len(encoded))
    return _from_buffers(pa.string(), len(encoded), missing, ends, b"".join(encoded))


def _utf8(value: Any) -> bytes:
    """``value`` as text that can be stored: lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace")


def _numbers(value: Any, kind: str) -> pa.Array:
    wanted = _NUMPY[kind]
    if isinstance(value, np.ndarray) and value.dtype == wanted and value.ndim == 1:
        return _packed(value.copy(), None, kind)
    if isinstance(value, (list, tuple)) and (plain := _EXACT.get(kind)):
        types = set(map(type, value))
        if types == {plain}:
            return _packed(np.array(value, wanted), None, kind)
        if types == {plain, type(None)}:
            filled = np.array([0 if item is None else item for item in value], wanted)
            return _packed(filled, np.array([item is None for item in value]), kind)
    values, missing = _present(value)
    if values.ndim != 1:
        raise ValueError(f"an array of shape {values.shape}, one axis expected")
    if values.dtype == object and (missing is None or not missing.all()):
        raise ValueError("values that are no numbers")
    if values.dtype.kind not in "biufO" or (kind == "bool" and values.dtype.kind == "f"):
        raise ValueError(f"{values.dtype} values that are no {kind}")
    if values.dtype == object:
        return _packed(np.zeros(len(values), wanted), missing, kind)
    with np.errstate(invalid="ignore", over="ignore"):  # what does not fit is found below
        converted = values.astype(wanted)
    if wanted.kind in "iub" and values.dtype.kind in "iuf":
        misfit = converted != values
        if (misfit if missing is None else misfit & ~missing).any():
            raise ValueError(f"{values.dtype} values that do not fit")
    return _packed(converted, missing, kind)


def _packed(
    values: np.ndarray[Any, Any], missing: np.ndarray[Any, Any] | None, kind: str
) -> pa.Array:
    data = np.packbits(values, bitorder="little") if kind == "bool" else values
    return _from_buffers(ARROW_TYPES[kind], len(values), missing, data)


def _present(value: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Values as an array, and where they are missing; a missing one holds some number."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value, None
    items = value.tolist() if hasattr(value, "tolist") else value
    missing = np.array([item is None for item in items], bool)
    if not missing.any():
        return np.asarray(items), None
    known = next((item for item in items if item is not None), None)
    return np.asarray([known if item is None else item for item in items]), missing


def repeated_step(step: int, rows: int) -> pa.Array:
    """The ``step`` column of ``rows`` rows."""
    return _from_buffers(pa.int64(), rows, None, np.full(rows, step, np.int64))


def _from_buffers(
    kind: pa.DataType,
    rows: int,
    missing: np.ndarray[Any, Any] | None,
    *data: np.ndarray[Any, Any] | bytes,
) -> pa.Array:
    parts = map(pa.py_buffer, data)
    if missing is None:
        return pa.Array.from_buffers(kind, rows, [None, *parts], 0)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, rows, [valid, *parts], int(missing.sum()))
