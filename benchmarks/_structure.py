"""The structure of one batch, checked three ways: declarations, pandera, a checked dataclass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts import check
from dataproto_audit.contracts.fields import FIELDS

PROMPT, RESPONSE = 8, 16


def batch(rows: int) -> dict[str, Any]:
    """Zeros in 23 declared tensors over rows, prompt and response, and two object arrays."""
    widths = {"": 0, "prompt": PROMPT, "response": RESPONSE, "prompt+response": PROMPT + RESPONSE}
    tensors: dict[str, Tensor] = {}
    for name, field in FIELDS.items():
        axes = field.axes.split()
        if field.kind != "tensor" or axes[:1] != ["rows"] or len(axes) > 2:
            continue
        width = widths.get(axes[1] if len(axes) == 2 else "")
        if width is None:
            continue
        shape = (rows, width) if len(axes) == 2 else (rows,)
        kind = torch.int64 if field.number.startswith("integer") else torch.float32
        tensors[name] = torch.zeros(shape, dtype=kind)
    arrays = {name: np.array(["a"] * rows, object) for name in ("uid", "data_source")}
    return {"batch": tensors, "non_tensor_batch": arrays, "meta_info": {}}


def _timed(run: Callable[[], Any], times: int, before: Callable[[], Any] = lambda: None) -> float:
    spent = []
    for _ in range(times):
        before()
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))


def sides(view: BatchView, plain: Mapping[str, Any]) -> dict[str, Callable[[], float]]:
    """By name, a function that returns the seconds one check takes."""

    def ours() -> None:
        assert not check.wrong_fields(BatchView.of(plain))

    return {
        "declarations, first": lambda: _timed(ours, 30, check._PASSED.clear),
        "declarations, again": lambda: _timed(ours, 300),
        "beartype dataclass": lambda: _timed(_dataclass(plain["batch"]), 30),
        "pandera, one number each": lambda: _timed(_pandera(plain["batch"]), 10),
    }


def _dataclass(tensors: Mapping[str, Tensor]) -> Callable[[], Any]:
    from beartype import beartype
    from jaxtyping import jaxtyped

    fields = [(name, FIELDS[name].annotation) for name in tensors]
    checked = jaxtyped(typechecker=beartype)(make_dataclass("Batch", fields))
    return lambda: checked(**tensors)


def _pandera(tensors: Mapping[str, Tensor]) -> Callable[[], Any]:
    """A DataFrame column holds one number a row, so pandera sees kinds and no second axis."""
    import pandas as pd
    import pandera.pandas as pa

    frame = pd.DataFrame({n: t.reshape(len(t), -1)[:, 0].numpy() for n, t in tensors.items()})
    schema = pa.DataFrameSchema({n: pa.Column(frame[n].dtype) for n in frame})
    return lambda: schema.validate(frame)
