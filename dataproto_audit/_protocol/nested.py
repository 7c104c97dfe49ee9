"""Rows of nested tensors (jagged or strided), which torch can neither index nor concatenate.

Everything here goes through ``unbind``, one small tensor a row: right, not fast. Padded fields,
the usual case, never come here.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dataproto_audit.storage import jagged_of_parts

if TYPE_CHECKING:
    from tensordict import TensorDict


def nested_keys(batch: "TensorDict") -> list[str]:
    """Names of the fields that are nested tensors."""
    return [key for key, value in batch.items() if getattr(value, "is_nested", False)]


def leading_sizes(tensor: torch.Tensor, dims: int) -> torch.Size:
    """The first ``dims`` sizes; of a nested tensor only the number of rows is one number."""
    return torch.Size([tensor.size(0)]) if tensor.is_nested else tensor.shape[:dims]


def sizes_of(tensor: torch.Tensor) -> torch.Size:
    """The shape; -1 for an axis whose length differs from row to row."""
    if not tensor.is_nested:
        return tensor.shape
    rows = {tuple(row.shape) for row in tensor.unbind()}
    inner = [
        sizes.pop() if len(sizes := set(axis)) == 1 else -1 for axis in zip(*rows, strict=True)
    ]
    return torch.Size([tensor.size(0), *inner])


def nested_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """Build a nested tensor of these rows in the layout, dtype and inner sizes of ``like``."""
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=like.layout)
    if like.layout is torch.jagged:
        nothing = like.values()[:0]
        offsets = torch.zeros(1, dtype=torch.int64, device=like.device)
        return jagged_of_parts(nothing, offsets)
    return torch.nested.nested_tensor([], dtype=like.dtype, device=like.device)


def nested_take(tensor: torch.Tensor, index: Iterable[Any]) -> torch.Tensor:
    """Pick rows of a nested tensor, by non-negative positions."""
    rows = tensor.unbind()
    return nested_from_rows([rows[int(i)] for i in index], like=tensor)


def nested_concat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put the rows of nested tensors one after another."""
    return nested_from_rows([row for part in parts for row in part.unbind()], like=parts[0])
