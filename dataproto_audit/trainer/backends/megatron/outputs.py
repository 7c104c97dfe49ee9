"""Log-probs and entropies from an output layer that is cut along the vocabulary.

No rank sees the whole vocabulary: maxima and sums are reduced over the tensor-parallel ranks.
Suffixes: N scored tokens, H hidden size, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dataproto_audit.trainer.backends.fused import CHUNK_ELEMENTS

Scores = tuple[Tensor, Tensor | None]


def scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    vocabulary: int,
    group: Any,
    temperature: float,
    entropy: bool,
    fused: bool = False,
    summed: bool = False,
) -> Scores:
    """Log-prob of each label and, if asked for, the entropy of its distribution; f32[N].

    ``vocabulary`` is its true size; rows of ``weight_VH`` above it are padding and left out.
    ``fused`` runs a few tokens at a time and computes their logits again in backward, so that
    ``[N, V]`` never exists. ``summed``: the gradient of ``hidden_NH`` is summed over the ranks
    already (sequence parallelism does). All ranks of ``group`` get the same values.
    """
    if not summed:
        hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH)
    of = partial(
        _part, vocabulary=vocabulary, group=group, temperature=temperature, entropy=entropy
    )
    size = max(1, CHUNK_ELEMENTS // weight_VH.shape[0])
    if not fused:
        return of(hidden_NH, weight_VH, labels_N)
    parts = [
        _again(of, hidden, weight_VH, labels)
        for hidden, labels in zip(
            torch.split(hidden_NH, size), torch.split(labels_N, size), strict=True
        )
    ]
    chosen = torch.cat([part[0] for part in parts])
    spreads = [part[1] for part in parts if part[1] is not None]
    return chosen, torch.cat(spreads) if spreads else None


def _again(of: Any, *tensors: Tensor) -> Scores:
    """``of(*tensors)`` without keeping what it computes on the way."""
    kept: Scores = checkpoint(of, *tensors, use_reentrant=False, preserve_rng_state=False)
    return kept


def _part(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    vocabulary: int,
    group: Any,
    temperature: float,
    entropy: bool,
) -> Scores:
    logits_NV = F.linear(hidden_NH, weight_VH).float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    size = logits_NV.shape[-1]
    first = group.rank() * size
    if first + size > vocabulary:
        column = torch.arange(first, first + size, device=logits_NV.device)
        lowest = torch.finfo(logits_NV.dtype).min
        logits_NV = logits_NV.masked_fill(column >= vocabulary, lowest)
    highest = logits_NV.detach().amax(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    logits_NV = logits_NV - highest
    powers_NV = logits_NV.exp()
    total_N = _sum(powers_NV.sum(-1))
    log_total_N = total_N.log()
    mine = (labels_N >= first) & (labels_N < first + size)
    at = (labels_N - first).clamp(0, size - 1)
    chosen_N = logits_NV.gather(-1, at[:, None]).squeeze(-1)
    chosen_N = _sum(torch.where(mine, chosen_N, 0.0)) - log_total_N
    if not entropy:
        return chosen_N, None
    # A padded column has power 0 and the lowest logit: their product is -0, not NaN.
    mean_N = _sum((powers_NV * logits_NV.clamp(min=-1e30)).sum(-1)) / total_N
    return chosen_N, log_total_N - mean_N


def _sum(part: Tensor) -> Tensor:
    """The sum over tensor-parallel ranks; each rank's part gets the whole gradient."""
    whole: Tensor = reduce_from_tensor_model_parallel_region(part)
    return whole
