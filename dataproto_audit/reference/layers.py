"""Hidden states of every layer from transformers' own model, in one process and without a backend.

Names are those of the model's modules, in the order of the forward pass: ``model.embed_tokens``;
for each layer what ``.self_attn`` and ``.mlp`` add to the residual stream and the stream after the
layer; ``model.norm``. Source of the structure: transformers' ``modeling_llama.py``, of which Qwen2
and Qwen3 are variants. Not covered: other families.
"""

from typing import Any

import torch
from torch import Tensor

PARTS = ("self_attn", "mlp")


def layer_outputs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    *,
    rows_per_forward: int | None = None,
) -> dict[str, Tensor]:
    """float32[rows, total, hidden] by name; what padding holds means nothing.

    Ids, mask and positions are i64[rows, total]. ``rows_per_forward`` bounds the memory of one
    forward pass, not that of the result.

    Raises:
        AttributeError: a model of another structure.
    """
    named = dict(model.named_modules())
    wanted = ["model.embed_tokens"]
    for number in range(len(model.model.layers)):
        layer = f"model.layers.{number}"
        wanted += [*(f"{layer}.{part}" for part in PARTS), layer]
    wanted.append("model.norm")
    collected: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def collector(name: str) -> Any:
        def collect(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            collected[name].append(hidden.float().clone())

        return collect

    handles = [named[name].register_forward_hook(collector(name)) for name in wanted]
    step = rows_per_forward or max(len(input_ids), 1)
    try:
        with torch.no_grad():
            for start in range(0, len(input_ids), step):
                part = slice(start, start + step)
                model.model(
                    input_ids=input_ids[part],
                    attention_mask=attention_mask[part].long(),
                    position_ids=position_ids[part],
                    use_cache=False,
                )
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in collected.items()}
