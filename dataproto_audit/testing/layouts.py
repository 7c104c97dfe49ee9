"""The same batch in another layout."""

from __future__ import annotations

from typing import Any

import torch

from dataproto_audit.protocol import DataProto


def jagged(batch: DataProto) -> dict[str, Any]:
    """The batch without padding and without an attention mask, rows of their own lengths.

    Fields without an axis of tokens stay as they are. A mapping of the three parts, which every
    reader of batches takes.
    """
    parts: dict[str, Any] = {
        "non_tensor_batch": batch.non_tensor_batch,
        "meta_info": batch.meta_info,
    }
    if batch.batch is None:
        return {"batch": {}, **parts}
    fields = dict(batch.batch.items())
    width, used = fields["prompts"].shape[1], fields.pop("attention_mask") != 0
    prompt, response = used[:, :width].sum(1).tolist(), used[:, width:].sum(1).tolist()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in fields.items():
        if tensor.dim() != 2:
            out[name] = tensor
            continue
        start, end = [0] * len(prompt), response
        if name == "prompts":
            start, end = [width - n for n in prompt], [width] * len(prompt)
        elif name in ("input_ids", "position_ids"):
            start, end = [width - n for n in prompt], [width + n for n in response]
        rows = [tensor[i, a:b].clone() for i, (a, b) in enumerate(zip(start, end, strict=True))]
        out[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return {"batch": out, **parts}
