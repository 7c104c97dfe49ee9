"""Making the parts of a batch from dictionaries and TensorDicts, and checking their rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataproto_audit._protocol.errors import factor_note
from dataproto_audit._protocol.nested import leading_sizes, sizes_of
from dataproto_audit.codes import ProtocolError
from dataproto_audit.storage import object_array


def batch_from_tensors(tensors: Mapping[str, torch.Tensor], dims: int) -> TensorDict | None:
    """Put tensors with equal first ``dims`` axes into a TensorDict; None if there are none."""
    if not tensors:
        return None
    first_key, first = next(iter(tensors.items()))
    size = leading_sizes(first, dims)
    for key, tensor in tensors.items():
        if leading_sizes(tensor, dims) != size or len(size) < dims:
            shape = sizes_of(tensor)
            raise ProtocolError(
                f"field {key!r} has shape {list(shape)}, field {first_key!r} has batch size "
                f"{list(size)}.",
                _note(key, shape, f"field {first_key!r}", size),
            )
    return TensorDict(dict(tensors), batch_size=size)


def array_of(value: Any) -> np.ndarray:
    """Leave arrays alone and make object arrays of lists, by numpy's rule for nested ones."""
    return value if isinstance(value, np.ndarray) else np.array(value, dtype=object)


def check_rows(batch: TensorDict | None, arrays: Mapping[str, Any]) -> None:
    """Check that there is one row axis and that every array has one entry per row."""
    rows, owner = -1, "the tensors"
    if batch is not None:
        if len(batch.batch_size) != 1:
            raise ProtocolError(
                f"a batch has one row axis, this one has batch size {list(batch.batch_size)}."
            )
        rows = batch.batch_size[0]
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray) or not value.ndim:
            raise ProtocolError(
                f"non-tensor field {key!r} is a {type(value).__name__}, not an array of rows.",
                "Use numpy.array(..., dtype=object).",
            )
        if rows < 0:
            rows, owner = value.shape[0], f"non-tensor field {key!r}"
        elif value.shape[0] != rows:
            raise ProtocolError(
                f"non-tensor field {key!r} has {value.shape[0]} entries for {rows} rows.",
                _note(key, value.shape, owner, (rows,)),
            )


def _note(key: str, shape: Any, other: str, other_shape: Any) -> str:
    if not len(shape) or not len(other_shape):
        return "Every field needs a row axis."
    return factor_note(shape[0], other_shape[0], left_name=f"field {key!r}", right_name=other)


def parts_of_tensordict(
    tensor_dict: TensorDict, dims: int
) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Take a TensorDict apart: tensors, stacks of objects (columns), single objects (meta)."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {}
    for key, value in tensor_dict.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, NonTensorStack):
            entries = [entry.data for entry in value]
            shapes = {entry.shape if isinstance(entry, np.ndarray) else None for entry in entries}
            even = len(shapes) == 1 and None not in shapes  # was an array of several axes
            arrays[key] = np.stack(entries) if even else object_array(entries)
        elif isinstance(value, NonTensorData):
            meta[key] = value.data
        else:
            raise ProtocolError(f"field {key!r} is a {type(value).__name__}.")
    if dims < 1 or (dims != 1 and (arrays or meta)):
        raise ProtocolError(f"num_batch_dims must be 1, not {dims}.")
    if not tensors and len(tensor_dict.batch_size) == 1 and not arrays:
        return TensorDict({}, batch_size=tensor_dict.batch_size), arrays, meta
    return batch_from_tensors(tensors, dims), arrays, meta


def tensordict_of_parts(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], rows: int
) -> TensorDict:
    """Put tensors, columns and meta entries into one TensorDict; no name may occur twice."""
    source: dict[str, Any] = {} if batch is None else dict(batch.items())
    columns = {
        key: NonTensorStack.from_list([NonTensorData(entry) for entry in value])
        for key, value in arrays.items()
    }
    for more in (columns, {key: NonTensorData(value) for key, value in meta.items()}):
        if twice := sorted(source.keys() & more.keys()):
            raise ProtocolError(f"{twice} name more than one thing.", "Rename one side.")
        source.update(more)
    return TensorDict(source, batch_size=(rows,))
