"""Copies of plain values, so that what is written later is what was there at the boundary.

:class:`Copies` makes those of the meta entries of a step. Nothing is copied twice that surely is
what it was: containers are compared by value, arrays and tensors in host memory bit by bit, and
tensors of another device by their identity and torch's count of writes to them.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PLAIN = frozenset({type(None), str, int, float, bool, bytes})
_TENSORS = (Tensor, torch.nn.Parameter)
"""Classes whose memory is what they hold."""
_NEVER = object()
_SOURCE = "_dataproto_audit_source"
"""Attribute of a host copy: the tensor of another device that it was made of, and its writes."""
MAX_DEPTH = 200
"""Nesting beyond which nothing is copied; a trace keeps less."""


class Copies:
    """Copies of the meta entries at the boundaries of one step, one after the other."""

    def __init__(self, limit: int) -> None:
        """Of tensors and arrays larger than ``limit`` bytes, which a trace leaves out, none."""
        self._limit = limit
        self._held: dict[str, Any] = {}

    def __call__(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of the entries; of one that did not change, the very copy that there is."""
        now = {}
        for name, value in meta.items():
            held = self._held.get(name, _NEVER)
            now[name] = held if unchanged(held, value) else copied(value, limit=self._limit)
        self._held = {**self._held, **now}
        return now


def copied(
    value: Any,
    *,
    limit: int | None = None,
    _made: dict[int, Any] | None = None,
    _depth: int = 0,
) -> Any:
    """``value`` with its own dicts, lists, tuples, sets, arrays, and tensors as host copies.

    Tensors and arrays of more than ``limit`` bytes and objects of other classes stay references:
    of those a trace keeps no more than the class. What holds itself is copied as such.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict and _PLAIN.issuperset(map(type, value.values())):
        return value.copy()  # most of what is told: numbers by name
    made = {} if _made is None else _made
    if id(value) in made:
        return made[id(value)]
    if _depth > MAX_DEPTH:
        return value  # of what lies deeper a trace keeps no more than the class
    deeper = _depth + 1
    if isinstance(value, Tensor):
        made[id(value)] = value if _larger(value.numel() * value.element_size(), limit) \
            else _on_host(value)  # fmt: skip
        return made[id(value)]
    if kind is np.ndarray:
        if _larger(value.nbytes, limit):
            return value
        made[id(value)] = own = value.copy()
        if value.dtype == object:
            flat = own.reshape(-1)
            for place, item in enumerate(value.flat):
                if type(item) not in _PLAIN:
                    flat[place] = copied(item, limit=limit, _made=made, _depth=deeper)
        return own
    if kind is dict:
        into: dict[Any, Any] = {}
        made[id(value)] = into
        into.update({
            k: v if type(v) in _PLAIN else copied(v, limit=limit, _made=made, _depth=deeper)
            for k, v in value.items()
        })  # fmt: skip
        return into
    if kind is list:
        items: list[Any] = []
        made[id(value)] = items
        plain = _PLAIN.issuperset(map(type, value))
        items += (
            value if plain else [copied(v, limit=limit, _made=made, _depth=deeper) for v in value]
        )
        return items
    if kind is tuple:
        made[id(value)] = tuple(copied(v, limit=limit, _made=made, _depth=deeper) for v in value)
        return made[id(value)]
    return set(value) if kind is set else value


def _larger(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit


def _on_host(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    if held.device.type == "cpu":
        return held.clone()
    made = held.clone() if held.device.type == "meta" else held.to("cpu")
    setattr(made, _SOURCE, (weakref.ref(tensor), _writes(tensor)))
    return made


def _writes(tensor: Tensor) -> int | None:
    """How often torch wrote to the tensor's memory; None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def unchanged(old: Any, new: Any) -> bool:
    """True where ``new`` surely is what ``old``, a copy of ours, was made of.

    Both are plain values, arrays and tensors in dicts, lists and tuples, equal in kind, value (bit
    by bit) and order. Sets, objects of other classes, and tensors whose memory is not simply laid
    out are never sure: they may have been written to.
    """
    return _same(old, new, set(), 0)


def _same(old: Any, new: Any, seen: set[tuple[int, int]], depth: int) -> bool:
    kind = type(old)
    if kind is Tensor and type(new) in _TENSORS:
        return _same_tensor(old, new)
    if kind is not type(new):
        return False
    if kind in _PLAIN:
        return _equal([old], [new])
    objects = kind is np.ndarray and old.dtype == new.dtype == object
    if kind is np.ndarray and not objects:
        return _same_array(old, new)
    if (kind not in (dict, list, tuple) and not objects) or depth > MAX_DEPTH:
        return False
    if (old is new or old.shape != new.shape) if objects else len(old) != len(new):
        return False
    pair = (id(old), id(new))
    if pair in seen:  # compared already, or being compared: values that hold themselves end here
        return True
    seen.add(pair)
    if objects:
        old, new = [*old.flat], [*new.flat]
    elif kind is dict:
        if [*old] != [*new] or not _PLAIN.issuperset(map(type, (*old, *new))):
            return False
        old, new = [*old, *old.values()], [*new, *new.values()]
    kinds = [*map(type, old)]
    if kinds != [*map(type, new)]:
        return False
    if _PLAIN.issuperset(kinds):
        return _equal([*old], [*new])
    return all(_same(a, b, seen, depth + 1) for a, b in zip(old, new, strict=True))


def _same_tensor(old: Tensor, new: Tensor) -> bool:
    if old is new or old.dtype != new.dtype or old.shape != new.shape:
        return False  # the very tensor is none of our copies
    if new.device.type != "cpu":
        source, writes = getattr(old, _SOURCE, (lambda: None, None))
        return source() is new and writes is not None and writes == _writes(new)
    laid_out = new.layout == torch.strided and not (new.is_nested or new.is_quantized)
    if old.device.type != "cpu" or not laid_out:
        return False
    return bool(torch.equal(_bits(old), _bits(new)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _same_array(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old is new or old.dtype != new.dtype or old.shape != new.shape or old.dtype.hasobject:
        return False  # the very array is none of our copies
    return not old.nbytes or np.array_equal(_bytes(old), _bytes(new))


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _equal(old: list[Any], new: list[Any]) -> bool:
    """Equal plain values of the same kinds; floats bit by bit: 0.0 is not -0.0, and NaN is NaN."""
    if any(type(value) is float for value in old):
        bits = [array("d", [v for v in side if type(v) is float]) for side in (old, new)]
        if bits[0].tobytes() != bits[1].tobytes():
            return False
        old, new = ([v for v in side if type(v) is not float] for side in (old, new))
    return old == new
