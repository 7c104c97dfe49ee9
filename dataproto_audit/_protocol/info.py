"""Describing a batch in text: fields with shapes and types, and its size in memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict

from dataproto_audit._protocol.nested import sizes_of


def data_info(batch: TensorDict | None, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """List every field on its own line: shape, dtype and device, or the nested type."""
    lines = ["batch"]
    for key, value in {} if batch is None else batch.items():
        lines.append(f"  {key}: {tuple(sizes_of(value))} ({value.dtype}) {value.device}")
    lines.append("non_tensor_batch")
    lines += [f"  {key}: ndarray{value.shape} ({value.dtype})" for key, value in arrays.items()]
    lines.append("meta_info")
    lines += [f"  {key}: {type_text(value)}" for key, value in meta.items()]
    return "\n".join(lines)


def type_text(value: Any) -> str:
    """Name a type with the types inside it, judged by the first few elements."""
    if isinstance(value, list):
        inner = "|".join(dict.fromkeys(type_text(item) for item in value[:3]))
        return f"list[{inner or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(type_text(item) for item in value)})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{type_text(key)}: {type_text(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    return type(value).__name__


def size_text(batch: TensorDict | None, arrays: Mapping[str, Any], prefix: str) -> str:
    """Sizes in GiB of the tensors and of the arrays (of object arrays: the pointers only)."""
    tensors = sum(_nbytes(value) for value in ({} if batch is None else batch).values())
    array_bytes = sum(value.nbytes for value in arrays.values())
    text = (
        f"Size of tensordict: {tensors / 1024**3} GB, "
        f"size of non_tensor_batch: {array_bytes / 1024**3} GB"
    )
    return f"{prefix}, {text}" if prefix else text


def _nbytes(tensor: Any) -> int:
    rows = tensor.unbind() if tensor.is_nested else [tensor]
    return sum(row.numel() * row.element_size() for row in rows)
