"""Read the pickle of a saved batch without running anything that the file supplies.

A pickle names callables and the arguments to call them with, and it may set the state of whatever
it made. So neither names nor states of the file reach real classes: every allowed name stands for
one of the inert stand-ins below, which only keep and validate, and :func:`_resolve` turns the
finished tree into fresh plain objects. numpy's own ``dtype`` and ``ndarray`` states are not used
either: they trust flags and lengths in the file and read outside their buffers when those lie.
Tensors inside come from ``torch.load(weights_only=True)``.

Not covered: a small file can still ask for much memory or time. Open files of unknown origin in a
process with limits.
"""

import io
import math
import pickle
import pickletools
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from dataproto_audit._protocol.nested import nested_keys
from dataproto_audit._protocol.wire import decode_consolidated, deserialize_tensordict

PROTO_NAMES = {("verl.protocol", "DataProto"), ("dataproto_audit.protocol", "DataProto")}


class RefusedError(pickle.UnpicklingError):
    """The pickle asks for a name or an operation that saved batches do not need."""


class _Inert:
    """Base of the stand-ins: no attributes besides its slots, no state from the file."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"a state for {type(self).__name__.strip('_')}")


class _Name(_Inert):
    """An allowed global: calling it calls our own function; without one it is only a mark."""

    __slots__ = ("_function", "_name")

    def __init__(self, name: str, function: Callable[..., Any] | None = None) -> None:
        self._name = name
        self._function = function

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            raise RefusedError(f"a call of {self._name}")
        return self._function(*args)


class _Boxed(_Inert):
    """A finished value that the file must not touch any more."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Dtype(_Inert):
    """A numpy dtype: plain numbers, text, bytes or object; byte order is all its state may say."""

    __slots__ = ("value",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biufcSUO]\d{1,6}", code):
            raise RefusedError(f"the numpy dtype {code!r}")
        self.value = np.dtype(code)
        if not self.value.itemsize:  # any shape would fit into no bytes
            raise RefusedError(f"the numpy dtype {code!r}")

    def __setstate__(self, state: Any) -> None:
        if state[2:5] != (None, None, None):
            raise RefusedError("a structured numpy dtype")
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class _Array(_Inert):
    """A numpy array whose shape, dtype and content arrive as state."""

    __slots__ = ("content", "dtype", "fortran", "shape")

    def __init__(self, *_: Any) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.dtype = np.dtype(object)
        self.fortran = False
        self.content: Any = []

    def __setstate__(self, state: Any) -> None:
        shape, dtype, fortran, content = state[-4:]
        self.shape, self.dtype = _shape(shape), _numpy_dtype(dtype)
        self.fortran, self.content = bool(fortran), content
        items = len(content) if isinstance(content, list) else -1
        if self.dtype.kind == "O" and items != math.prod(self.shape):
            raise ValueError("an object array does not have the length of its shape")


class _Proto:
    """The saved DataProto: keeps the state that the file gives it."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _shape(shape: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    return tuple(shape)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if type(dtype) is not _Dtype:
        raise RefusedError("an array without a dtype")
    return dtype.value


def _from_bytes(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> np.ndarray:
    if dtype.kind == "O" or not isinstance(data, (bytes, bytearray)):
        raise RefusedError(f"an array of {dtype} given as {type(data).__name__}")
    count = math.prod(shape)
    if len(data) != count * dtype.itemsize:
        raise ValueError("an array's bytes do not have the length of its shape")
    flat = np.frombuffer(bytearray(data), dtype=dtype) if data else np.empty(count, dtype)
    return flat.reshape(shape, order=order)


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Boxed:
    if order not in ("C", "F"):
        raise RefusedError(f"an array in order {order!r}")
    return _Boxed(_from_bytes(data, _numpy_dtype(dtype), _shape(shape), order))


def _scalar(dtype: Any, data: Any) -> _Boxed:
    return _Boxed(_from_bytes(data, _numpy_dtype(dtype), (1,), "C")[0])


def _storage(data: Any) -> _Boxed:
    with warnings.catch_warnings():  # torch warns about its own old storage classes
        warnings.simplefilter("ignore")
        loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    if not isinstance(loaded, torch.storage.TypedStorage):
        raise RefusedError(f"a {type(loaded).__name__} where a storage belongs")
    return _Boxed(loaded)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Boxed:
    if type(storage) is not _Boxed or not isinstance(storage.value, torch.storage.TypedStorage):
        raise RefusedError("a tensor without a storage")
    size, stride = _shape(size), _shape(stride)
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    raw, dtype = storage.value._untyped_storage, storage.value.dtype
    if math.prod(size) and not 0 <= offset <= raw.nbytes() // dtype.itemsize - 1 - last:
        raise ValueError("a tensor reaches outside its storage")
    flat = torch.empty(0, dtype=dtype)
    return _Boxed(flat.set_(raw, offset if math.prod(size) else 0, size, stride))


def _device(*_: Any) -> _Boxed:
    return _Boxed(torch.device("cpu"))


def _bytearray(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes):  # a number would ask for that many bytes
        raise RefusedError("a bytearray that is not made of bytes")
    return bytearray(data)


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Dtype,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): lambda sizes=(): _Boxed(torch.Size(_shape(sizes))),
    ("torch", "device"): _device,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
}
for _core in ("core", "_core"):  # numpy 1 and numpy 2
    _CALLS[(f"numpy.{_core}.multiarray", "_reconstruct")] = _Array
    _CALLS[(f"numpy.{_core}.multiarray", "scalar")] = _scalar
    _CALLS[(f"numpy.{_core}.numeric", "_frombuffer")] = _frombuffer
_FOREIGN_OPCODES = {"EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ", "NEWOBJ_EX"}
_MARKS = {("numpy", "ndarray")} | {
    ("builtins", name) for name in ("list", "dict", "int", "float", "set")
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = (module, name)
        if path in PROTO_NAMES:
            return _Proto
        if path in _CALLS:
            return _Name(name, _CALLS[path])
        if path in _MARKS:
            return _Name(name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return _Boxed(getattr(torch, name))
        raise RefusedError(f"{module}.{name}")


def _check_opcodes(data: bytes) -> None:
    """Look at the opcodes before they run: no extensions, no memo slots by the gigabyte."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FOREIGN_OPCODES:
            raise RefusedError(f"the opcode {opcode.name}")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ValueError("a memo slot beyond the length of the file")


def read_state(data: bytes) -> tuple[Any, Any, Any]:
    """Read (packed batch, non-tensor batch, meta) of one saved batch; nothing is executed.

    Errors: :class:`RefusedError` for a name off the list, anything else for a broken file.
    """
    _check_opcodes(data)
    proto = _Reader(io.BytesIO(data)).load()
    if type(proto) is not _Proto:
        raise RefusedError(f"a {type(proto).__name__.strip('_')} where a DataProto belongs")
    packed, arrays, meta = _resolve(proto.state, {})
    return packed, arrays, meta


def _resolve(value: Any, done: dict[int, Any]) -> Any:
    """Rebuild a tree of plain containers with every stand-in replaced by its value."""
    kind = type(value)
    if kind is _Boxed or kind is _Dtype:
        return value.value
    if kind not in (list, dict, tuple, set, frozenset, OrderedDict, _Array):
        if isinstance(value, (_Inert, _Proto)):
            raise RefusedError(f"a bare {kind.__name__.strip('_')}")
        return value
    if id(value) in done:
        return done[id(value)]
    fresh: Any
    if kind is _Array:
        if value.dtype.kind != "O":
            order = "F" if value.fortran else "C"
            fresh = _from_bytes(value.content, value.dtype, value.shape, order)
            done[id(value)] = fresh
            return fresh
        flat = np.empty(math.prod(value.shape), dtype=object)
        fresh = done[id(value)] = flat.reshape(value.shape)
        for place, item in enumerate(value.content):
            flat[place] = _resolve(item, done)
        return fresh
    if kind is list:
        fresh = done[id(value)] = []
        fresh.extend(_resolve(item, done) for item in value)
        return fresh
    if kind is dict or kind is OrderedDict:
        fresh = done[id(value)] = kind()
        for key, item in dict.items(value):  # the file may shadow the attribute
            fresh[_resolve(key, done)] = _resolve(item, done)
        return fresh
    fresh = done[id(value)] = kind(_resolve(item, done) for item in value)
    return fresh


class _TensorDictMark:
    """Stands for the class TensorDict inside a ``torch.save`` archive."""


def _decode_made(cls: Any, state: Any) -> TensorDict:
    if cls is not _TensorDictMark:
        raise RefusedError(f"a {cls!r} where a TensorDict belongs")
    return TensorDict(state["_tensordict"], batch_size=state["_batch_size"])


def unpack_untrusted(packed: Any) -> TensorDict | None:
    """Decode the tensors of a saved batch, in either encoding, executing nothing of the file."""
    if packed is None:
        return None
    if not isinstance(packed, bytes):
        return deserialize_tensordict(packed)
    prefix = "tensordict._reductions."
    allowed: list[Any] = [
        (decode_consolidated, prefix + "_rebuild_tensordict_files_consolidated"),
        (_decode_made, prefix + "_make_td"),
        (_TensorDictMark, "tensordict._td.TensorDict"),
    ]
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(io.BytesIO(packed), weights_only=True, map_location="cpu")
    if loaded is None:
        return None
    if not isinstance(loaded, TensorDict):
        raise RefusedError(f"a {type(loaded).__name__} where a TensorDict belongs")
    for key in nested_keys(loaded):
        _check_offsets(loaded[key])
    return loaded


def _check_offsets(field: Any) -> None:
    """Refuse a jagged field whose rows reach outside its values: kernels do not look."""
    if field.layout is not torch.jagged:
        return
    offsets = field.offsets()
    starts, ends = offsets[:-1], offsets[1:]
    lengths = field.lengths()
    if lengths is not None:
        ends = starts + lengths
    inside = (starts >= 0) & (starts <= ends) & (ends <= field.values().shape[0])
    if not bool(inside.all()):
        raise ValueError("a jagged field reaches outside its values")
