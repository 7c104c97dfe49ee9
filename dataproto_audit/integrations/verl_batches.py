"""Batches as verl's calls pass them, laid side by side without copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.integrations.patches import Args, Kwargs


def first(args: Args, kwargs: Kwargs) -> Any:
    """The batch of a call: its first argument, however it was passed."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("batch", "data", "prompts") if name in kwargs), None)


def merged(
    batch: Any,
    result: Any = None,
    tensors: Mapping[str, Any] | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``batch`` with the fields of ``result``, and some more, as a mapping; no data is copied."""
    parts = [part for part in (batch, result) if part is not None]
    fields: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for part in parts:
        own, other = parts_of(part)
        fields.update(own)
        objects.update(other)
    return {
        "batch": {**fields, **(tensors or {})},
        "non_tensor_batch": {**objects, **(arrays or {})},
        "meta_info": meta_of(batch),
    }


def meta_of(batch: Any) -> Mapping[str, Any]:
    """Meta entries of a DataProto, or of a mapping made by :func:`merged`."""
    if isinstance(batch, Mapping):
        return batch.get("meta_info") or {}
    return getattr(batch, "meta_info", None) or {}


def parts_of(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and non-tensor fields of a DataProto, or of a mapping made by :func:`merged`."""
    if isinstance(batch, Mapping):
        return dict(batch["batch"]), dict(batch["non_tensor_batch"])
    fields = {} if batch.batch is None else dict(batch.batch.items())
    return fields, dict(batch.non_tensor_batch)


def rows_of(batch: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of ``extra`` that have one item for each row and are not in the batch already."""
    fields, objects = parts_of(batch)
    rows = BatchView.of(batch).rows
    return {
        name: values
        for name, values in extra.items()
        if name not in fields
        and name not in objects
        and hasattr(values, "__len__")
        and len(values) == rows
    }


def sampled_part(batch: Any, rows: int | None) -> Any:
    """The first ``rows`` rows of ``batch``; all of it for None."""
    if rows is None:
        return batch
    fields, objects = parts_of(batch)
    return {
        "batch": {name: tensor[:rows] for name, tensor in fields.items()},
        "non_tensor_batch": {name: array[:rows] for name, array in objects.items()},
        "meta_info": batch.meta_info,
    }


def metrics_of(result: Any) -> dict[str, float]:
    """Metrics that an update returned, one number each: mean, largest or smallest, by their name.

    Entries that are no numbers are left out.
    """
    told = meta_of(result).get("metrics") if result is not None else None
    found = {}
    for name, value in told.items() if isinstance(told, Mapping) else ():
        pick = np.max if "max" in name else np.min if "min" in name else np.mean
        try:
            found[name] = float(pick(np.asarray(value, dtype=np.float64)))
        except (TypeError, ValueError):
            continue
    return found
