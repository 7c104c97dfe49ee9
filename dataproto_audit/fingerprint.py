"""Fingerprints of rows: 64 bits that tell whether a row is what it was.

Equality of fingerprints is used to say that something changed, so two things must never look
different while they are the same: copies that travelled between processes, integers stored in
another width, NaNs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit import fast
from dataproto_audit.storage import plain_tensor

Hashes = NDArray[np.uint64]

MAX_DEPTH = 12
"""Nesting up to which objects are compared by value; what lies deeper counts as equal."""
_CHUNK = 1 << 17
"""Values hashed at once: the words of a chunk stay in cache."""


def row_hash(array: NDArray[Any]) -> Hashes:
    """A 64-bit fingerprint of every row of ``array``, ``[rows]``.

    Floats count by their exact bits (a NaN equals itself), integers and bools by value whatever
    their width, objects by value as far as :func:`frozen` looks. Equal rows have equal
    fingerprints; two unequal ones collide with a probability of about 2^-64.
    """
    rows = len(array)
    if array.dtype.kind not in "iufb":
        return object_hash(array.tolist())
    flat = array.reshape(rows, -1) if array.size else array.reshape(rows, 0)
    compiled = fast.loops(flat.size)
    if compiled is not None:
        hashes: Hashes = compiled.hash_rows(_unsigned(flat), _multipliers(flat.shape[1]))
        return hashes
    step = max(1, _CHUNK // max(1, flat.shape[1]))
    if rows <= step:
        return _hashed(flat)
    return np.concatenate([_hashed(flat[at : at + step]) for at in range(0, rows, step)])


def row_hashes(arrays: Sequence[NDArray[Any]]) -> list[Hashes]:
    """:func:`row_hash` of each array; small ones of one shape in a single pass."""
    hashes: list[Hashes] = [_NONE] * len(arrays)
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, array in enumerate(arrays):
        small = array.ndim == 2 and array.dtype.kind in "iufb" and 0 < array.size < fast.SMALL
        if small:
            alike.setdefault(array.shape, []).append(place)
        else:
            hashes[place] = row_hash(array)
    for shape, places in alike.items():
        words = np.empty((len(places), *shape), np.uint64)
        for stacked, place in zip(words, places, strict=True):
            stacked[:] = _unsigned(arrays[place])
        for place, hashed in zip(places, _mixed(words), strict=True):
            hashes[place] = hashed
    return hashes


_NONE: Hashes = np.empty(0, np.uint64)


def _hashed(flat: NDArray[Any]) -> Hashes:
    return _mixed(_unsigned(flat).astype(np.uint64))


def _mixed(words: NDArray[np.uint64]) -> Hashes:
    """The fingerprint of each row of words ``[..., width]``, which are overwritten."""
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    out: Hashes = words @ _multipliers(words.shape[-1])
    out += np.uint64(words.shape[-1])
    return out


KEY_FIELDS = ("prompts", "responses")
"""Tensors whose rows, with the uid, make up the identity of a row."""


def row_keys(
    uids: Sequence[Any], parts: Sequence[Hashes], rows: int, *, prompts: Sequence[Any] = ()
) -> tuple[str, ...]:
    """Row keys for people: uid, fingerprint of the :data:`KEY_FIELDS` in ``parts``, occurrence.

    ``prompts`` are the uids of the prompts, for rows that do not carry their own yet: they follow
    from the repeat. Rows whose number does not fit get ``-``.
    """
    if not uids and prompts and rows % len(prompts) == 0:
        uids = [uid for uid in prompts for _ in range(rows // len(prompts))]
    names = [str(uid) for uid in uids] if len(uids) == rows else ["-"] * rows
    if parts and names:
        total = sum(parts[1:], parts[0])
        marks = total.astype(">u8").tobytes().hex("/", 8).split("/")
        names = [f"{name}/{mark}" for name, mark in zip(names, marks, strict=True)]
    if len(set(names)) == len(names):
        return tuple([f"{name}/0" for name in names])
    seen: dict[str, int] = {}
    keys = []
    for name in names:
        seen[name] = occurrence = seen.get(name, -1) + 1
        keys.append(f"{name}/{occurrence}")
    return tuple(keys)


def object_hash(values: Sequence[Any]) -> Hashes:
    """The fingerprint of each object by value, ``[len(values)]``."""
    if set(map(type, values)) <= {str}:
        return np.fromiter(map(hash, values), np.int64, len(values)).view(np.uint64)
    return np.fromiter((hash(frozen(v)) for v in values), np.int64, len(values)).view(np.uint64)


_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def _unsigned(values: NDArray[Any]) -> NDArray[Any]:
    """Each value as an unsigned word: integers by value, floats by their bits."""
    if values.dtype.kind != "f":
        return values.astype(np.int64, copy=False).view(np.uint64)
    exact = np.ascontiguousarray(values, np.float64 if values.dtype.itemsize > 8 else None)
    return exact.view(_UNSIGNED[exact.dtype.itemsize])


_MULTIPLIERS: dict[int, NDArray[np.uint64]] = {}


def _multipliers(width: int) -> NDArray[np.uint64]:
    found = _MULTIPLIERS.get(width)
    if found is None:
        random = np.random.Generator(np.random.PCG64(20_240_517))
        found = random.integers(0, 2**64, width, np.uint64, endpoint=False) | np.uint64(1)
        _MULTIPLIERS[width] = found
    return found


def frozen(value: Any, depth: int = 0) -> Any:
    """A hashable stand-in for one entry of an object array, equal for equal contents.

    Looks into mappings, sequences, sets, arrays, tensors and dataclasses. Any other object stands
    for its class alone, because its copies need not compare equal.
    """
    if value is None or isinstance(value, (str, bytes, int)):
        return value
    if isinstance(value, (float, complex, np.generic)):
        number = value.item() if isinstance(value, np.generic) else value
        return "nan" if number != number else number
    if depth > MAX_DEPTH:
        return "deep"
    if isinstance(value, Mapping):
        items = [(str(key), frozen(item, depth + 1)) for key, item in value.items()]
        return tuple(sorted(items, key=lambda pair: pair[0]))
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(frozen(item, depth + 1) for item in value)
    if isinstance(value, np.ndarray):
        if value.ndim > 1 and value.dtype != object:
            return value.shape, value.tobytes()
        return frozen(value.tolist(), depth + 1)
    if isinstance(value, Tensor):
        return _frozen_tensor(value.detach())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
        return type(value).__qualname__, frozen(dict(fields), depth + 1)
    return type(value).__qualname__


def _frozen_tensor(tensor: Tensor) -> Any:
    if tensor.is_nested:
        return tuple(map(_frozen_tensor, tensor.unbind()))
    if tensor.is_meta:
        return tuple(tensor.shape), "no data"
    flat = plain_tensor(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
