"""Weights in and out of a vLLM worker: load, mend the tied head, read back.

Runs inside the engine process, in ``collective_rpc``; vLLM's internals are touched here only.
Written against vLLM 0.32. One tensor-parallel rank: shards of a TP engine are not gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
        for place in _places(model):
            parameter = getattr(place.module, place.key)
            tensor = _tensor(place, parameter)
            parts = None if tensor is None else _unfuse(place.path, place.module, tensor, fused)
            if tensor is None or parts is None:
                unread.append(f"{place.path}.{place.key}")
                continue
            for name, part in parts:
                found[f"{name}.{place.key}"] = part.cpu()
    return found, unread


class _Place(NamedTuple):
    """Where a parameter lives. ``packs``: its module may hold it in packed form only."""

    path: str
    module: Any
    key: str
    packs: bool
    is_vocabulary: bool


@functools.lru_cache(maxsize=1)  # walking the modules costs more than reading most of them
def _places(model: Any) -> list[_Place]:
    """Every parameter of the engine's model; loading weights fills them and moves none."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    return [
        _Place(
            path,
            module,
            key,
            key == "weight" and isinstance(module, (LinearBase, ParallelLMHead)),
            isinstance(module, VocabParallelEmbedding),
        )
        for path, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    ]


def _tensor(place: _Place, parameter: Tensor) -> Tensor | None:
    """Return the tensor the module computes with, or None if it cannot be had."""
    module = place.module
    if place.packs and hasattr(module, "cpu_linear"):
        columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
        tensor = _unpack(module, parameter.dtype, int(columns))
    else:
        tensor = parameter.detach() if parameter.numel() else None
    if tensor is not None and place.is_vocabulary:
        tensor = tensor[: module.org_vocab_size]  # vLLM pads the vocabulary
    return tensor


def _unpack(module: Any, dtype: Any, columns: int) -> Tensor | None:
    """Recover the [rows, columns] matrix behind a packed kernel, 256 columns at a time."""
    import torch

    blocks, rows = [], 0
    for begin in range(0, columns, 256):
        probe = _identity_rows(columns, begin, dtype)
        if rows * columns**2 > READ_BACK_LIMIT:
            return None
        block = module.cpu_linear(probe, module.weight, None)
        rows = block.shape[1]
        blocks.append(block.t())
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


@functools.lru_cache(maxsize=4)  # a model has few widths, and a wide one takes megabytes
def _identity_rows(columns: int, begin: int, dtype: Any) -> Tensor:
    """Up to 256 rows of the identity of ``columns`` columns, from row ``begin``."""
    import torch

    width = min(256, columns - begin)
    rows = torch.zeros(width, columns, dtype=dtype)
    rows[:, begin : begin + width] = torch.eye(width, dtype=dtype)
    return rows


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
