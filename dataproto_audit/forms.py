"""What a batch is made of, whatever form it comes in: tensors, arrays by row, meta entries.

Only a plain mapping may hold things that are neither. They are kept apart as ``odd``, so that the
contract can say what is wrong with them; the other forms refuse such things themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.storage import listed, shared

PARTS = ("batch", "non_tensor_batch", "meta_info")
"""Keys of the mapping form."""


class Parts(NamedTuple):
    """A batch taken apart. ``untracked`` tensors share memory with a numpy array; ``odd`` are
    entries that are no field at all, or have no data, by name (of a field, or of a part)."""

    tensors: dict[str, Tensor]
    arrays: dict[str, NDArray[Any]]
    meta: Mapping[str, Any]
    untracked: tuple[str, ...]
    odd: dict[str, Any]


def parts_of(batch: Any) -> Parts:
    """Take ``batch`` apart; :class:`UsageError` when it is no form of batch, or holds no data."""
    if batch is None:
        return Parts({}, {}, {}, (), {})
    if hasattr(batch, "non_tensor_batch") and hasattr(batch, "meta_info"):
        return _taken(batch.batch, batch.non_tensor_batch, batch.meta_info, {}, strict=True)
    if hasattr(batch, "batch_size") and hasattr(batch, "items"):  # a TensorDict
        return _taken(batch, None, None, {}, strict=True)
    if isinstance(batch, Mapping):
        if not any(part in batch for part in PARTS):
            return _taken(batch, None, None, {}, strict=False)
        given = {part: batch.get(part) for part in PARTS}
        odd = {p: v for p, v in given.items() if not (v is None or hasattr(v, "items"))}
        fields, objects, meta = (None if part in odd else given[part] for part in PARTS)
        return _taken(fields, objects, meta, odd, strict=False)
    raise UsageError(
        "DPA857",
        f"cannot read a batch from {type(batch).__name__}.",
        "Pass a DataProto, a TensorDict, or a mapping with the key 'batch'.",
    )


def _taken(fields: Any, objects: Any, meta: Any, odd: dict[str, Any], *, strict: bool) -> Parts:
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, NDArray[Any]] = {}
    untracked = []
    for part, sorted_by_kind in ((fields, True), (objects, False)):
        for key, value in () if part is None else part.items():
            name = str(key)
            if isinstance(value, Tensor) and value.is_meta:
                if strict:
                    raise UsageError(
                        "DPA857", f"the field {name} has no data.", "Move it off the meta device."
                    )
                odd[name] = value
            elif sorted_by_kind and isinstance(value, Tensor):
                tensors[name] = value
            elif sorted_by_kind and isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
                tensors[name] = shared(value)
                untracked.append(name)
            elif (array := listed(value)) is not None:
                arrays[name] = array
            elif not strict:
                odd[name] = value
    return Parts(tensors, arrays, meta or {}, tuple(untracked), odd)
