"""From rows of a batch to the micro-batches that an engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.trainer.backends.base import MicroBatch
from dataproto_audit.trainer.batching import Index

FORWARD_FIELDS = ("input_ids", "attention_mask", "position_ids", "responses")


def micro_batch(batch: Any, rows: Index, *, device: torch.device) -> MicroBatch:
    """Rows of ``batch`` (a TensorDict of CPU tensors) without the columns that nobody attends to.

    Padding on the outside is the same for every row of a micro-batch of similar lengths; cutting
    it changes no attended position, since positions travel with the ids. At least one column of
    prompt and one of response stay.
    """
    index = torch.from_numpy(rows)
    fields = {name: batch[name][index] for name in FORWARD_FIELDS}
    width = fields["responses"].shape[1]
    left, right = _outer_padding(fields["attention_mask"], width)
    total = fields["input_ids"].shape[1]
    kept = slice(left, total - right)
    return MicroBatch(
        input_ids_BT=fields["input_ids"][:, kept].to(device),
        attention_mask_BT=fields["attention_mask"][:, kept].to(device),
        position_ids_BT=fields["position_ids"][:, kept].to(device),
        responses_BR=fields["responses"][:, : width - right].to(device),
    )


def _outer_padding(attention_mask_BT: Tensor, response_width: int) -> tuple[int, int]:
    """Columns to cut on the left of the prompts and on the right of the responses."""
    attended = np.flatnonzero(attention_mask_BT.any(dim=0).numpy())
    total = attention_mask_BT.shape[1]
    if attended.size == 0:
        return 0, 0
    left = min(int(attended[0]), total - response_width - 1)
    right = min(total - 1 - int(attended[-1]), response_width - 1)
    return max(left, 0), right


def scatter(target_BR: Tensor, rows: Sequence[Index], parts: Sequence[Tensor | None]) -> None:
    """Write the outputs of micro-batches to their rows of ``target_BR``, on its left columns."""
    for index, part in zip(rows, parts, strict=True):
        assert part is not None, "an output that was not asked for"
        target_BR[torch.from_numpy(index), : part.shape[1]] = part.cpu()


def token_counts(batch: Any) -> Index:
    """Attended tokens of each row, i64[rows]."""
    counts: Index = batch["attention_mask"].sum(-1).numpy().astype(np.int64)
    return counts
