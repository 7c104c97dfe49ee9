"""Picking, repeating and cutting rows. All of it is one gather with an index made once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from dataproto_audit._protocol.errors import RowIndexError
from dataproto_audit._protocol.nested import nested_keys, nested_take
from dataproto_audit.codes import ProtocolError

Arrays = dict[str, np.ndarray]


def row_index(item: Any, rows: int) -> np.ndarray:
    """Turn a list, array or tensor of positions, or a mask, into non-negative positions.

    Errors: :class:`RowIndexError` for a position outside the batch or a mask of another length.
    """
    raw = item.detach().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)
    if raw.size == 0 and raw.dtype != bool:
        return np.zeros(raw.shape or (0,), dtype=np.int64)
    if raw.dtype == bool:
        if raw.shape != (rows,):
            raise RowIndexError(
                f"a mask of shape {tuple(raw.shape)} cannot pick from {rows} rows.",
                "A mask has one entry per row.",
            )
        return raw.nonzero()[0]
    if raw.dtype.kind not in "iu":
        raise ProtocolError(f"rows are picked by integers or booleans, not by {raw.dtype}.")
    index = np.array(raw, dtype=np.int64)
    low, high = int(index.min()), int(index.max())
    if low < -rows or high >= rows:
        wrong = low if low < -rows else high
        raise RowIndexError(f"row {wrong} is outside a batch of {rows} rows.")
    if low < 0:
        index[index < 0] += rows
    return index


def take_tensor(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather rows of one field; ``index`` holds positions on the tensor's device."""
    if tensor.is_nested:
        return nested_take(tensor, index.tolist())
    return tensor.index_select(0, index) if index.ndim == 1 else tensor[index]


def take_batch(batch: TensorDict | None, index: np.ndarray) -> TensorDict | None:
    """Gather rows of every tensor field into a new TensorDict on the same device."""
    if batch is None:
        return None
    on_cpu = torch.from_numpy(np.ascontiguousarray(index))  # torch takes no negative strides
    by_device = {torch.device("cpu"): on_cpu}
    taken = {}
    for key, tensor in batch.items():
        device = tensor.device
        if device not in by_device:
            by_device[device] = on_cpu.to(device)
        taken[key] = take_tensor(tensor, by_device[device])
    return TensorDict(taken, batch_size=(index.shape[0],), device=batch.device)


def take_arrays(arrays: Arrays, index: np.ndarray | slice) -> Arrays:
    """Gather rows of every non-tensor field."""
    return {key: value[index] for key, value in arrays.items()}


def slice_batch(batch: TensorDict | None, rows: slice) -> TensorDict | None:
    """Cut a range of rows; a view of the same memory unless a field is nested."""
    if batch is None:
        return None
    if nested_keys(batch):
        return take_batch(batch, np.arange(batch.batch_size[0])[rows])
    return batch[rows]


def repeat_index(rows: int, times: int, *, interleave: bool) -> np.ndarray:
    """Positions for ``r0,r0,..,r1,r1,..`` (interleaved) or ``r0,r1,..,r0,r1,..``."""
    if times < 0:
        raise ProtocolError(f"rows cannot be repeated {times} times.")
    index = np.arange(rows)
    return np.repeat(index, times) if interleave else np.tile(index, times)


def count_index(rows: int, counts: Any) -> np.ndarray:
    """Positions for row i repeated ``counts[i]`` times (list, tuple, 1-d array or tensor)."""
    if not isinstance(counts, (list, tuple, np.ndarray, torch.Tensor)):
        raise ProtocolError(
            f"repeat_times is a list, tuple, array or tensor, not {type(counts).__name__}."
        )
    array = counts.cpu().numpy() if isinstance(counts, torch.Tensor) else np.asarray(counts)
    if array.ndim != 1 or array.shape[0] != rows:
        raise ProtocolError(
            f"repeat_times has shape {tuple(array.shape)} for {rows} rows.",
            "Give one count per row.",
        )
    if rows and (array.dtype.kind not in "iub" or int(array.min()) < 0):
        raise ProtocolError("repeat_times holds non-negative integers.")
    return np.repeat(np.arange(rows), array.astype(np.int64))


def chunk_sizes(rows: int, chunks: int, *, as_torch: bool) -> list[int]:
    """Sizes of ``chunks`` parts: torch's rule (ceil first) for tensors, numpy's without any."""
    if rows % chunks == 0:
        return [rows // chunks] * chunks
    if not as_torch:
        return [rows // chunks + (i < rows % chunks) for i in range(chunks)]
    each = -(-rows // chunks)
    sizes = [each] * (rows // each) + ([rows % each] if rows % each else [])
    if len(sizes) != chunks:
        raise ProtocolError(
            f"{rows} rows in chunks of {each} make {len(sizes)} chunks, {chunks} are asked for.",
            "Pad with pad_dataproto_to_divisor first.",
        )
    return sizes


def split_batch(batch: TensorDict | None, sizes: Sequence[int]) -> list[TensorDict | None]:
    """Cut all rows into consecutive parts; views of the same memory unless a field is nested."""
    if batch is None:
        return [None] * len(sizes)
    if batch.batch_size[0] and not nested_keys(batch):
        return list(batch.split(list(sizes), dim=0))
    ends = np.cumsum(sizes).tolist()
    return [slice_batch(batch, slice(e - s, e)) for s, e in zip(sizes, ends, strict=True)]


def split_arrays(arrays: Arrays, sizes: Sequence[int]) -> list[Arrays]:
    """Cut every non-tensor field into consecutive parts; views of the same memory."""
    ends = np.cumsum(sizes).tolist()
    cuts = [slice(e - s, e) for s, e in zip(sizes, ends, strict=True)]
    return [take_arrays(arrays, cut) for cut in cuts]


def column_chunks(value: Any, n_split: int, key: str) -> Any:
    """``[rows, columns, ..]`` to ``[rows * n, columns / n, ..]``, one column chunk a row."""
    if value.ndim < 2 or value.shape[1] % n_split:
        raise ProtocolError(
            f"field {key!r} of shape {list(value.shape)} has no second axis "
            f"that divides by {n_split}."
        )
    rows, columns, *rest = value.shape
    return value.reshape(rows * n_split, columns // n_split, *rest)
