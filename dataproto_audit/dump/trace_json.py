"""Typed JSON: Python values as JSON that gives their types back, and executes nothing.

Text, whole numbers, finite floats, booleans, None, lists and mappings with text keys are plain
JSON. Everything else is ``{"$": kind, ...}``; tensors and arrays of numbers are hoisted out, to be
stored as safetensors. What has no form here becomes an :class:`Opaque` that names its class, a
container inside itself among it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit._protocol.safe.errors import Opaque
from dataproto_audit.dump.trace_format import STORABLE, dtype_name, narrowed, widened
from dataproto_audit.storage import shared

MAX_DEPTH = 60
"""Nesting beyond which a value is opaque."""
_NUMBERS = "iufb"
_TEXT = re.compile(r"([<>=|])U(\d{1,10})")


def is_storable(dtype: np.dtype[Any]) -> bool:
    """True for arrays that have a form here; others (dates, bytes, records) are opaque."""
    return dtype.kind in "OU" or (dtype.kind in _NUMBERS and dtype.itemsize <= 8)


class TooLarge(ValueError):
    """A value takes more than its encoder may spend."""


@dataclass
class Encoder:
    """Encodes values; ``tensors`` are what was hoisted, ``opaque`` the classes left out.

    ``limit`` bounds about how many bytes a value may take, counted as often as it is written; more
    is :class:`TooLarge`. 0 is no bound.
    """

    prefix: str = "#"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    limit: int = 0
    _spent: int = 0
    _inside: list[int] = field(default_factory=list)

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """``value`` as JSON."""
        kind = type(value)
        if self.limit:
            self._spend(len(value) if kind in (str, bytes) else 16)
        if value is None or kind in (str, int, bool):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
        if depth > MAX_DEPTH:
            return self._opaque(value)
        if not isinstance(value, (list, tuple, Mapping, np.ndarray)):
            return self._leaf(value, depth + 1)
        if id(value) in self._inside:
            return self._opaque(value, " that holds itself")
        self._inside.append(id(value))
        try:
            return self._container(value, depth + 1)
        finally:
            self._inside.pop()

    def _spend(self, size: int) -> None:
        self._spent += size
        if self.limit and self._spent > self.limit:
            raise TooLarge(f"more than {self.limit} bytes")

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, np.ndarray):
            return self._array(value, depth)
        items = [self(item, depth) for item in value]
        return items if isinstance(value, list) else {"$": "tuple", "v": items}

    def _leaf(self, value: Any, depth: int) -> Any:
        if isinstance(value, (set, frozenset)):
            kind = "set" if isinstance(value, set) else "frozenset"
            return {"$": kind, "v": [self(item, depth) for item in sorted(value, key=repr)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic):
            return self._scalar(value, depth)
        if isinstance(value, (str, int, float)):  # of a class of their own: an enum, numpy's text
            plain = str if isinstance(value, str) else int if isinstance(value, int) else float
            return self(plain(value), depth)
        return self._opaque(value)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        items = list(value.items())
        if all(type(key) is str for key, _ in items) and "$" not in value:
            return {key: self(item, depth) for key, item in items}
        return {"$": "dict", "v": [[self(k, depth), self(v, depth)] for k, v in items]}

    def _tensor(self, value: Tensor) -> Any:
        if value.is_nested or value.is_meta or dtype_name(value.dtype) not in STORABLE:
            return self._opaque(value)
        dense = value.detach()
        dense = dense if dense.layout == torch.strided else dense.to_dense()
        return {"$": "tensor", "v": self.hoisted(dense.cpu()), "dtype": dtype_name(value.dtype)}

    def _array(self, value: NDArray[Any], depth: int) -> Any:
        if value.dtype.kind in _NUMBERS and value.dtype.itemsize <= 8:
            tensor = shared(value)
            return {"$": "array", "v": self.hoisted(tensor), "dtype": value.dtype.name}
        items = [self(item, depth) for item in value.reshape(-1).tolist()]
        kind = value.dtype.str if value.dtype.kind == "U" else "object"
        if value.dtype.kind not in "OU":
            return self._opaque(value)
        return {"$": "objects", "v": items, "shape": list(value.shape), "dtype": kind}

    def _scalar(self, value: np.generic, depth: int) -> Any:
        if value.dtype.kind in _NUMBERS and value.dtype.itemsize <= 8:
            return {"$": "scalar", "v": self(value.item(), depth), "dtype": value.dtype.name}
        return self(value.item(), depth) if value.dtype.kind == "U" else self._opaque(value)

    def hoisted(self, tensor: Tensor) -> str:
        """Take ``tensor`` out and return the key it is stored under."""
        self._spend(tensor.numel() * tensor.element_size())
        key = f"{self.prefix}{len(self.tensors)}"
        self.tensors[key] = narrowed(tensor)
        return key

    def _opaque(self, value: Any, more: str = "") -> Any:
        kind = type(value)
        name = value.name if isinstance(value, Opaque) else f"{kind.__module__}.{kind.__qualname__}"
        name += more
        self.opaque.add(name)
        return {"$": "opaque", "v": name}


@dataclass
class Decoder:
    """The inverse of :class:`Encoder`; ``tensors`` maps keys to hoisted tensors.

    Raises :class:`ValueError` for JSON that the encoder does not write.
    """

    tensors: Mapping[str, Tensor]

    def __call__(self, value: Any) -> Any:
        """The Python value that ``value`` stands for."""
        if isinstance(value, list):
            return [self(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value.get("$")
        if kind is None:
            return {key: self(item) for key, item in value.items()}
        decode = _DECODERS.get(str(kind))
        if decode is None:
            raise ValueError(f"unknown kind of value {kind!r}")
        try:
            return decode(self, value)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a broken value of kind {kind!r}") from error

    def tensor(self, value: Mapping[str, Any]) -> Tensor:
        """A hoisted tensor in its logical kind of number."""
        return widened(self.tensors[value["v"]], str(value["dtype"]))

    def array(self, value: Mapping[str, Any]) -> NDArray[Any]:
        """A hoisted array of numbers."""
        dtype = np.dtype(str(value["dtype"]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"an array of {dtype} is never hoisted")
        stored = self.tensors[value["v"]]
        stored = stored.float() if stored.dtype == torch.bfloat16 else stored
        return stored.numpy().astype(dtype)

    def objects(self, value: Mapping[str, Any]) -> NDArray[Any]:
        """An array of objects or text."""
        items, shape = self(value["v"]), tuple(value["shape"])
        out = np.empty(len(items), dtype=object)
        for row, item in enumerate(items):
            out[row] = item
        dtype = value["dtype"]
        if dtype != "object":
            text = _TEXT.fullmatch(str(dtype))
            if text is None or not all(isinstance(item, str) for item in items):
                raise ValueError(f"an array of {dtype} holds no text")
            width = min(int(text[2]), max(map(len, items), default=1))  # as much as is there
            out = out.astype(f"{text[1]}U{max(width, 1)}")
        return out.reshape(shape)

    def scalar(self, value: Mapping[str, Any]) -> Any:
        """A number of numpy's."""
        dtype = np.dtype(str(value["dtype"]))
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"{dtype} is no kind of number")
        return dtype.type(self(value["v"]))


_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DECODERS: dict[str, Any] = {
    "float": lambda decode, value: _FLOATS[value["v"]],
    "tuple": lambda decode, value: tuple(decode(item) for item in value["v"]),
    "set": lambda decode, value: set(map(decode, value["v"])),
    "frozenset": lambda decode, value: frozenset(map(decode, value["v"])),
    "bytes": lambda decode, value: base64.b64decode(value["v"]),
    "dict": lambda decode, value: {decode(key): decode(item) for key, item in value["v"]},
    "tensor": Decoder.tensor,
    "array": Decoder.array,
    "objects": Decoder.objects,
    "scalar": Decoder.scalar,
    "opaque": lambda decode, value: Opaque(str(value["v"])),
}
