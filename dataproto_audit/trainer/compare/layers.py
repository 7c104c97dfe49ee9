"""Which layer of a layout is the first to differ: hidden states of every layer, token by token.

Every rank that holds layers tells those; pipeline stages each tell their own, peers that hold the
same (tensor, context, sequence) tell them once. All attended tokens are compared but the last of
each row, which predicts nothing. Not covered: a fault of the backward pass alone, which gradients
show; states are kept in memory, so take few rows of a large model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.trainer.backends.base import Backend, MicroBatch
from dataproto_audit.trainer.backends.layers import as_float, compared_tokens, recording
from dataproto_audit.trainer.batching import Index

FACTOR, FLOOR = 4.0, 1e-5
"""A layer may differ by so many times the measured noise, and at least by this share of its
largest state."""

States = dict[str, list[NDArray[np.float32]]]
"""By layer, one f32[tokens, hidden] a micro-batch."""


class Told(NamedTuple):
    """What a rank tells: its chunk of the rows, its micro-batches of that chunk, and their states
    (none, where a peer tells the same)."""

    rank: int
    dp_rank: int
    micro_batches: tuple[Index, ...]
    states: States


@dataclass(frozen=True)
class LayerGap:
    """A layer's largest difference, the cell of the batch it is at, and the rank that told it."""

    name: str
    max_abs_diff: float
    bound: float
    worst: tuple[int, int]
    rank: int | None

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the bound; NaN is not."""
        return self.max_abs_diff <= self.bound


def collect(backend: Backend, micros: Sequence[MicroBatch], *, temperature: float) -> States:
    """The states of this rank's layers for ``micros``; empty where a peer tells them. Collective
    over the ranks of the model."""
    with recording(backend.layers()) as seen:
        backend.infer(micros, temperature=temperature, entropy=False)
    backend.packed_notes()
    backend.bubble()
    states: States = {}
    with torch.no_grad():
        for name, outputs in seen.items():
            # An interleaved pipeline is filled up with more micro-batches than were asked for.
            found = [
                as_float(backend.hidden_states(micro, output)).numpy()
                for micro, output in zip(micros, outputs, strict=False)
            ]
            if backend.speaks:
                states[name] = found
    return states


def gaps(
    told: Sequence[Told],
    expected: Mapping[str, Tensor],
    noise: Mapping[str, Tensor],
    attention_mask: Tensor,
    *,
    parts: int,
) -> list[LayerGap]:
    """Every expected layer in its order; one that is not told for every row differs by infinity.

    ``expected`` and ``noise`` hold f32[rows, total, hidden] of the batch, whose rows are cut into
    ``parts`` contiguous chunks.
    """
    size = len(attention_mask) // parts
    found = []
    for name, states in expected.items():
        rows, columns, _ = compared_tokens(attention_mask)
        whole = states[rows, columns]
        bound = FLOOR * float(whole.abs().max())
        bound = max(bound, FACTOR * _largest(noise[name][rows, columns] - whole))
        gap = LayerGap(name, float("inf"), bound, (-1, -1), None)
        seen: list[LayerGap] = []
        untold = torch.ones(len(attention_mask), dtype=torch.bool)
        for one in told:
            first = one.dp_rank * size
            for index, ours in zip(one.micro_batches, one.states.get(name, ()), strict=False):
                at = torch.from_numpy(index) + first
                seen.append(_gap(gap, one.rank, at, ours, states, attention_mask))
                untold[at] = False
        if untold.any():
            seen.append(replace(gap, worst=(int(untold.nonzero()[0]), -1)))
        found.append(max(seen, key=lambda each: each.max_abs_diff, default=gap))
    return found


def _gap(
    gap: LayerGap, rank: int, at: Tensor, ours: Any, states: Tensor, attention_mask: Tensor
) -> LayerGap:
    """``gap`` with the difference in the rows ``at`` of the batch."""
    rows, columns, _ = compared_tokens(attention_mask[at])
    expected = states[at[rows], columns]
    if ours.shape != expected.shape:
        return LayerGap(gap.name, float("inf"), gap.bound, (int(at[0]), -1), rank)
    if not len(rows):
        return LayerGap(gap.name, 0.0, gap.bound, (-1, -1), rank)
    off = (torch.from_numpy(ours) - expected).abs().nan_to_num(nan=torch.inf).amax(-1)
    worst = int(off.argmax())
    cell = (int(at[rows[worst]]), int(columns[worst]))
    return LayerGap(gap.name, float(off[worst]), gap.bound, cell, rank)


def _largest(gap: Tensor) -> float:
    return float(gap.abs().max()) if gap.numel() else 0.0
