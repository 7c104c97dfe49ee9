"""The values behind a field, however they are stored: dense, nested, in numpy or in lists."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_plain_jagged(tensor: Any) -> bool:
    """True for nested tensors whose values lie row after row, ragged in axis 1."""
    plain = tensor.layout == torch.jagged and tensor.lengths() is None
    return bool(plain and getattr(tensor, "_ragged_idx", 1) == 1)


def ragged_rows(tensor: Any) -> list[Tensor]:
    """The rows of a nested tensor of any kind, each with its ragged axis first."""
    axis = int(getattr(tensor, "_ragged_idx", 1)) - 1
    return [row.reshape(1) if row.dim() == 0 else row.movedim(axis, 0) for row in tensor.unbind()]


def jagged_values(tensor: Any) -> NDArray[Any]:
    """The values of all rows one after another, ``[sum of lengths, ...]``."""
    if is_plain_jagged(tensor):
        return dense(tensor.values())
    rows = ragged_rows(tensor)
    return dense(torch.cat(rows)) if rows else np.zeros(0)


def dense(tensor: Tensor) -> NDArray[Any]:
    """``tensor`` as numpy; kinds of number that numpy lacks (bf16, fp8) become float32."""
    if not tensor.requires_grad:
        try:
            plain: NDArray[Any] = tensor.numpy()
        except (TypeError, RuntimeError):  # on another device, sparse, lazy, or no such dtype
            pass
        else:
            return plain
    tensor = plain_tensor(tensor)
    try:
        out: NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError):  # no such dtype, or a lazy conjugate or negative
        resolved = tensor.resolve_conj().resolve_neg()
        out = (resolved if resolved.is_complex() else resolved.float()).numpy()
    return out


def plain_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` in host memory and dense, its numbers as they are meant; no gradient."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def shared(array: NDArray[Any]) -> Tensor:
    """A tensor on the memory of ``array``, or on a copy where torch cannot share it."""
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if not native.flags.writeable:
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:  # an integer or float width that torch does not have
        return torch.from_numpy(
            native.astype(np.int64 if native.dtype.kind in "iu" else np.float64)
        )


def listed(value: Any) -> NDArray[Any] | None:
    """A non-tensor field with one entry per row; None for what has no rows."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tensor):
        value = list(value.unbind()) if value.is_nested else plain_tensor(value)
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, (list, tuple)):
        return None
    out = np.empty(len(items), dtype=object)
    for row, item in enumerate(items):
        out[row] = item
    return out


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """``tensor`` with its columns moved to the right, or to the left for a negative shift."""
    if not shift or tensor.is_nested or tensor.dim() < 2:
        return tensor
    moved = torch.zeros_like(tensor)
    into, source = (slice(max(way, 0), min(way, 0) or None) for way in (shift, -shift))
    moved[:, into] = tensor[:, source]
    return moved


def laid_out(
    values: NDArray[Any], lengths: NDArray[np.int64], start: NDArray[np.int64], width: int
) -> NDArray[Any]:
    """Rows of ``lengths`` that lie one after another in ``values``, as ``[rows, width, ...]``.

    Row i begins at column ``start[i]``; the rest is 0, and what does not fit is left out.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    column = np.arange(len(row)) - first + np.repeat(start, lengths)
    fits = (column >= 0) & (column < width)
    out = np.zeros((len(lengths), width, *values.shape[1:]), values.dtype)
    out[row[fits], column[fits]] = values[fits]
    return out


def host_copy(tensor: Tensor) -> Tensor:
    """A dense, contiguous copy in host memory that nobody else holds."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.device.type != "cpu":
        return dense.to("cpu").resolve_conj().contiguous()
    return dense.clone(memory_format=torch.contiguous_format)


def flat_parts(tensor: Any) -> tuple[Tensor, Tensor]:
    """Values of all rows one after another, and the offsets of the rows."""
    if is_plain_jagged(tensor):
        return host_copy(tensor.values()), host_copy(tensor.offsets())
    rows = ragged_rows(tensor)
    lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
    values = torch.cat([host_copy(row) for row in rows]) if rows else torch.zeros(0)
    return values.to(tensor.dtype), lengths.cumsum(0)


def object_array(entries: Any) -> NDArray[Any]:
    """One entry per row, whatever the entries are (numpy would unpack equal-length lists)."""
    array = np.empty(len(entries), dtype=object)
    for row, entry in enumerate(entries):
        array[row] = entry
    return array


def jagged_of_parts(
    values: Tensor, offsets: Tensor, lengths: Tensor | None = None, *, axis: int = 1
) -> Tensor:
    """A nested tensor of the rows that ``offsets`` (and ``lengths``) cut out of ``values``.

    ``axis`` is the ragged one. What torch says of its own calls, once a process, is not repeated:
    that nested tensors are a prototype, and that ``is_fx_tracing`` was renamed.
    """
    with warnings.catch_warnings(), _no_news_of_fx():
        warnings.simplefilter("ignore", UserWarning)
        made: Tensor = torch.nested.nested_tensor_from_jagged(
            values, offsets=offsets, lengths=lengths, jagged_dim=axis
        )
    return made


@contextmanager
def _no_news_of_fx() -> Iterator[None]:
    """Without what torch logs where its own nested tensors call ``is_fx_tracing`` (2.13)."""
    log = logging.getLogger("torch.fx._symbolic_trace")
    log.addFilter(_is_no_news)
    try:
        yield
    finally:
        log.removeFilter(_is_no_news)


def _is_no_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("is_fx_tracing will return true")
