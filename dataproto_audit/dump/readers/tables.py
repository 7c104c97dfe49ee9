"""Rows of JSONL and parquet files, bounded in size, and columns made of rows."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit._protocol.safe.errors import TooLargeError
from dataproto_audit._protocol.safe.torch_values import jagged
from dataproto_audit.storage import object_array

Row = dict[str, Any]
FREE_BYTES = 1 << 25
COMPRESSION = 100
"""Text compresses to a tenth or so; beyond this, a file was made to fill memory."""


def _limit(size: int) -> int:
    return FREE_BYTES + COMPRESSION * size


def unzipped(data: bytes) -> bytes:
    """The content of a gzip file, if it is in proportion to the file."""
    limit, out = _limit(len(data)), []
    rest, total = data, 0
    while rest:
        stream = zlib.decompressobj(wbits=31)
        out.append(stream.decompress(rest, limit + 1 - total))
        total += len(out[-1])
        if total > limit:
            raise TooLargeError(f"it unpacks to more than {limit} bytes")
        if not stream.eof:
            raise EOFError
        rest = stream.unused_data
    return b"".join(out)


def json_rows(data: bytes) -> list[Row]:
    """The objects of a JSONL file, or the one object of a JSON file."""
    if data.startswith(b"\x1f\x8b"):
        data = unzipped(data)
    text = data.decode("utf-8-sig")
    lines = [line for line in text.split("\n") if line.strip()]
    if lines and lines[0].strip() == "{":  # one object on several lines
        lines = [text]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is a {type(row).__name__}, not an object")
        rows.append(row)
    if not rows:
        raise ValueError("it holds no line")
    return rows


def parquet_rows(data: bytes) -> list[Row]:
    """The rows of a parquet file, if what it declares is in proportion to the file."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(data))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    declared = sum(group.total_byte_size for group in groups)
    cells = file.metadata.num_rows * max(1, file.metadata.num_columns)
    if max(declared, cells) > _limit(len(data)):
        raise TooLargeError(f"it claims {declared} bytes in {file.metadata.num_rows} rows")
    rows: list[Row] = []
    unpacked = 0
    for batch in file.iter_batches(batch_size=256):
        unpacked += batch.nbytes + 64 * batch.num_rows * batch.num_columns
        if unpacked > _limit(len(data)):
            raise TooLargeError(f"its first {len(rows)} rows unpack to {unpacked} bytes already")
        rows += batch.to_pylist()
    if not rows:
        raise ValueError("it holds no row")
    return rows


def column(values: Sequence[Any]) -> NDArray[Any]:
    """A non-tensor column: one object a row."""
    made: NDArray[Any] = object_array(values)
    return made


def is_numbers(value: Any) -> TypeGuard[list[Any]]:
    """Whether ``value`` is a list of numbers, with None for a missing one."""
    return isinstance(value, list) and all(
        item is None or isinstance(item, (bool, int, float)) for item in value
    )


def jagged_of(rows: Sequence[Sequence[Any]]) -> Tensor:
    """Lists of numbers as one nested tensor ``[rows, j]``: int64, or float32 with NaN for None."""
    flat = [item for row in rows for item in row]
    whole = all(isinstance(item, (bool, int)) for item in flat)
    if whole:
        values = torch.from_numpy(np.array(flat, dtype=np.int64))
    else:
        given = [float("nan") if item is None else float(item) for item in flat]
        values = torch.from_numpy(np.array(given, dtype=np.float64)).float()
    lengths = np.array([0, *map(len, rows)], dtype=np.int64)
    return jagged(values, torch.from_numpy(np.cumsum(lengths)), None)


def floats_if_whole(tensor: Tensor, *, floats: bool) -> Tensor:
    """A float field whose numbers all happen to be whole, as floats."""
    if not floats or tensor.is_floating_point():
        return tensor
    parts: Any = tensor
    return jagged(parts.values().float(), parts.offsets(), None)
