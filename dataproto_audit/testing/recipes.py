"""Tiny batches and the JSON operations that turn a healthy one into that of a public bug report.

A case file names a base batch and a list of operations, so a whole bug fits on one line. This is an
interpreter of that language: it builds arrays and runs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataproto_audit.codes import UsageError
from dataproto_audit.testing.recipe_bases import (
    BASES,
    Recipe,
    group_advantages,
    listed,
    on_last,
    position_ids,
)


def cook(base: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The batch that ``operations`` make of the base named ``base``.

    Raises :class:`UsageError` for a base or operation that is not known, and for one that does not
    fit the batch.
    """
    if base not in BASES:
        raise UsageError("DPA857", f"unknown base batch {base!r}.", f"Known: {', '.join(BASES)}.")
    recipe = BASES[base]()
    for operation in operations:
        kind = operation.get("op")
        if kind not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise UsageError("DPA857", f"unknown operation {kind!r}.", f"Known: {known}.")
        try:
            OPERATIONS[str(kind)](recipe, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise UsageError(
                "DPA857",
                f"the operation {dict(operation)} does not fit: {error}.",
                "Name a field of the batch and cells that it has.",
            ) from error
    return recipe.batch()


# -- operations ------------------------------------------------------------------------------------

Operation = Callable[[Recipe, Mapping[str, Any]], None]
OPERATIONS: dict[str, Operation] = {}
NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def _operation(name: str) -> Callable[[Operation], Operation]:
    def register(run: Operation) -> Operation:
        OPERATIONS[name] = run
        return run

    return register


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def _place(at: Any) -> Any:
    """Indices from JSON: numbers, and slices as text."""
    if isinstance(at, list):
        return tuple(_place(part) for part in at)
    if isinstance(at, str):
        return slice(*(int(part) if part else None for part in at.split(":")))
    return at


def _fields(recipe: Recipe, op: Mapping[str, Any]) -> list[str]:
    named = op["f"]
    if named == "*":
        return list(recipe.tensors)
    return list(named) if isinstance(named, list) else [named]


@_operation("set")
def _set(recipe: Recipe, op: Mapping[str, Any]) -> None:
    value, old = np.asarray(_number(op["v"])), recipe.tensors[op["f"]]
    new = old.astype(np.float64 if value.dtype.kind == "f" else old.dtype)
    new[_place(op["at"])] = value
    recipe.tensors[op["f"]] = new


def _arithmetic(combine: Callable[[Any, Any], Any]) -> Operation:
    def run(recipe: Recipe, op: Mapping[str, Any]) -> None:
        new = recipe.tensors[op["f"]].astype(np.float64)
        at = _place(op["at"])
        new[at] = combine(new[at], np.asarray(_number(op["v"])))
        recipe.tensors[op["f"]] = new

    return run


_operation("add")(_arithmetic(np.add))
_operation("mul")(_arithmetic(np.multiply))


@_operation("replace")
def _replace(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["f"]] = np.array(_number(op["v"]), dtype=op.get("dtype"))


@_operation("zeros")
def _zeros(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["f"]] = np.zeros(op["shape"], op.get("dtype", "int64"))


@_operation("del")
def _delete(recipe: Recipe, op: Mapping[str, Any]) -> None:
    for name in _fields(recipe, op):
        recipe.tensors.pop(name, None)
        recipe.objects.pop(name, None)


@_operation("copy")
def _copy(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["dst"]] = recipe.tensors[op["src"]].copy()


@_operation("take")
def _take(recipe: Recipe, op: Mapping[str, Any]) -> None:
    """Rows gathered anew: a permutation, a selection or repeats."""
    for name in _fields(recipe, op):
        recipe.tensors[name] = recipe.tensors[name][op["idx"]]
    for name in list(recipe.objects) if op["f"] == "*" else op.get("nt", []):
        recipe.objects[name] = recipe.objects[name][op["idx"]]


@_operation("take_nt")
def _take_objects(recipe: Recipe, op: Mapping[str, Any]) -> None:
    for name in op["k"]:
        recipe.objects[name] = recipe.objects[name][op["idx"]]


@_operation("shift")
def _shift(recipe: Recipe, op: Mapping[str, Any]) -> None:
    """Columns moved to the right (negative: to the left)."""
    by = op["by"]
    for name in _fields(recipe, op):
        old = recipe.tensors[name]
        new = np.full_like(old, _number(op.get("fill", 0.0)))
        into, source = (slice(max(way, 0), min(way, 0) or None) for way in (by, -by))
        new[:, into] = old[:, source]
        recipe.tensors[name] = new


@_operation("cols")
def _columns(recipe: Recipe, op: Mapping[str, Any]) -> None:
    for name in _fields(recipe, op):
        recipe.tensors[name] = recipe.tensors[name][:, _place(op["at"])]


@_operation("channels")
def _channels(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["f"]] = recipe.tensors[op["f"]][:, _place(op["at"])]


@_operation("cast")
def _cast(recipe: Recipe, op: Mapping[str, Any]) -> None:
    for name in _fields(recipe, op):
        recipe.tensors[name] = recipe.tensors[name].astype(op["dtype"])


@_operation("reshape")
def _reshape(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["f"]] = recipe.tensors[op["f"]].reshape(op["shape"])


@_operation("transpose")
def _transpose(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.tensors[op["f"]] = recipe.tensors[op["f"]].transpose(op["axes"])


@_operation("nt")
def _object_field(recipe: Recipe, op: Mapping[str, Any]) -> None:
    values = op["v"]
    whole = op.get("object1d", True)
    recipe.objects[op["k"]] = listed(*values) if whole else np.array(values, dtype=object)


@_operation("meta")
def _meta(recipe: Recipe, op: Mapping[str, Any]) -> None:
    recipe.meta[op["k"]] = _number(op["v"])


@_operation("concat_rows")
def _concat_rows(recipe: Recipe, op: Mapping[str, Any]) -> None:
    """Rows added at the end: given ones, else copies of row ``src``."""
    source, count = op.get("src", 0), op["n"]
    for name, old in recipe.tensors.items():
        given = op.get("rows", {}).get(name)
        new = old[[source] * count] if given is None else np.array(_number(given))
        recipe.tensors[name] = np.concatenate([old, new])
    for name, old in recipe.objects.items():
        new = listed(*op.get("nt_rows", {}).get(name, [old[source]] * count))
        recipe.objects[name] = np.concatenate([old, new])


def _on_mask(change: Callable[[Any, Mapping[str, Any]], Any]) -> Operation:
    """An operation on the trained tokens of one field."""

    def run(recipe: Recipe, op: Mapping[str, Any]) -> None:
        trained = recipe.tensors["response_mask"] > 0
        new = recipe.tensors[op["f"]].astype(np.float64)
        new[trained] = change(new[trained], op)
        recipe.tensors[op["f"]] = new

    return run


def _temper(log_p: Any, op: Mapping[str, Any]) -> Any:
    """At temperature T, as if all other tokens were one: the logit is divided by T."""
    logit = log_p - np.log1p(-np.exp(log_p))
    return -np.log1p(np.exp(-logit / op["T"]))


_operation("temper")(_on_mask(_temper))
_operation("log_scale")(_on_mask(lambda log_p, op: log_p * op["v"]))
_operation("topp")(_on_mask(lambda log_p, op: np.minimum(log_p - np.log(op["S"]), 0.0)))


@_operation("mask")
def _mask(recipe: Recipe, op: Mapping[str, Any]) -> None:
    old = recipe.tensors[op["f"]]
    recipe.tensors[op["f"]] = np.where(recipe.tensors["response_mask"] > 0, old, 0.0)


@_operation("recompute")
def _recompute(recipe: Recipe, op: Mapping[str, Any]) -> None:
    """A field computed again from the others, as the stage that writes it would."""
    t, what = recipe.tensors, op["what"]
    if what == "response_mask":
        t["response_mask"] = t["attention_mask"][:, -t["responses"].shape[1] :].copy()
    elif what == "position_ids":
        t["position_ids"] = position_ids(t["attention_mask"])
    elif what == "reward_last_valid":
        t["token_level_scores"] = on_last(op["scores"], t["response_mask"])
        t["token_level_rewards"] = t["token_level_scores"].copy()
    elif what in ("advantages", "advantages_stride", "advantages_batch"):
        scores = t["token_level_rewards"].sum(1)
        groups = {
            "advantages": recipe.objects.get(op.get("by", "uid"), np.zeros(0)).tolist(),
            "advantages_stride": [row // recipe.meta["n"] for row in range(len(scores))],
            "advantages_batch": ["all"] * len(scores),
        }[what]
        t["advantages"] = group_advantages(scores, groups, t["response_mask"])
        t["returns"] = t["advantages"].copy()
    else:
        raise KeyError(what)
