"""Ulysses sequence parallelism: ranks share the tokens of a micro-batch, and swap them for heads.

Outside attention each rank of a group works on its own run of tokens. Ahead of attention every
rank gives away all heads but its own, for all tokens of its own heads; afterwards the swap is
undone. Source: DeepSpeed-Ulysses (arXiv 2309.14509).

Gradients: the loss is computed on every rank of the group from the gathered outputs, so what flows
back into the gathering is cut, not summed; each rank then holds the gradient of its own tokens, and
the sum over ranks is the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the same rows; ``rank`` is this one's place among ``size``."""

    group: dist.ProcessGroup
    rank: int
    size: int


def sequence_group(size: int) -> SequenceGroup | None:
    """The group of this rank, of ``size`` neighbouring ranks; None for 1. Collective.

    ``size`` must divide the number of ranks.
    """
    if size == 1:
        return None
    mine: dist.ProcessGroup | None = None
    rank = dist.get_rank()
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = cast(dist.ProcessGroup, group)
    assert mine is not None
    return SequenceGroup(mine, rank % size, size)


def my_part(length: int, group: SequenceGroup) -> slice:
    """This rank's run of ``length`` tokens, which must be a multiple of the group's size."""
    part = length // group.size
    return slice(group.rank * part, (group.rank + 1) * part)


def heads_for_tokens(x_1HtD: Tensor, group: SequenceGroup) -> Tensor:
    """[1, heads, own tokens, D] -> [1, own heads, tokens, D]. Collective, differentiable.

    The heads must be a multiple of the group's size.
    """
    return cast(Tensor, _Swap.apply(x_1HtD, group, True))  # type: ignore[no-untyped-call]


def tokens_for_heads(x_1hTD: Tensor, group: SequenceGroup) -> Tensor:
    """The inverse of :func:`heads_for_tokens`."""
    return cast(Tensor, _Swap.apply(x_1hTD, group, False))  # type: ignore[no-untyped-call]


def gather_tokens(x_t: Tensor, group: SequenceGroup) -> Tensor:
    """[own tokens, ...] of every rank as [tokens, ...]. Collective; backward keeps the own part."""
    return cast(Tensor, _Gather.apply(x_t, group))  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _swap(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _swap(grads[0], ctx.group, not ctx.to_heads), None, None


def _swap(x: Tensor, group: SequenceGroup, to_heads: bool) -> Tensor:
    """Cut dimension 1 (heads) or 2 (tokens) into parts, send part i to rank i, and join what
    comes along the other one."""
    cut, join = (1, 2) if to_heads else (2, 1)
    sent = torch.stack(x.chunk(group.size, dim=cut)).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group.group)
    return torch.cat(list(got.unbind(0)), dim=join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.length = group, x.shape[0] * group.size
        whole = x.new_empty((ctx.length, *x.shape[1:]))
        dist.all_gather_single(whole, x.contiguous(), group=group.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][my_part(ctx.length, ctx.group)], None
