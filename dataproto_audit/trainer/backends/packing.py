"""Rows of a micro-batch laid end to end without padding, and attention that keeps them apart.

Suffix legend: ``_1T`` one line of all attended tokens; ``_BR`` rows x response; ``_N`` scored
tokens; ``_1HTD`` one x heads x tokens x head size.

A line of several rows needs attention that ends at each row. A causal mask over the line, or a
mask of ones as padded code passes it, lets a row see those before it and says nothing. So the
model gets no mask at all here: its attention is replaced by :func:`packed_attention`, which takes
the rows' lengths and raises if anything hands it a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import MicroBatch
from dataproto_audit.trainer.backends.ulysses import (
    SequenceGroup,
    heads_for_tokens,
    tokens_for_heads,
)

ATTENTION = "dataproto_audit_packed"
"""Under this name the attention is known to transformers."""


@dataclass(frozen=True)
class Block:
    """Rows of similar length for one attention call.

    ``gather`` i64[rows, longest] positions on the line, the last one repeated where a row is
    shorter; ``real`` bool[rows, longest] tells the row's own.
    """

    gather: Tensor
    real: Tensor


@dataclass(frozen=True)
class Packed:
    """A micro-batch on one line.

    ``lengths`` of the rows in their order, then of what was added to fill up. ``scored_N`` are
    positions on the line whose output predicts ``labels_N``, which is the response token at
    (``rows_N``, ``columns_N``). ``restarts`` tells of each row whether its positions begin at 0.
    """

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    lengths: tuple[int, ...]
    scored_N: Tensor
    labels_N: Tensor
    rows_N: Tensor
    columns_N: Tensor
    shape: tuple[int, int]
    restarts: tuple[bool, ...]

    @property
    def note(self) -> dict[str, Any]:
        """What the probe of packed rows reads (DPA706)."""
        return {"restarts": list(self.restarts), "mask": "none"}

    def spread(self, values_N: Tensor) -> Tensor:
        """[B, R] with ``values_N`` at the scored tokens and 0 elsewhere; differentiable."""
        out = values_N.new_zeros(self.shape)
        return out.index_put((self.rows_N, self.columns_N), values_N)


@dataclass(frozen=True)
class Rows:
    """What attention needs to know about a line; travels to it as a keyword argument.

    ``ends`` i64[rows + 1] are the rows' borders; ``order`` puts the blocks' tokens back in line.
    """

    lengths: tuple[int, ...]
    blocks: tuple[Block, ...]
    order: Tensor
    ends: Tensor
    group: SequenceGroup | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)


def pack(micro: MicroBatch, *, multiple_of: int = 1, predicted: bool = True) -> Packed:
    """The attended tokens of ``micro`` on one line, filled up to a multiple of ``multiple_of``.

    What fills up is a row of its own that nothing scores. A response token is predicted by the
    attended token before it. Raises DPA851 for a row whose first attended token is in the
    response, since nothing on the line predicts it, unless ``predicted`` is False.
    """
    attended = micro.attention_mask_BT.bool()
    rows, columns = attended.nonzero(as_tuple=True)
    ids, positions = micro.input_ids_BT[attended], micro.position_ids_BT[attended]
    counts = attended.sum(-1)
    starts = counts.cumsum(0) - counts
    full = counts > 0
    restarts = torch.ones_like(full)
    restarts[full] = positions[starts[full]] == 0
    prompt = attended.shape[1] - micro.response_width
    at = (columns >= prompt).nonzero().flatten()
    orphans = (at == starts[rows[at]]).nonzero().flatten()
    if predicted and len(orphans):
        raise UsageError(
            "DPA851",
            f"row {int(rows[at[orphans[0]]])} of a micro-batch has no token before its response, "
            "so nothing predicts the first one.",
            "Give every row a prompt, or set actor_rollout_ref.model.use_remove_padding=false.",
        )
    lengths = [int(count) for count in counts.tolist()]
    missing = -len(ids) % multiple_of
    if missing or not len(ids):
        missing = missing or multiple_of
        ids = F.pad(ids, (0, missing))
        positions = torch.cat([positions, torch.arange(missing, device=positions.device)])
        lengths.append(missing)
    return Packed(
        input_ids_1T=ids[None],
        position_ids_1T=positions[None],
        lengths=tuple(lengths),
        scored_N=at - 1,
        labels_N=ids[at],
        rows_N=rows[at],
        columns_N=columns[at] - prompt,
        shape=(attended.shape[0], micro.response_width),
        restarts=tuple(restarts.tolist()),
    )


def rows_of(packed: Packed, *, group: SequenceGroup | None = None) -> Rows:
    """The rows of a line for :func:`packed_attention`; ``group`` shares the line's tokens."""
    device = packed.input_ids_1T.device
    lengths = tuple(length for length in packed.lengths if length)
    ends = torch.tensor((0, *lengths), device=device).cumsum(0)
    blocks = tuple(_blocks(lengths, device))
    order = torch.cat([block.gather[block.real] for block in blocks]).argsort()
    return Rows(lengths, blocks, order, ends, group)


def _blocks(lengths: Sequence[int], device: torch.device) -> list[Block]:
    """Rows by powers of two of their length: padding inside a block at most doubles it."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length in lengths:
        by_size.setdefault((length - 1).bit_length(), []).append((start, length))
        start += length
    blocks = []
    for runs in by_size.values():
        begin, size = torch.tensor(runs, device=device).t()[..., None]
        steps = torch.arange(int(size.max()), device=device)[None]
        blocks.append(Block(begin + torch.minimum(steps, size - 1), steps < size))
    return blocks


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_rows: Rows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a line; transformers' attention interface.

    ``query`` [1, heads, T, D], ``key`` and ``value`` with their own number of heads; returns
    [1, T, heads, D]. Where the line is shared, T is this rank's part: tokens are swapped for heads
    around the attention, whatever kernel runs it. Raises ``RuntimeError`` if there is a mask, or
    no word about the rows: what would run then attends across rows.
    """
    if attention_mask is not None or packed_rows is None or dropout:
        raise RuntimeError("attention over packed rows got a mask, dropout, or no row lengths")
    group = packed_rows.group
    if group is not None:
        key, value = (_repeat_heads(x, group.size) for x in (key, value))
        query, key, value = (heads_for_tokens(x, group) for x in (query, key, value))
    out = _within_rows(query, key, value, packed_rows, scaling)
    if group is not None:
        out = tokens_for_heads(out, group)
    return out.transpose(1, 2).contiguous(), None


def _repeat_heads(x_1HTD: Tensor, at_least: int) -> Tensor:
    """Each head often enough for every rank of the group to get one."""
    heads = x_1HTD.shape[1]
    return x_1HTD if heads >= at_least else x_1HTD.repeat_interleave(at_least // heads, dim=1)


def _within_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scaling: float | None) -> Tensor:
    """[1, heads, T, D]. On GPUs in 16 bits torch's flash kernel for rows on a line; elsewhere
    rows of similar length as a batch: padded on the right, a causal mask hides the padding."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        ends, longest = rows.ends.to(torch.int32), rows.longest
        out = varlen_attn(
            query, key, value, ends, ends, longest, longest,
            scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]
    parts = []
    for block in rows.blocks:
        q_b, k_b, v_b = (x[0][:, block.gather].transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q_b, k_b, v_b, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(out.transpose(1, 2)[block.real])
    return torch.cat(parts)[rows.order].transpose(0, 1)[None]


def use_packed_attention(model: Any) -> None:
    """Let a transformers model attend by :func:`packed_attention`, and make no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)
