"""Sequences end to end: packing, growing over turns, and what attention over them costs.

Axes: ``rows``, ``total`` (prompt and response width), ``tokens`` (attended tokens of all rows).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64, Integer, Shaped
from torch import Tensor

from dataproto_audit.reference.shapes import Mask, Tokens, WideMask, as_bool, checked


@checked
def packed(
    values: Shaped[Tensor, "*channels rows total"], attention_mask: WideMask
) -> Shaped[Tensor, "*channels 1 tokens"]:
    """The attended cells of all rows one after another, as one row.

    Every per-token field of a packed pass has this one token axis, position ids on several
    channels (``[channels, rows, total]``) too.
    """
    on = as_bool(attention_mask).reshape(-1)
    return values.flatten(-2)[..., on].unsqueeze(-2)


@checked
def packed_offsets(attention_mask: WideMask) -> Int64[Tensor, " bounds"]:
    """Where each row of :func:`packed` begins, and the total (``cu_seqlens``)."""
    lengths = as_bool(attention_mask).sum(dim=-1)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@checked
def attention_work(lengths: Integer[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """Pairs of tokens of each row, L^2, in int64 whatever ``lengths`` come in.

    In int32 the square of a length from 46341 on is negative.
    """
    return lengths.long().square()


def first_break(earlier: Sequence[int], later: Sequence[int]) -> int | None:
    """Where the ids of a later turn stop to begin with those of the earlier one; None if they do.

    ``earlier`` is a turn's prompt and response as the engine saw and sampled them, ``later`` the
    next turn's prompt. Text that was decoded and tokenised again breaks this.
    """
    for at, token in enumerate(earlier):
        if at >= len(later) or later[at] != token:
            return at
    return None


@checked
def off_policy_keep(
    advantages: Float[Tensor, "rows 1"],
    old_log_probs: Tokens,
    log_probs: Tokens,
    response_mask: Mask,
    *,
    threshold: float,
) -> Bool[Tensor, "rows 1"]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): rows that stay in the loss.

    A row is left out when its advantage is negative and the mean of old - new over its trained
    tokens is above ``threshold``. One advantage a row, as a column: one of shape ``[rows]`` would
    broadcast to ``[rows, rows]``.
    """
    on = as_bool(response_mask)
    drift = torch.where(on, old_log_probs.double() - log_probs.double(), 0.0).sum(-1, keepdim=True)
    mean = drift / on.sum(dim=-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (mean <= threshold)
