"""Rows as Megatron takes them: attended tokens from position 0 on.

Its rotary embedding counts columns and ignores position ids, so a left-padded prompt would be
scored at wrong positions without an error. Rows are moved to the left and padded on the right, or
laid on one line (``use_remove_padding``). Suffixes as in :mod:`..base`; S is the new width and N
counts scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import MicroBatch
from dataproto_audit.trainer.backends.packing import pack


@dataclass(frozen=True)
class Aligned:
    """What the model reads of a micro-batch, and which of its outputs score what.

    Output ``index_N`` of the flattened ``tokens_BS`` predicts ``labels_N``, the response token at
    (``rows_N``, ``columns_N``) of ``shape``. ``lengths`` of the rows on a line, the fill at its
    end among them; None where rows lie apart. ``note`` is what the probe of packed rows reads.
    """

    tokens_BS: Tensor
    index_N: Tensor
    labels_N: Tensor
    rows_N: Tensor
    columns_N: Tensor
    shape: tuple[int, int]
    lengths: tuple[int, ...] | None = None
    note: dict[str, Any] | None = None

    def labels_BS(self) -> Tensor:
        """The label of every output that scores, 0 elsewhere."""
        labels = torch.zeros_like(self.tokens_BS).flatten()
        labels[self.index_N] = self.labels_N
        return labels.view_as(self.tokens_BS)

    def spread(self, values_N: Tensor) -> Tensor:
        """[B, R] with ``values_N`` at the scored tokens and 0 elsewhere; differentiable."""
        zeros = values_N.new_zeros(self.shape)
        return zeros.index_put((self.rows_N, self.columns_N), values_N)


def align(micro: MicroBatch, *, multiple: int) -> Aligned:
    """Move rows to the left and pad them to a multiple of ``multiple`` columns.

    A response token without any token before it is not scored. Raises DPA851 if a position id is
    not the number of attended tokens before it.
    """
    attended_BT = micro.attention_mask_BT.bool()
    place_BT = _places(micro)
    longest = int(attended_BT.sum(-1).max())
    # The last token of the longest row predicts nothing: the model need not see it.
    width = -(-max(longest - 1, 1) // multiple) * multiple
    rows, columns = (attended_BT & (place_BT < width)).nonzero(as_tuple=True)
    tokens_BS = micro.input_ids_BT.new_zeros(len(attended_BT), width)
    tokens_BS[rows, place_BT[rows, columns]] = micro.input_ids_BT[rows, columns]
    source_BR = place_BT[:, -micro.response_width :] - 1
    scored_BR = micro.response_attention_BR & (source_BR >= 0)
    rows_N, columns_N = scored_BR.nonzero(as_tuple=True)
    return Aligned(
        tokens_BS=tokens_BS,
        index_N=rows_N * width + source_BR[scored_BR],
        labels_N=micro.responses_BR[scored_BR],
        rows_N=rows_N,
        columns_N=columns_N,
        shape=(len(attended_BT), micro.response_width),
    )


def line_up(micro: MicroBatch, *, multiple: int) -> Aligned:
    """Lay rows one after the other on a line of a multiple of ``multiple`` tokens.

    Raises DPA851 as :func:`align`, and for a response without a token before it.
    """
    _places(micro)
    packed = pack(micro, multiple_of=multiple)
    return Aligned(
        tokens_BS=packed.input_ids_1T,
        index_N=packed.scored_N,
        labels_N=packed.labels_N,
        rows_N=packed.rows_N,
        columns_N=packed.columns_N,
        shape=packed.shape,
        lengths=tuple(length for length in packed.lengths if length),
        note=packed.note,
    )


def _places(micro: MicroBatch) -> Tensor:
    """Attended tokens before each column, checked against the position ids."""
    attended_BT = micro.attention_mask_BT.bool()
    place_BT: Tensor = attended_BT.cumsum(-1) - 1
    wrong = (micro.position_ids_BT != place_BT) & attended_BT
    if not bool(wrong.any()):
        return place_BT
    row, column = (int(x) for x in torch.nonzero(wrong)[0])
    raise UsageError(
        "DPA851",
        f"position_ids of row {row} say {int(micro.position_ids_BT[row, column])} at an attended "
        f"token that {int(place_BT[row, column])} others precede; Megatron's rope counts tokens.",
        "Compute position_ids as cumsum(attention_mask) - 1, or use strategy fsdp2.",
    )
