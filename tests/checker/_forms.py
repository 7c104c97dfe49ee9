"""One batch in every form that a checker takes, and batches that hold garbage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from dataproto_audit.dump.readers import Saved
from dataproto_audit.findings import Finding, Report
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.recipes import cook

CONFIG = {"n": 3, "temperature": 1.0, "stop_ids": [9], "pad_id": 0, "adv_estimator": "grpo",
          "norm_adv_by_std": True, "world_size": 2}  # fmt: skip
"""What the base T tells in its meta entries: a TensorDict has none."""


def tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensor fields, log-probs and rewards in float32."""
    made = {name: torch.from_numpy(value) for name, value in batch["batch"].items()}
    return {n: t.float() if t.is_floating_point() else t for n, t in made.items()}


def jagged(batch: dict[str, Any]) -> TensorDict:
    """The batch without padding: every row as long as it is attended."""
    fields = tensors(batch)
    used, width = fields.pop("attention_mask") != 0, fields["prompts"].shape[1]
    out: dict[str, Any] = {}
    for name, tensor in fields.items():
        kept = used
        if name == "prompts":
            kept = used[:, :width]
        elif name not in ("input_ids", "position_ids"):
            kept = used[:, width:]
        rows = [tensor[row][kept[row]].clone() for row in range(len(tensor))]
        out[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return with_objects(out, batch)


def with_objects(fields: dict[str, Any], batch: dict[str, Any]) -> TensorDict:
    """A TensorDict of tensor and non-tensor fields."""
    stacks = {n: NonTensorStack(*a.tolist()) for n, a in batch["non_tensor_batch"].items()}
    return TensorDict({**fields, **stacks}, batch_size=[6])


def saved(batch: dict[str, Any]) -> Saved:
    """What a reader returns."""
    whole = {**batch, "batch": tensors(batch)}
    return Saved(Path("step_1.pkl"), "", "dataproto", whole)


def numbers(batch: dict[str, Any]) -> dict[str, Any]:
    """Plain arrays of numpy."""
    return {**batch, "batch": {n: t.numpy() for n, t in tensors(batch).items()}}


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "numpy arrays": numbers,
    "tensors": lambda b: {**b, "batch": tensors(b)},
    "one flat mapping": lambda b: {**tensors(b), **b["non_tensor_batch"]},
    "our DataProto": lambda b: DataProto.from_dict(
        tensors(b), b["non_tensor_batch"], meta_info=b["meta_info"]
    ),
    "a padded TensorDict": lambda b: with_objects(tensors(b), b),
    "a jagged TensorDict": jagged,
    "what a reader returned": saved,
}


def told(report: Report) -> list[tuple[Any, ...]]:
    """What a report says, but for its numbers."""
    return [key(finding) for finding in report.findings]


def key(f: Finding) -> tuple[Any, ...]:
    """What a finding says, but for its numbers."""
    return f.code, f.severity, f.stage, f.field, f.rows, tuple(sorted(f.columns.items())), f.causes


# -- garbage ---------------------------------------------------------------------------------------


def _cell(array: np.ndarray, value: float) -> Any:
    out = array.astype(np.float64) if array.dtype.kind == "f" else array.astype(np.int64)
    out.reshape(-1)[out.size // 2 :][:1] = value
    return out


def _objects(values: list[Any]) -> Any:
    out = np.empty(len(values), object)
    for row, value in enumerate(values):
        out[row] = value
    return out


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "None": lambda a: None,
    "a text": lambda a: "text",
    "a number": lambda a: 3,
    "nothing": lambda a: [],
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a.reshape(len(a), -1)[:, :0],
    "one row": lambda a: a[:1],
    "one row more": lambda a: np.concatenate([a, a[:1]]),
    "one column less": lambda a: a[:, :-1] if a.ndim > 1 else a,
    "one axis": lambda a: a.reshape(-1),
    "one axis, a row each": lambda a: a.reshape(len(a), -1)[:, 0],
    "three axes": lambda a: a[..., None],
    "bool": lambda a: a.astype(object) == 1,
    "float": lambda a: np.ones(a.shape) * 0.5,
    "float16": lambda a: np.full(a.shape, 6e4, np.float16),
    "uint8": lambda a: np.full(a.shape, 255, np.uint8),
    "complex": lambda a: np.ones(a.shape, np.complex64),
    "texts": lambda a: np.full(a.shape, "x"),
    "dates": lambda a: np.full(a.shape, "2026-01-01", "datetime64[D]"),
    "NaN": lambda a: np.full(a.shape, np.nan),
    "one NaN": lambda a: _cell(a.astype(np.float64), np.nan) if a.dtype.kind in "if" else a,
    "infinite": lambda a: np.full(a.shape, np.inf),
    "negative": lambda a: np.full(a.shape, -7),
    "huge": lambda a: np.full(a.shape, 2**62),
    "one huge": lambda a: _cell(a, 2.0**40) if a.dtype.kind in "if" else a,
    "objects": lambda a: _objects([None, 1, "x", [1], {"a": 1}, np.arange(2)][: len(a)]),
    "lists of lists": lambda a: a.tolist(),
    "ragged lists": lambda a: [[0] * row for row in range(len(a))],
    "a meta tensor's shape": lambda a: torch.zeros(a.shape).expand(a.shape),
    "jagged": lambda a: torch.nested.nested_tensor(
        [torch.ones(1 + row % 3) for row in range(len(a))], layout=torch.jagged
    ),
    "sparse": lambda a: torch.ones(a.shape).to_sparse(),
    "bfloat16": lambda a: torch.ones(a.shape, dtype=torch.bfloat16),
}
META: dict[str, Any] = {
    "a text": "x",
    "NaN": float("nan"),
    "infinite": float("inf"),
    "a list": [1, "a"],
    "a nested list": [[1], [2]],
    "an array": np.arange(3),
    "a tensor": torch.ones(2, 2),
    "a mapping": {"a": [1]},
    "negative": -3,
    "zero": 0,
    "true": True,
    "an object": object(),
}


def with_garbage(base: str, changes: dict[str, str], meta: dict[str, str]) -> dict[str, Any]:
    """A base batch with fields and meta entries that are something else."""
    batch = cook(base, [])
    for name, how in changes.items():
        part = next(p for p in ("batch", "non_tensor_batch") if name in batch[p])
        batch[part][name] = ARRAYS[how](np.asarray(batch[part][name]))
    batch["meta_info"] |= {name: META[how] for name, how in meta.items()}
    return batch
