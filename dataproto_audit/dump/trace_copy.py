"""Copies of plain values, so that what is written later is what was there at the boundary."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from torch import Tensor

_PLAIN = frozenset({type(None), str, int, float, bool, bytes})
MAX_DEPTH = 200
"""Nesting beyond which nothing is copied; a trace keeps less."""


def copied(
    value: Any, *, numbers: bool = True, _made: dict[int, Any] | None = None, _depth: int = 0
) -> Any:
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
    if _depth > MAX_DEPTH:
        return value  # of what lies deeper a trace keeps no more than the class
    deeper = _depth + 1
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
            k: v if type(v) in _PLAIN else copied(v, numbers=numbers, _made=made, _depth=deeper)
            for k, v in value.items()
        })  # fmt: skip
        return into
    if kind is list:
        items: list[Any] = []
        made[id(value)] = items
        plain = _PLAIN.issuperset(map(type, value))
        items += (
            value
            if plain
            else [copied(v, numbers=numbers, _made=made, _depth=deeper) for v in value]
        )
        return items
    if kind is tuple:
        made[id(value)] = tuple(
            copied(v, numbers=numbers, _made=made, _depth=deeper) for v in value
        )
        return made[id(value)]
    return set(value) if kind is set else value


def unchanged(old: Any, new: Any) -> bool:
    """True where ``new`` surely is what ``old``, a copy of ours, was made of.

    Both are plain values in dicts, lists and tuples, equal in kind, value and order. Tensors,
    arrays, sets and objects of other classes are never sure: they may have been written to.
    """
    return _same(old, new, set(), 0)


def _same(old: Any, new: Any, seen: set[tuple[int, int]], depth: int) -> bool:
    kind = type(old)
    if kind is not type(new):
        return False
    if kind in _PLAIN:
        return _equal([old], [new])
    if kind not in (dict, list, tuple) or len(old) != len(new) or depth > MAX_DEPTH:
        return False
    pair = (id(old), id(new))
    if pair in seen:  # compared already, or being compared: values that hold themselves end here
        return True
    seen.add(pair)
    if kind is dict:
        if [*old] != [*new] or not _PLAIN.issuperset(map(type, (*old, *new))):
            return False
        old, new = [*old, *old.values()], [*new, *new.values()]
    kinds = [*map(type, old)]
    if kinds != [*map(type, new)]:
        return False
    if _PLAIN.issuperset(kinds):
        return _equal([*old], [*new])
    return all(_same(a, b, seen, depth + 1) for a, b in zip(old, new, strict=True))


def _equal(old: list[Any], new: list[Any]) -> bool:
    """Equal plain values of the same kinds; floats bit by bit: 0.0 is not -0.0, and NaN is NaN."""
    if any(type(value) is float for value in old):
        bits = [array("d", [v for v in side if type(v) is float]) for side in (old, new)]
        if bits[0].tobytes() != bits[1].tobytes():
            return False
        old, new = ([v for v in side if type(v) is not float] for side in (old, new))
    return old == new
