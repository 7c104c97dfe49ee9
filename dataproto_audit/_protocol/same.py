"""Equality as a merge needs it: exact, NaN equal to NaN, through containers and cycles."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether dtype, device, shape and every value agree; a NaN agrees with a NaN."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.device != b.device or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        rows_a, rows_b = a.unbind(), b.unbind()
        return len(rows_a) == len(rows_b) and all(map(same_tensor, rows_a, rows_b))
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and not bool(unequal_cells(a, b).any())


def unequal_cells(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mark the cells of two tensors of one shape that differ; NaN does not differ from NaN."""
    return (a != b) & ~((a != a) & (b != b))


def describe_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Say in one sentence how two fields of a batch differ, with the first differing cell."""
    if a.is_nested or b.is_nested:
        return "their rows differ in length or value"
    for what in ("dtype", "device"):
        left, right = getattr(a, what), getattr(b, what)
        if left != right:
            return f"{what} {left} against {right}"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    unequal = unequal_cells(a, b)
    first = tuple(unequal.nonzero()[0].tolist())
    rows = int(unequal.reshape(unequal.shape[0], -1).any(dim=1).sum()) if unequal.ndim else 1
    text = (
        f"{int(unequal.sum())} of {unequal.numel()} cells in {rows} of {len(a)} rows differ, "
        f"first at {list(first)} ({a[first].item()} against {b[first].item()})"
    )
    if rows > 1 and _row_counts(a) == _row_counts(b):
        text += "; both sides hold the same rows in another order"
    return text


def _row_counts(tensor: torch.Tensor) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in tensor.reshape(len(tensor), -1).tolist())


def same(a: Any, b: Any, open_pairs: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Compare two Python objects deeply; a pair met again on its own path counts as equal.

    Elements of object arrays must be of one type (1 is not 1.0 there), elsewhere ``==`` decides.
    What cannot be compared counts as different.
    """
    if a is b:
        return True
    if isinstance(a, (str, int, float, bytes)):
        return _plainly_equal(a, b)
    if (id(a), id(b)) in open_pairs:
        return True
    inside = open_pairs | {(id(a), id(b))}
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and _same_array(a, b, inside)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], inside) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y, inside) for x, y in zip(a, b, strict=True))
    return _plainly_equal(a, b)


def same_fields(a: TensorDict | None, b: TensorDict | None) -> bool:
    """Compare two tensor batches: rows, names and values."""
    if a is None or b is None:
        return a is b
    if a.batch_size != b.batch_size or set(a.keys()) != set(b.keys()):
        return False
    return all(same_tensor(value, b[key]) for key, value in a.items())


def _plainly_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:  # noqa: BLE001 # a foreign __eq__ may raise anything
        return False


def _same_array(a: np.ndarray, b: np.ndarray, inside: frozenset[tuple[int, int]]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype != object:
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    pairs = zip(a.flat, b.flat, strict=True)
    return all(type(x) is type(y) and same(x, y, inside) for x, y in pairs)


def describe_array_difference(a: np.ndarray, b: np.ndarray) -> str:
    """Say in one sentence how two non-tensor fields differ, with the first differing entry."""
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} against {b.dtype}"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    for place in np.ndindex(a.shape):
        x, y = a[place], b[place]
        if type(x) is not type(y) or not same(x, y):
            return f"first at {list(place)} ({_short(x)} against {_short(y)})"
    return "their entries differ"


def _short(value: Any, limit: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
