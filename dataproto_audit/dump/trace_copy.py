"""Copies of plain values, so that what is written later is what was there at the boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

_PLAIN = frozenset({type(None), str, int, float, bool, bytes})


def copied(value: Any, *, numbers: bool = True, _made: dict[int, Any] | None = None) -> Any:
    """``value`` with its own dicts, lists, tuples and sets; of ``numbers`` also tensors and arrays.

    Tensors become host copies. Objects of other classes stay references: of those a trace keeps
    no more than the class. Lists and dicts that hold themselves are copied as such.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict and _PLAIN.issuperset(map(type, value.values())):
        return value.copy()  # most of what is told: numbers by name
    made = {} if _made is None else _made
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor):
        if not numbers:
            return value
        held = value.detach()
        made[id(value)] = held.clone() if held.device.type in ("cpu", "meta") else held.to("cpu")
        return made[id(value)]
    if kind is np.ndarray:
        return value.copy() if numbers else value
    if kind is dict:
        into: dict[Any, Any] = {}
        made[id(value)] = into
        into.update({
            k: v if type(v) in _PLAIN else copied(v, numbers=numbers, _made=made)
            for k, v in value.items()
        })  # fmt: skip
        return into
    if kind is list:
        items: list[Any] = []
        made[id(value)] = items
        plain = _PLAIN.issuperset(map(type, value))
        items += value if plain else [copied(v, numbers=numbers, _made=made) for v in value]
        return items
    if kind is tuple:
        return tuple(copied(v, numbers=numbers, _made=made) for v in value)
    return set(value) if kind is set else value
