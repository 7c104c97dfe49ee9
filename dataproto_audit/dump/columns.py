"""Columns of Python values and numpy arrays as arrow arrays of the declared types.

Every array is a copy, so that the caller may reuse its buffers at once. A value that does not fit
its column is ``InternalError`` DPA903 with table and column, never a silent conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import index
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
            array = _text(value, column)
        elif column.is_float and isinstance(value, (list, tuple)):
            array = pa.array(value, column.arrow)
        else:
            array = _numbers(np.asarray(value), column)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        where = f"the column {column.name} of {spec.name}"
        raise InternalError("DPA903", f"{where} takes {column.kind}: {error}") from error
    if array.null_count and not column.nullable:
        raise InternalError("DPA903", f"{spec.name}.{column.name} has empty cells.")
    return array


@lru_cache(maxsize=256, typed=True)
def _repeated(kind: str, value: Any, rows: int) -> pa.Array:
    value = value.item() if isinstance(value, np.generic) else value
    if ARROW_TYPES[kind] == pa.string() and value is not None:
        value = _utf8(value)
    return pa.repeat(pa.scalar(value, ARROW_TYPES[kind]), rows)


def _text(value: Any, column: Column) -> pa.Array:
    items = value.tolist() if hasattr(value, "tolist") else value
    try:
        return pa.array(items, column.arrow)
    except (pa.ArrowException, UnicodeError, TypeError):
        return pa.array([None if v is None else _utf8(v) for v in items], column.arrow)


def _utf8(value: Any) -> str:
    """``value`` as text that can be stored: lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _numbers(value: np.ndarray[Any, Any], column: Column) -> pa.Array:
    wanted = _NUMPY[column.kind]
    if value.ndim != 1:
        raise ValueError(f"an array of shape {value.shape}, one axis expected")
    if value.dtype == wanted:
        return pa.array(value.copy())  # the caller may reuse the array
    if value.dtype == object:
        items = value.tolist()
        if not column.is_float and column.kind != "bool":  # arrow would cut 0.5 down to 0
            items = [None if item is None else index(item) for item in items]
        return pa.array(items, column.arrow)
    if value.dtype.kind not in "biuf":
        raise ValueError(f"{value.dtype} values that are no numbers")
    with np.errstate(invalid="ignore", over="ignore"):  # what does not fit is found below
        converted = value.astype(wanted)
    if not column.is_float and (converted != value).any():
        raise ValueError(f"{value.dtype} values that do not fit")
    return pa.array(converted)
