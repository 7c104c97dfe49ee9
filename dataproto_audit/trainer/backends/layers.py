"""Hidden states of single layers, by their Hugging Face names, for finding the first wrong one.

Names in the order of the forward pass: ``model.embed_tokens``; for each layer ``.self_attn`` and
``.mlp`` (what each adds to the residual stream) and the layer itself (the stream after it);
``model.norm``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dataproto_audit.trainer.backends.base import MicroBatch

EMBEDDING, NORM = "model.embed_tokens", "model.norm"


def layer_name(number: int, part: str = "") -> str:
    """``model.layers.3``, or its ``self_attn`` or ``mlp``."""
    return f"model.layers.{number}" + (f".{part}" if part else "")


def modules_of(model: Any) -> dict[str, nn.Module]:
    """The layers of a causal language model of transformers, or of its token classifier."""
    body = model.model
    found: dict[str, nn.Module] = {EMBEDDING: body.embed_tokens}
    for number, layer in enumerate(body.layers):
        found[layer_name(number, "self_attn")] = layer.self_attn
        found[layer_name(number, "mlp")] = layer.mlp
        found[layer_name(number)] = layer
    return {**found, NORM: body.norm}


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what ``modules`` give while inside, a tensor a call; of a tuple the first part."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            seen[name].append(tensor.detach().clone())  # some engines add the residual in place

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def compared_tokens(attention_mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and places of the tokens whose hidden states are compared, i64[N] each.

    All attended tokens but the last of each row, which predicts nothing and which engines leave
    out where they can. ``places`` count a row's attended tokens from 0.
    """
    attended_BT = attention_mask_BT.bool()
    place_BT = attended_BT.long().cumsum(-1) - 1
    last_B1 = place_BT.amax(-1, keepdim=True)
    rows, columns = (attended_BT & (place_BT < last_B1)).nonzero(as_tuple=True)
    return rows, columns, place_BT[rows, columns]


def line_positions(micro: MicroBatch) -> Tensor:
    """Where the compared tokens lie on a line of all attended tokens, i64[N]."""
    attended_BT = micro.attention_mask_BT.bool()
    rows, columns, _ = compared_tokens(micro.attention_mask_BT)
    position = attended_BT.flatten().long().cumsum(0) - 1
    return position[rows * attended_BT.shape[1] + columns]


def as_float(hidden: Tensor) -> Tensor:
    """float32 on the CPU, a copy."""
    return hidden.to("cpu", torch.float32, copy=True)
