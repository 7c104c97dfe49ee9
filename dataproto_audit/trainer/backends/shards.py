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
    """Where a piece sits in its tensor: cut along dimension 0, from row ``start``.

    ``replicated`` pieces are the whole tensor on every rank.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    replicated: bool = False


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
    """A payload of ``shards``. Replicated tensors travel from rank 0 alone."""
    arrays = {
        name: to_bits(tensor)
        for name, (tensor, spec) in shards.items()
        if rank == 0 or not spec.replicated
    }
    specs = {name: spec for name, (_, spec) in shards.items()}
    return ShardPayload(rank, world_size, version, arrays, specs, dict(aliases))


def join(payloads: Sequence[ShardPayload], *, aliases: bool = False) -> dict[str, Tensor]:
    """Whole tensors by name from the payloads of all ranks, in any order; copies.

    ``aliases`` adds tied weights under their second names. Raises ``ValueError`` if ranks are
    missing or the payloads were taken at different versions.
    """
    ordered = sorted(payloads, key=lambda payload: payload.rank)
    world = ordered[0].world_size if ordered else 0
    if [payload.rank for payload in ordered] != list(range(world)) or not world:
        raise ValueError(f"pieces of ranks {[p.rank for p in ordered]} of {world} ranks")
    if len({payload.version for payload in ordered}) > 1:
        raise ValueError(f"pieces of versions {[payload.version for payload in ordered]}")
    whole = {}
    for name, spec in ordered[0].specs.items():
        pieces = [payload.arrays[name] for payload in ordered if name in payload.arrays]
        array = pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces, axis=0)
        whole[name] = from_bits(array, spec.dtype).reshape(spec.shape)
    if aliases:
        whole |= {alias: whole[name] for alias, name in ordered[0].aliases.items()}
    return whole


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
    # Words of 8 bytes where rows are made of them: then every piece is, wherever it was cut.
    row, wide = math.prod(bits.shape[1:]) * bits.itemsize, bits.itemsize
    if bits.ndim > 1 and row and row % 8 == 0:
        wide = 8
    words = bits.reshape(-1).view(_WORDS[wide])
    position, total = start * bits.itemsize // wide, 0
    while words.size:
        number, first = divmod(position, _BLOCK)
        block, words = words[: _BLOCK - first], words[_BLOCK - first :]
        multipliers = _multipliers()[first : first + block.size]
        total += (2 * number + 1) * int(block.astype(np.uint64, copy=False) @ multipliers)
        position += block.size
    return total % 2**64


def payload_checksums(payload: ShardPayload) -> dict[str, int]:
    """Checksums of the pieces in one rank's payload, for :func:`add_checksums`."""
    sums = {}
    for name, bits in payload.arrays.items():
        spec = payload.specs[name]
        sums[name] = _sum_of_bits(bits, spec.start * math.prod(spec.shape[1:]))
    return sums


def add_checksums(per_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Checksums of whole tensors from those of their pieces."""
    total: dict[str, int] = {}
    for sums in per_rank:
        for name, value in sums.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total
