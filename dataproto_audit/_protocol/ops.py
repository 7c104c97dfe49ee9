"""Functions around a batch: padding to a divisor, folding, collating, gathering over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from dataproto_audit._protocol.merge import list_of_dict_to_dict_of_list
from dataproto_audit.codes import ProtocolError
from dataproto_audit.storage import object_array

if TYPE_CHECKING:
    from dataproto_audit.protocol import DataProto, DataProtoItem


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, from the first one on and around again, until the count divides.

    Returns the padded batch (``data`` itself if nothing was needed) and the number of pad rows.
    """
    if not hasattr(data, "select_idxs"):
        raise ProtocolError(f"data must be a DataProto, not a {type(data).__name__}.")
    if size_divisor < 1:
        raise ProtocolError(f"size_divisor must be at least 1, not {size_divisor}.")
    rows = len(data)
    if rows == 0:
        logging.getLogger(__name__).warning("a DataProto without rows was not padded")
        return data, 0
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"{pad_size} pad rows cannot be dropped from {len(data)} rows.")
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``[rows, ..]`` to ``[new, rows / new, ..]`` for every field, so that a group is one row."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ProtocolError(f"{rows} rows cannot be folded into {new_batch_size} equal groups.")
    each = rows // new_batch_size
    batch = None
    if data.batch is not None:
        folded = {k: v.reshape(new_batch_size, each, *v.shape[1:]) for k, v in data.batch.items()}
        batch = TensorDict(folded, batch_size=(new_batch_size,), device=data.batch.device)
    arrays = {
        key: value.reshape(new_batch_size, each, *value.shape[1:])
        for key, value in data.non_tensor_batch.items()
    }
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first ``batch_dims`` axes of every field into the row axis; undoes a fold."""
    batch = None
    tensors = {} if data.batch is None else dict(data.batch.items())
    for key, value in [*tensors.items(), *data.non_tensor_batch.items()]:
        if value.ndim < batch_dims:
            raise ProtocolError(
                f"field {key!r} of shape {list(value.shape)} has no {batch_dims} axes to unfold."
            )
    if data.batch is not None:
        flat = {k: _merge_axes(v, batch_dims) for k, v in tensors.items()}
        rows = {v.shape[0] for v in flat.values()}
        if len(rows) > 1:
            raise ProtocolError(f"fields unfold to different row counts: {sorted(rows)}.")
        count = rows.pop() if rows else len(data)
        batch = TensorDict(flat, batch_size=(count,), device=data.batch.device)
    arrays = {k: _merge_axes(v, batch_dims) for k, v in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def _merge_axes(value: Any, dims: int) -> Any:
    return value.reshape(math.prod(value.shape[:dims]), *value.shape[dims:])


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack single rows into a batch; non-tensor fields become object arrays of one axis."""
    from dataproto_audit.protocol import DataProto

    batches = [item.batch for item in x]
    batch = None
    if batches and batches[0] is not None:
        batch = torch.stack(batches).contiguous()
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto(
        batch=batch, non_tensor_batch={key: object_array(col) for key, col in columns.items()}
    )


def draw_positions(
    rows: int, batch_size: int, seed: int | None, options: dict[str, Any] | None
) -> DataLoader[Any]:
    """Make a loader that draws lists of row positions as torch's DataLoader draws rows."""
    if batch_size < 1 or rows % batch_size:
        raise ProtocolError(
            f"{rows} rows do not divide into mini-batches of {batch_size}: "
            f"{rows} % {batch_size} != 0."
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    positions: Any = range(rows)  # a sequence is a map-style dataset
    return DataLoader(
        positions, batch_size, collate_fn=list, generator=generator, **(options or {})
    )


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the rows by those of all ranks of the group, in rank order, in place.

    A collective: every rank calls it with the same fields and row count. Tensors travel on the
    device that the group's backend needs and return to their own.
    """
    if not hasattr(data, "select_idxs"):
        raise ProtocolError(f"data must be a DataProto, not a {type(data).__name__}.")
    dist = torch.distributed
    world = dist.get_world_size(group=process_group)
    if data.batch is not None:
        on_gpu = "nccl" in dist.get_backend(process_group)
        where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        gathered = {}
        for key in sorted(data.batch.keys()):
            home = data.batch[key].device
            mine = data.batch[key].to(where).contiguous()
            parts = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine, group=process_group)
            gathered[key] = torch.cat(parts, dim=0).to(home)
        rows = data.batch.batch_size[0] * world
        data.batch = TensorDict(gathered, batch_size=(rows,), device=data.batch.device)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, data.non_tensor_batch, group=process_group)
    data.non_tensor_batch = {
        key: np.concatenate([arrays[key] for arrays in everyone]) for key in data.non_tensor_batch
    }
