"""Weights in and out of a vLLM worker: load, mend the tied head, read back.

Runs inside the engine process, in ``collective_rpc``; vLLM's internals are touched here only.
Written against vLLM 0.32. One tensor-parallel rank: shards of a TP engine are not gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Reading a packed matrix back costs rows * columns**2 multiply-adds; larger ones are left out.
READ_BACK_LIMIT = 5e9


def load(worker: Any, weights: Mapping[str, Tensor], repack_tied_head: bool) -> None:
    """Load tensors under Hugging Face names through the model's own loader.

    On CPU vLLM packs every Linear when it is loaded and drops its plain weight; ``reload_weights``
    packs anew. Left out is an output layer tied to the embedding: nothing is loaded *into it*, so
    it keeps the old packed copy without an error. ``repack_tied_head`` mends that.
    """
    import torch
    from vllm.config import set_current_vllm_config

    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        if repack_tied_head:
            _repack_tied_heads(worker.model_runner.get_model())


def _repack_tied_heads(model: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not getattr(model.config, "tie_word_embeddings", False):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def read_back(worker: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that the engine computes with, under Hugging Face names, and the rest.

    Plain parameters are copied. A packed matrix (CPU) is recovered by sending the identity
    through its own kernel: every output is one weight times 1 plus zeros, hence exact. The output
    layer is read that way too, so a stale tied head shows. Not covered, and returned as names:
    matrices above :data:`READ_BACK_LIMIT`, quantised layers, anything whose shape is not
    understood. Fused layers are cut into the names they were built from.
    """
    import torch

    model = worker.model_runner.get_model()
    fused = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Tensor] = {}
    unread: list[str] = []
    with torch.inference_mode():
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                tensor = _tensor(module, key, parameter)
                parts = None if tensor is None else _unfuse(path, module, tensor, fused)
                if tensor is None or parts is None:
                    unread.append(f"{path}.{key}")
                    continue
                for name, part in parts:
                    found[f"{name}.{key}"] = part.cpu()
    return found, unread


def _tensor(module: Any, key: str, parameter: Tensor) -> Tensor | None:
    """Return the tensor the module computes with, or None if it cannot be had."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    packed = key == "weight" and hasattr(module, "cpu_linear")
    if packed and isinstance(module, (LinearBase, ParallelLMHead)):
        columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
        tensor = _unpack(module, parameter.dtype, int(columns))
    else:
        tensor = parameter.detach() if parameter.numel() else None
    if tensor is not None and isinstance(module, VocabParallelEmbedding):
        tensor = tensor[: module.org_vocab_size]  # vLLM pads the vocabulary
    return tensor


def _unpack(module: Any, dtype: Any, columns: int) -> Tensor | None:
    """Recover the [rows, columns] matrix behind a packed kernel, 256 columns at a time."""
    import torch

    blocks, rows = [], 0
    for begin in range(0, columns, 256):
        width = min(256, columns - begin)
        probe = torch.zeros(width, columns, dtype=dtype)
        probe[:, begin : begin + width] = torch.eye(width, dtype=dtype)
        if rows * columns**2 > READ_BACK_LIMIT:
            return None
        block = module.cpu_linear(probe, module.weight, None)
        rows = block.shape[1]
        blocks.append(block.t())
    return torch.cat(blocks, dim=1)


def _unfuse(
    path: str, module: Any, tensor: Tensor, fused: Mapping[str, list[str]]
) -> Iterator[tuple[str, Tensor]] | None:
    """Cut qkv_proj into q, k, v and gate_up_proj into gate, up; other modules stay whole."""
    parent, _, last = path.rpartition(".")
    names = fused.get(last)
    if not names or len(names) == 1:
        return iter([(path, tensor)])
    sizes = list(getattr(module, "output_sizes", ()))
    if len(sizes) != len(names) or sum(sizes) != tensor.shape[0]:
        return None
    full_names = [f"{parent}.{name}" if parent else name for name in names]
    ends = itertools.accumulate(sizes)
    pieces = (tensor[end - size : end] for end, size in zip(ends, sizes, strict=True))
    return zip(full_names, pieces, strict=True)
