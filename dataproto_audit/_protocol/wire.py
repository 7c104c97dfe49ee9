"""How the tensors of a batch travel: verl's two encodings, chosen by verl's own variable.

``VERL_DATAPROTO_SERIALIZATION_METHOD=numpy``: per field ``(dtype, shape, uint8 array)``. Cheap,
and with pickle protocol 5 (Ray) the bytes go out of band, uncopied. Anything else: ``bytes`` of
``torch.save`` of the consolidated TensorDict, several times slower on the small batches of a
step. Reading tells the two apart by type and needs no variable.
"""

import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from dataproto_audit.codes import ProtocolError

METHOD_VARIABLE = "VERL_DATAPROTO_SERIALIZATION_METHOD"

_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

PackedTensor = tuple[str, tuple[int, ...], Any]
PackedBatch = tuple[tuple[int, ...], str | None, dict[str, Any]]


def serialize_single_tensor(obj: torch.Tensor) -> PackedTensor:
    """Pack a tensor as dtype name, shape and its bytes (a view of its memory where possible)."""
    return _DTYPE_NAMES[obj.dtype], tuple(obj.shape), _bytes_of(obj)


def _serialize_out_of_band(obj: torch.Tensor) -> PackedTensor:
    """The same with a ``PickleBuffer``, which protocol 5 handles faster than a numpy array."""
    return _DTYPE_NAMES[obj.dtype], tuple(obj.shape), pickle.PickleBuffer(_bytes_of(obj))


def _bytes_of(obj: torch.Tensor) -> Any:
    if obj.requires_grad:
        obj = obj.detach()
    if obj.is_cuda:
        obj = obj.cpu()
    return obj.reshape(-1).contiguous().view(torch.uint8).numpy()


def deserialize_single_tensor(arr: PackedTensor) -> torch.Tensor:
    """Unpack into fresh memory (what Ray hands out is read-only and shared)."""
    name, shape, data = arr
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{name!r} is not the name of a tensor dtype.")
    try:
        view = memoryview(data)
    except TypeError:
        raise ProtocolError(f"a tensor is packed as a {type(data).__name__}, not bytes.") from None
    if view.format not in ("B", "b", "c"):  # an array of objects would show its pointers
        raise ProtocolError(f"a tensor is packed as items of format {view.format!r}, not bytes.")
    if view.nbytes != math.prod(shape) * dtype.itemsize:
        raise ProtocolError(f"{view.nbytes} bytes are no {name} tensor of shape {list(shape)}.")
    buffer = bytearray(view)
    # frombuffer refuses a buffer without bytes.
    flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def serialize_tensordict(batch: TensorDict) -> PackedBatch:
    """Pack a TensorDict as batch size, device name and packed fields; nested ones row by row."""
    return _pack_fields(batch, serialize_single_tensor)


def _pack_fields(batch: TensorDict, pack: Callable[[torch.Tensor], PackedTensor]) -> PackedBatch:
    packed: dict[str, Any] = {}
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise ProtocolError(
                f"field {key!r} of the batch is a {type(value).__name__}, not a tensor.",
                "What is no tensor belongs into non_tensor_batch or meta_info.",
            )
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            packed[key] = (layout, [pack(row) for row in value.unbind()])
        else:
            packed[key] = pack(value)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), packed


def deserialize_tensordict(arr: PackedBatch) -> TensorDict:
    """Unpack what :func:`serialize_tensordict` packed; on the CPU if its device is not here."""
    batch_size, device, packed = arr
    source: dict[str, Any] = {}
    for key, value in packed.items():
        if len(value) == 3:
            source[key] = deserialize_single_tensor(value)
        elif len(value) == 2 and value[0] in ("jagged", "strided"):
            source[key] = _nested(value[0], [deserialize_single_tensor(row) for row in value[1]])
        else:
            raise ProtocolError(f"field {key!r} is packed in an unknown way.")
    return TensorDict(source, batch_size=batch_size, device=_usable(device))


def _nested(layout: str, rows: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():  # torch calls the strided layout a prototype, once a process
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.as_nested_tensor(rows, layout=getattr(torch, layout))


def _usable(device: Any) -> str | None:
    if device is None:
        return None
    return str(device) if torch.device(device).type == "cpu" or torch.cuda.is_available() else "cpu"


def pack_batch(batch: TensorDict | None, *, out_of_band: bool = False) -> Any:
    """Encode the tensors of a batch by the method that the environment asks for.

    ``out_of_band``: the result goes to pickle protocol 5, which can leave buffers where they are.
    """
    if os.environ.get(METHOD_VARIABLE) == "numpy":
        pack = _serialize_out_of_band if out_of_band else serialize_single_tensor
        return None if batch is None else _pack_fields(batch, pack)
    if batch is not None and len(batch.keys()):
        try:
            batch = batch.contiguous().consolidate()
        except (NotImplementedError, KeyError):  # strided nested, float8: torch.save takes both
            batch = TensorDict(dict(batch.items()), batch_size=batch.batch_size)
    buffer = io.BytesIO()
    torch.save(batch, buffer)
    return buffer.getvalue()


def unpack_batch(packed: Any) -> TensorDict | None:
    """Decode either encoding. Like unpickling itself this trusts its input, as verl does.

    For bytes of unknown origin see :func:`dataproto_audit._protocol.safe.load.load`.
    """
    if packed is None:
        return None
    if isinstance(packed, bytes):
        where = None if torch.cuda.is_available() else "cpu"
        loaded = torch.load(io.BytesIO(packed), weights_only=False, map_location=where)
        return loaded
    return deserialize_tensordict(packed)
