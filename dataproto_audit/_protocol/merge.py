"""Merging batches: union adds columns, concat adds rows, both check before they change anything."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from dataproto_audit._protocol.errors import factor_note, missing_field
from dataproto_audit._protocol.index import Arrays
from dataproto_audit._protocol.nested import nested_concat, nested_keys, sizes_of
from dataproto_audit._protocol.same import (
    describe_array_difference,
    describe_difference,
    same,
    same_tensor,
)
from dataproto_audit.codes import ProtocolError


def check_union_rows(left: int, right: int) -> None:
    """Refuse a union of different row counts, naming the missing repetition if one explains it."""
    if left != right:
        note = factor_note(left, right, left_name="the left side", right_name="the right side")
        raise ProtocolError(
            f"a union needs the same rows on both sides: {left} on the left, {right} on the right.",
            note or "Neither is a multiple of the other: rows were lost or added on one side.",
        )


def check_union_tensors(left: TensorDict, right: TensorDict) -> None:
    """Refuse shared fields whose values differ. Nothing is changed."""
    for key, theirs in right.items():
        ours = left.get(key, None)
        if ours is not None and not same_tensor(ours, theirs):
            raise ProtocolError(
                f"{key} in tensor_dict1 and tensor_dict2 are not the same object: "
                f"{describe_difference(ours, theirs)}.",
                "Drop or rename the field on one side.",
            )


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the fields of the second to the first, in place; shared fields must be equal.

    A NaN equals a NaN in the same cell, for tensors as for arrays.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        check_union_rows(tensor_dict1.batch_size.numel(), tensor_dict2.batch_size.numel())
        raise ProtocolError(
            "Two tensor dict must have identical batch size: "
            f"{list(tensor_dict1.batch_size)} against {list(tensor_dict2.batch_size)}."
        )
    check_union_tensors(tensor_dict1, tensor_dict2)
    return _add_tensors(tensor_dict1, tensor_dict2)


def _add_tensors(left: TensorDict, right: TensorDict) -> TensorDict:
    have = set(left.keys())
    for key, value in right.items():
        if key not in have:
            left[key] = value
    return left


def check_union_arrays(left: Arrays, right: Arrays) -> None:
    """Refuse shared non-tensor fields whose entries differ. Nothing is changed."""
    for key, theirs in right.items():
        if key not in left:
            continue
        ours = left[key]
        for side, value in (("left", ours), ("right", theirs)):
            if not isinstance(value, np.ndarray):
                raise ProtocolError(f"`{key}` on the {side} is a {type(value).__name__}, no array.")
        if not same(ours, theirs):
            raise ProtocolError(
                f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object: "
                f"{describe_array_difference(ours, theirs)}.",
                "Drop or rename the field on one side.",
            )


def union_numpy_dict(tensor_dict1: Arrays, tensor_dict2: Arrays) -> Arrays:
    """Add the arrays of the second to the first, in place; shared ones must be equal."""
    check_union_arrays(tensor_dict1, tensor_dict2)
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def check_union_meta(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Refuse shared meta entries whose values differ. Nothing is changed."""
    for key, theirs in right.items():
        if key in left and not same(left[key], theirs):
            raise ProtocolError(
                f"{key} in meta_dict1 and meta_dict2 are not the same object: "
                f"{left[key]!r:.60} against {theirs!r:.60}.",
                "Pop it on one side.",
            )


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of the second to the first, in place; shared ones must be equal."""
    check_union_meta(dict1, dict2)
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """``[{a: 1}, {a: 2}]`` to ``{a: [1, 2]}``. Later keys must occur in the first dictionary."""
    output: dict[str, list[Any]] = {key: [] for key in (list_of_dict[0] if list_of_dict else ())}
    for position, data in enumerate(list_of_dict):
        for key, item in data.items():
            if key not in output:
                raise ProtocolError(
                    f"Key {key!r} of part {position} is not present in the first dictionary.",
                    f"The first one has: {', '.join(map(str, output)) or 'none'}.",
                )
            output[key].append(item)
    return output


def concat_batches(parts: Sequence[TensorDict | None]) -> TensorDict | None:
    """Put the rows of several tensor batches under each other. All need the same fields."""
    batches = [part for part in parts if part is not None]
    if not batches:
        return None
    if len(batches) != len(parts):
        empty = [i for i, part in enumerate(parts) if part is None]
        raise ProtocolError(f"parts {empty} of a concat have no tensors, the others have.")
    _check_same_fields("tensor batch", [set(batch.keys()) for batch in batches])
    nested = nested_keys(batches[0])
    try:
        flat = [batch.exclude(*nested) if nested else batch for batch in batches]
        joined: TensorDict = torch.cat(flat, dim=0)
    except RuntimeError:
        _explain_widths(batches)
        raise
    for key in nested:
        joined[key] = nested_concat([batch[key] for batch in batches])
    return joined


def concat_arrays(parts: Sequence[Arrays]) -> Arrays:
    """Put the rows of several non-tensor batches under each other."""
    _check_same_fields("non-tensor batch", [set(part) for part in parts])
    joined = {}
    for key in parts[0]:
        try:
            joined[key] = np.concatenate([part[key] for part in parts], axis=0)
        except ValueError as error:
            shapes = [list(part[key].shape) for part in parts]
            raise ProtocolError(
                f"non-tensor field {key!r} has shapes {shapes} in the parts of a concat.",
                "Only the number of rows may differ.",
            ) from error
    return joined


def _check_same_fields(kind: str, names: Sequence[set[str]]) -> None:
    for position, present in enumerate(names):
        for key in sorted(names[0] ^ present, key=str):
            lacking = position if key in names[0] else 0
            raise missing_field(f"the {kind} of part {lacking} of a concat", key, names[lacking])


def _explain_widths(batches: Sequence[TensorDict]) -> None:
    for key, first in batches[0].items():
        for position, batch in enumerate(batches):
            other = batch[key]
            left, right = sizes_of(first), sizes_of(other)
            if first.is_nested != other.is_nested or left[1:] != right[1:]:
                raise ProtocolError(
                    f"field {key!r} has shape {list(left)} in part 0 and "
                    f"{list(right)} in part {position} of a concat.",
                    "Only the number of rows may differ: pad to one width first.",
                )


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge meta entries: ``metrics`` of all parts become a dict of lists, the rest must agree."""
    merged: dict[str, Any] = {}
    owner: dict[str, int] = {}
    metrics: list[Mapping[str, Any]] = []
    for position, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                if value is not None:
                    metrics.extend(value if isinstance(value, list) else [value])
            elif key not in merged:
                merged[key], owner[key] = value, position
            elif not same(merged[key], value):
                raise ProtocolError(
                    f"Conflicting values for meta_info key '{key}': {merged[key]!r:.60} in part "
                    f"{owner[key]}, {value!r:.60} in part {position}.",
                    "Parts of one batch carry the same settings; put what differs into metrics.",
                )
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged


def union_parts(
    left: tuple[TensorDict | None, Arrays, dict[str, Any]],
    right: tuple[TensorDict | None, Arrays, dict[str, Any]],
    rows: tuple[int, int],
) -> TensorDict | None:
    """Add tensors, arrays and meta of the right side to the left one, in place.

    All three are checked first. Returns the tensors, which are the right side's if the left has
    none. A side without any column has no rows that could disagree.
    """
    has_rows = [side[0] is not None or bool(side[1]) for side in (left, right)]
    if all(has_rows):
        check_union_rows(*rows)
    batch, theirs = left[0], right[0]
    if batch is not None and theirs is not None:
        check_union_tensors(batch, theirs)
    check_union_arrays(left[1], right[1])
    check_union_meta(left[2], right[2])
    left[1].update(right[1])
    left[2].update(right[2])
    if batch is None or theirs is None:
        return theirs if batch is None else batch
    return _add_tensors(batch, theirs)
