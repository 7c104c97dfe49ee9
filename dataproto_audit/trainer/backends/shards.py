"""Weights in pieces: what a rank holds of each tensor, how pieces are joined, and checksums.

A rank exports its pieces as numpy arrays without any collective; the receiver (rollout engine,
checkpoint reader, test) joins them. The checksum of a tensor is a sum over its words, so ranks
compute it on their pieces and the driver adds the numbers up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class ShardSpec:
    """Where a piece sits in its tensor: cut along dimension ``dim``, from position ``start`` on it.

    ``replicated`` pieces are the whole tensor on every rank. ``copy``: another rank holds the same
    piece and sends it. A piece cut along dimension 0 may come with that dimension in two,
    ``[groups, rows, ...]`` for rows that lie apart in memory.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    replicated: bool = False
    dim: int = 0
    copy: bool = False


@dataclass(frozen=True)
class ShardPayload:
    """One rank's pieces, ready to travel: arrays by name, and how to join them.

    ``arrays`` hold bit patterns (bfloat16 as uint16). ``aliases`` name tied weights: alias ->
    name of the tensor that it shares.
    """

    rank: int
    world_size: int
    version: int
    arrays: dict[str, NDArray[Any]]
    specs: dict[str, ShardSpec]
    aliases: dict[str, str] = field(default_factory=dict)


def pack(
    shards: Mapping[str, tuple[Tensor, ShardSpec]],
    *,
    rank: int,
    world_size: int,
    version: int,
    aliases: Mapping[str, str],
) -> ShardPayload:
    """A payload of ``shards``. Replicated tensors travel from rank 0 alone, copies not at all."""
    sent = {
        name: entry
        for name, entry in shards.items()
        if not entry[1].copy and (rank == 0 or not entry[1].replicated)
    }
    arrays = {name: to_bits(tensor) for name, (tensor, _) in sent.items()}
    specs = {name: spec for name, (_, spec) in sent.items()}
    return ShardPayload(rank, world_size, version, arrays, specs, dict(aliases))


def join(payloads: Sequence[ShardPayload], *, aliases: bool = False) -> dict[str, Tensor]:
    """Whole tensors by name from the payloads of all ranks, in any order; copies.

    ``aliases`` adds tied weights under their second names. Raises ``ValueError`` if ranks are
    missing, the payloads were taken at different versions or pieces do not make up a tensor.
    """
    ordered = sorted(payloads, key=lambda payload: payload.rank)
    world = ordered[0].world_size if ordered else 0
    if [payload.rank for payload in ordered] != list(range(world)) or not world:
        raise ValueError(f"pieces of ranks {[p.rank for p in ordered]} of {world} ranks")
    if len({payload.version for payload in ordered}) > 1:
        raise ValueError(f"pieces of versions {[payload.version for payload in ordered]}")
    pieces: dict[str, list[tuple[ShardSpec, NDArray[Any]]]] = {}
    for payload in ordered:
        for name, array in payload.arrays.items():
            pieces.setdefault(name, []).append((payload.specs[name], array))
    whole = {name: _whole(name, parts) for name, parts in pieces.items()}
    if aliases:
        whole |= {alias: whole[name] for alias, name in ordered[0].aliases.items()}
    return whole


def _whole(name: str, parts: list[tuple[ShardSpec, NDArray[Any]]]) -> Tensor:
    spec = parts[0][0]
    parts = sorted(parts, key=lambda part: part[0].start)
    arrays = [_flat_rows(array, spec) for _, array in parts]
    array = arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays, axis=spec.dim)
    if array.size != math.prod(spec.shape):
        raise ValueError(f"{name}: pieces of {array.size} values for shape {spec.shape}")
    return from_bits(array, spec.dtype).reshape(spec.shape)


def _flat_rows(array: NDArray[Any], spec: ShardSpec) -> NDArray[Any]:
    """A piece with as many dimensions as the whole."""
    return array.reshape(-1, *spec.shape[1:]) if array.ndim > len(spec.shape) else array


def fill(piece: Tensor, spec: ShardSpec, whole: Tensor) -> None:
    """Write into ``piece`` (of any precision) the part of ``whole`` that ``spec`` says it is."""
    if spec.replicated or not spec.shape:
        piece.copy_(whole)
    elif spec.dim == 0:
        rows = piece.numel() // max(1, math.prod(spec.shape[1:]))
        piece.copy_(whole.narrow(0, spec.start, rows).reshape(piece.shape))
    else:
        piece.copy_(whole.narrow(spec.dim, spec.start, piece.shape[spec.dim]))


def to_bits(tensor: Tensor) -> NDArray[Any]:
    """A tensor as a numpy array on the CPU; bfloat16 as its 16-bit patterns. May share memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array


def from_bits(array: NDArray[Any], dtype: str) -> Tensor:
    """The inverse of :func:`to_bits`; ``array`` must be writable. Shares memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


_BLOCK = 1 << 16


@functools.cache
def _multipliers() -> NDArray[np.uint64]:
    """A number for each position of a block: odd, so that it keeps every bit of a word."""
    random = np.random.Generator(np.random.PCG64(20_250_711))
    return random.integers(0, 2**64, _BLOCK, np.uint64) | np.uint64(1)


def checksum(tensor: Tensor, *, start: int = 0) -> int:
    """64-bit sum over words of bit pattern times a number drawn from the position.

    ``start`` is the position of the first element in the whole tensor, at the begin of a row: the
    sums of its pieces, modulo 2**64, equal that of the whole. Sensitive to values, positions and
    single bits; not a cryptographic digest.
    """
    return _sum_of_bits(to_bits(tensor), start)


def _sum_of_bits(bits: NDArray[Any], start: int) -> int:
    """:func:`checksum` of the array that :func:`to_bits` makes, in blocks that stay in cache."""
    wide, blocks = _blocks(bits.shape, bits.itemsize, start)
    words, total = bits.reshape(-1).view(wide), 0
    for block, factor, multipliers in blocks:
        total += factor * int(words[block].astype(np.uint64, copy=False) @ multipliers)
    return total % 2**64


@functools.lru_cache(maxsize=4096)  # the weights of a run keep their shapes
def _blocks(
    shape: tuple[int, ...], itemsize: int, start: int
) -> tuple[Any, list[tuple[slice, int, NDArray[np.uint64]]]]:
    """The kind of word that a piece is read as, and its blocks: where, times what."""
    # Words of 8 bytes where rows are made of them: then every piece is, wherever it was cut.
    row = math.prod(shape[1:]) * itemsize
    wide = 8 if len(shape) > 1 and row and row % 8 == 0 else itemsize
    count, position = math.prod(shape) * itemsize // wide, start * itemsize // wide
    blocks, done = [], 0
    while done < count:
        number, first = divmod(position + done, _BLOCK)
        multipliers = _multipliers()[first : first + count - done]
        blocks.append((slice(done, done + len(multipliers)), 2 * number + 1, multipliers))
        done += len(multipliers)
    return _WORDS[wide], blocks


def payload_checksums(payload: ShardPayload) -> dict[str, int]:
    """Checksums of the pieces in one rank's payload, for :func:`add_checksums`."""
    sums = {}
    for name, bits in payload.arrays.items():
        spec = payload.specs[name]
        bits = _flat_rows(bits, spec)
        if spec.dim and bits.shape != spec.shape:
            sums[name] = _sum_of_columns(bits, spec)
        else:
            sums[name] = _sum_of_bits(bits, spec.start * math.prod(spec.shape[1:]))
    return sums


def _sum_of_columns(bits: NDArray[Any], spec: ShardSpec) -> int:
    """The share of a piece cut along a later dimension: the sum over the whole with zeros around.

    A word may hold elements of two pieces; its parts add up, since a word is linear in them.
    """
    around = np.zeros(spec.shape, bits.dtype)
    place = [slice(None)] * bits.ndim
    place[spec.dim] = slice(spec.start, spec.start + bits.shape[spec.dim])
    around[tuple(place)] = bits
    return _sum_of_bits(around, 0)


def add_checksums(per_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Checksums of whole tensors from those of their pieces."""
    total: dict[str, int] = {}
    for sums in per_rank:
        for name, value in sums.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total
