"""What a reader hands out, and how loaded values become plain batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit._protocol.safe.load import Proto
from dataproto_audit._protocol.safe.tensordict_values import Fields, ObjectColumn, OneObject
from dataproto_audit.storage import object_array, shared

Kind = Literal[
    "dataproto", "tensordict", "tensors", "jsonl", "parquet", "keys", "safetensors", "trace"
]  # fmt: skip
When = Literal["before", "after"]


@dataclass(frozen=True)
class Hint:
    """What a file's name says about its batch; None for what it does not say.

    ``call`` counts from 0 within the run, ``step`` is the trainer's own count. ``method`` is the
    driver's method that the file is named after.
    """

    stage: str | None = None
    when: When | None = None
    call: int | None = None
    step: int | None = None
    method: str | None = None


@dataclass(frozen=True)
class Saved:
    """One batch of a file.

    ``batch`` has the keys ``batch`` (padded or jagged tensors), ``non_tensor_batch`` (arrays with
    one entry a row) and ``meta_info``; ``BatchView.of`` takes it as it is. ``place`` says where in
    the file it lies, empty when the file holds nothing else. ``opaque`` names the classes and
    functions of the file that nobody here knows: their objects are placeholders. ``notes`` state
    the conventions by which fields were renamed, moved or left out.
    """

    path: Path
    place: str
    kind: Kind
    batch: dict[str, Any] = field(repr=False)
    hint: Hint = Hint()
    framework: str = "verl"
    opaque: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Path and place, for messages."""
        return f"{self.path}{self.place and f' {self.place}'}"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor fields."""
        found: dict[str, torch.Tensor] = self.batch["batch"]
        return found

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The non-tensor fields, one entry a row."""
        found: dict[str, NDArray[Any]] = self.batch["non_tensor_batch"]
        return found

    @property
    def meta(self) -> dict[str, Any]:
        """What belongs to the batch as a whole."""
        found: dict[str, Any] = self.batch["meta_info"]
        return found

    @property
    def rows(self) -> int:
        """Rows of the first field; 0 without any."""
        for tensor in self.tensors.values():
            if tensor.dim():
                return int(tensor.size(0))
        return next((len(array) for array in self.arrays.values() if array.ndim), 0)

    def with_columns(self, columns: Mapping[str, list[Any]], **meta: Any) -> Saved:
        """The same with more non-tensor columns and meta entries; existing ones stay."""
        more = {name: object_array(values) for name, values in columns.items()}
        batch = parts(self.tensors, {**more, **self.arrays}, {**meta, **self.meta})
        return replace(self, batch=batch)


def parts(
    tensors: Mapping[Any, Any], arrays: Mapping[Any, Any], meta: Mapping[Any, Any]
) -> dict[str, Any]:
    """The plain form of a batch."""
    named = ({str(name): value for name, value in part.items()} for part in (tensors, arrays, meta))
    return dict(zip(("batch", "non_tensor_batch", "meta_info"), named, strict=True))


def of_proto(proto: Proto) -> dict[str, Any]:
    """The plain form of a saved DataProto."""
    inner = parts({}, {}, {}) if proto.batch is None else of_fields(proto.batch)
    arrays = {name: _rows(name, value) for name, value in proto.arrays.items()}
    return parts(
        inner["batch"],
        {**inner["non_tensor_batch"], **arrays},
        {**inner["meta_info"], **proto.meta},
    )


def _rows(name: Any, value: Any) -> NDArray[Any]:
    if isinstance(value, list):
        return object_array(value)
    if not isinstance(value, np.ndarray) or not value.ndim:
        raise ValueError(
            f"non-tensor field {str(name)!r} is a {type(value).__name__}, not an array of rows"
        )
    return value


def of_fields(saved: Fields, prefix: str = "") -> dict[str, Any]:
    """The plain form of a TensorDict: stacks of objects are columns, single ones meta entries.

    Fields of a TensorDict inside are named ``outer.inner``.
    """
    made = parts({}, {}, {})
    for key, value in saved.fields.items():
        name = prefix + key
        if isinstance(value, torch.Tensor):
            made["batch"][name] = value
        elif isinstance(value, ObjectColumn):
            made["non_tensor_batch"][name] = object_array(value.entries)
        elif isinstance(value, OneObject):
            made["meta_info"][name] = value.data
        elif isinstance(value, Fields):
            for part, inner in of_fields(value, f"{name}.").items():
                made[part].update(inner)
        else:
            raise ValueError(f"field {name!r} of a TensorDict is a {type(value).__name__}")
    return made


def _as_tensors(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """``fields`` with arrays of numbers as tensors, as ``check`` takes them, too."""
    return {
        name: shared(value)
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iufb"
        else value
        for name, value in fields.items()
    }


def of_mapping(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """The plain form of a dictionary: of tensors and columns, or one with DataProto's three keys.

    A list or array is a column when it has one entry for each row of the tensors.
    """
    if isinstance(saved.get("batch"), (Mapping, Fields)):
        inner = saved["batch"]
        made = of_fields(inner) if isinstance(inner, Fields) else of_mapping(_as_tensors(inner))
        for name, value in dict(saved.get("non_tensor_batch") or {}).items():
            made["non_tensor_batch"][str(name)] = _rows(name, value)
        made["meta_info"].update(dict(saved.get("meta_info") or {}))
        return made
    tensors = {k: v for k, v in saved.items() if isinstance(v, torch.Tensor) and v.dim()}
    counts = {int(tensor.size(0)) for tensor in tensors.values()}
    arrays, meta = {}, {}
    for name, value in saved.items():
        if name in tensors:
            continue
        listed = isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim)
        if listed and (len(value) in counts or not counts):
            arrays[name] = value if isinstance(value, np.ndarray) else object_array(value)
        else:
            meta[name] = value
    return parts(tensors, arrays, meta)
