"""Modules given to megatron-core's layers where its own ones need Transformer Engine.

Suffixes: S sequence on this rank, B rows, H heads, D head size.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32.

    Megatron's own torch norm refuses sequence parallelism (torch_norm.py:32). The mark on the
    weight makes ``finalize_model_grads`` sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class ValueHead(nn.Module):
    """One number from each hidden state; whole on every tensor-parallel rank, which all compute
    the same from the whole sequence, so that its gradient needs no sum over them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        size = config.hidden_size
        made = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.zeros(1, size, **made))
        self.bias = nn.Parameter(torch.zeros(1, **made))

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """f32[N]."""
        return F.linear(hidden_NH, self.weight, self.bias).squeeze(-1).float()


class CoreAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Causal attention by torch's ``scaled_dot_product_attention``, with grouped heads.

    Megatron's own local attention refuses context parallelism (dot_product_attention.py:58).
    Here keys and values are gathered over the context-parallel ranks and masked by position, so
    memory for them and for the mask grows with the whole sequence. No dropout. Rows start at
    position 0 and are padded on the right, so causality alone is the mask; rows on one line
    ("thd") are attended one by one.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[S, B, H, D] each -> [S, B, H * D]."""
        if packed_seq_params is not None:
            return self._by_row(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        ranks, mask = self.group.size(), None
        if ranks > 1:
            here = positions(query.shape[0], ranks, self.group.rank(), query.device)
            every = [positions(query.shape[0], ranks, r, query.device) for r in range(ranks)]
            key, value = (gather(x, self.group) for x in (key, value))
            mask = torch.cat(every)[None, :] <= here[:, None]
        return self._attend(query, key, value, mask)

    def _by_row(self, query: Tensor, key: Tensor, value: Tensor, ends: list[int]) -> Tensor:
        """[T, H, D] each -> [T, H * D]; rows end at ``ends``, of which the first is 0."""
        assert self.group.size() == 1, "rows on a line are not cut over context-parallel ranks"
        sizes = [end - start for start, end in itertools.pairwise(ends)]
        parts = [torch.split(x.unsqueeze(1), sizes) for x in (query, key, value)]
        rows = zip(*parts, strict=True)
        return torch.cat([self._attend(q, k, v, None).squeeze(1) for q, k, v in rows])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()


def positions(length: int, ranks: int, rank: int, device: Any = None) -> Tensor:
    """Positions of the ``length`` tokens that context-parallel ``rank`` of ``ranks`` holds.

    The sequence is cut into 2 * ranks runs and a rank gets one from the front and its mirror
    image, so that all have as much to attend to (megatron's zigzag order).
    """
    half = length // 2
    run = torch.arange(half, device=device)
    return torch.cat([rank * half + run, (2 * ranks - 1 - rank) * half + run])


def gather(part: Tensor, group: Any) -> Tensor:
    """The ranks' parts joined along dimension 0; the gradient of a part is the sum over ranks."""
    whole: Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]  # torch's
    return whole


class _Gather(torch.autograd.Function):
    """See :func:`gather`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        ranks = ctx.group.size()
        part = grad.new_empty((grad.shape[0] // ranks, *grad.shape[1:]))
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None
