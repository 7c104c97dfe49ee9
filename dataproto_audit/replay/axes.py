"""Rows and columns of a field, taken out whatever its shape is.

A field whose axis is longer or shorter than the batch's keeps its surplus or its gap: what is wrong
with its shape has to stay wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import FULL_FIELDS, PROMPT_FIELDS, RESPONSE_FIELDS, BatchView
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.replay.recording import Parts, Piece

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Widths:
    """Columns of prompt and response in a padded batch."""

    prompt: int
    response: int


def widths_of(view: BatchView) -> Widths:
    """The widths that a batch agrees on; 0 for a side that it does not have."""
    return Widths(view.prompt or 0, view.response or 0)


def side_of(name: str, shape: Sequence[int], widths: Widths) -> tuple[str, int] | None:
    """``prompt``, ``response`` or ``full``, and the axis; None for a field without columns."""
    if len(shape) < 2:
        return None
    if name in FIELDS:
        axes = FIELDS[name].axes.split()
        for side, word in (("full", "prompt+response"), ("prompt", "prompt"),
                           ("response", "response")):  # fmt: skip
            if word in axes:
                # A channel axis may come before the columns, which then are the last.
                at = axes.index(word)
                return side, at if len(axes) > 2 else len(shape) - 1
        return None
    last = len(shape) - 1
    if name in RESPONSE_FIELDS or shape[last] == widths.response:
        return ("response", last) if widths.response else None
    if name in FULL_FIELDS or shape[last] == widths.prompt + widths.response:
        return "full", last
    known = name in PROMPT_FIELDS or shape[last] == widths.prompt
    return ("prompt", last) if known and widths.prompt else None


def columns_kept(side: str, width: int, widths: Widths, prompt: Index, response: Index) -> Index:
    """Columns of an axis of ``width`` that stay, with what it has beyond the batch's width."""
    if side == "prompt":
        usual, kept = widths.prompt, prompt
    elif side == "response":
        usual, kept = widths.response, response
    else:
        usual, kept = (
            widths.prompt + widths.response,
            np.concatenate([prompt, widths.prompt + response]),
        )
    out: Index = np.concatenate([kept[kept < width], np.arange(usual, width)]).astype(np.int64)
    return out


def rows_kept(count: int, total: int, rows: Index) -> Index:
    """Rows of a field with ``count`` of them that go with ``rows`` of a batch of ``total``."""
    if count == total or not total:
        return rows[rows < count]
    if count and total % count == 0:  # not repeated: one entry for several rows
        return np.unique(rows // (total // count))
    if count and count % total == 0:  # repeated once more
        times = count // total
        several: Index = (rows[:, None] * times + np.arange(times)).reshape(-1)
        return several
    out: Index = np.concatenate([rows[rows < count], np.arange(total, count)]).astype(np.int64)
    return out


def take(tensor: Tensor, axis: int, index: Index) -> Tensor:
    """``index_select`` with a numpy index, for nested tensors along their rows, too."""
    if tensor.is_nested:
        rows: Any = tensor.unbind()
        picked = [rows[i] for i in index.tolist()]
        return torch.nested.as_nested_tensor(picked, layout=torch.jagged) if picked else tensor
    return tensor.index_select(axis, torch.from_numpy(np.ascontiguousarray(index)))


def padded(piece: Piece) -> Piece:
    """The piece with its jagged fields laid out as padded ones."""
    view = BatchView.of(piece.batch)
    if view.layout == "padded":
        return piece
    tensors: Parts = {}
    for name, tensor in view.tensors.items():
        tensors[name] = tensor
        if tensor.is_nested:
            kept = tensor.dtype if tensor.dtype is not torch.bool else torch.int64
            tensors[name] = torch.from_numpy(np.array(view.numpy(name))).to(kept)
    attention = view.attention
    if attention is not None:
        tensors.setdefault("attention_mask", torch.from_numpy(np.array(attention)))
    return replace(piece, batch={**piece.batch, "batch": tensors})
