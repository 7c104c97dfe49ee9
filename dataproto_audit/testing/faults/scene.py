"""What a fault of the catalogue gets to see and change, and small tools to do it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.faults.registry import Truth


@dataclass
class Scene:
    """A boundary of the simulated step ``run``; ``turn`` counts the faulty steps before this."""

    run: Any
    boundary: Any = None
    turn: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @property
    def batch(self) -> DataProto:
        """The batch at the boundary."""
        batch: DataProto = self.boundary.batch
        return batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self.boundary.batch = batch

    @property
    def tensors(self) -> Any:
        """Its tensors."""
        return self.batch.batch

    @property
    def arrays(self) -> dict[str, Any]:
        """Its non-tensor fields."""
        return self.batch.non_tensor_batch

    @property
    def meta(self) -> dict[str, Any]:
        """Its meta entries."""
        return self.batch.meta_info

    @property
    def options(self) -> Any:
        """What the step looks like."""
        return self.run.options

    def tell(self, **evidence: Any) -> None:
        """Change what the producer says beside the batch."""
        self.boundary.evidence = {**self.boundary.evidence, **evidence}

    def attended(self) -> Tensor:
        """Attended columns of the response, bool ``[rows, response]``."""
        width = self.tensors["responses"].shape[1]
        on: Tensor = self.tensors["attention_mask"][:, -width:] != 0
        return on

    def trained(self) -> Tensor:
        """Trained columns of the response, bool ``[rows, response]``."""
        on: Tensor = self.tensors["response_mask"] != 0
        return on

    def lengths(self) -> Tensor:
        """Attended tokens of each response ``[rows]``."""
        return self.attended().sum(1)

    def short(self) -> Tensor:
        """Rows with padding after the response, every second of them, at least one."""
        width = self.tensors["responses"].shape[1]
        return torch.nonzero(self.lengths() < width).squeeze(1)[::2]

    def long(self, tokens: int) -> Tensor:
        """Rows with that many trained tokens or more."""
        return torch.nonzero(self.trained().sum(1) >= tokens).squeeze(1)

    def put(self, name: str, new: Tensor, *, within: Tensor | None = None) -> Truth:
        """Write a field; the truth is the cells that changed, where ``within`` is true."""
        old = self.tensors[name]
        self.tensors[name] = new
        changed = unequal(old, new)
        return cells(name, changed if within is None else changed & within)


SAME = 1e-4
"""Floats that differ by less are rounded differently, and nobody would call one of them wrong."""


def unequal(old: Tensor, new: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding; NaN differs from numbers."""
    if not new.is_floating_point():
        return new != old
    alike = (new == old) | ((new - old).abs() <= SAME) | (new.isnan() & old.isnan())
    return ~alike


def cells(name: str, changed: Tensor) -> Truth:
    """The truth that these cells of a field are wrong."""
    columns: dict[int, tuple[int, ...]] = {}
    for row, column in torch.nonzero(changed).tolist():
        columns[row] = (*columns.get(row, ()), column)
    return Truth(name, tuple(columns), columns)


def rows_of(name: str, wrong: Any) -> Truth:
    """The truth that these rows of a field are wrong: a bool per row, or positions."""
    wrong = np.asarray(wrong)
    found = np.flatnonzero(wrong) if wrong.dtype == bool else wrong
    return Truth(name, tuple(int(row) for row in found))


def unlike(old: Any, new: Any) -> Any:
    """Where two object arrays differ, bool per row."""
    return np.array([a != b for a, b in zip(old, new, strict=True)])


def objects(values: Any) -> Any:
    """A one-dimensional object array."""
    out = np.empty(len(values), object)
    for row, value in enumerate(values):
        out[row] = value
    return out


def moved(values: Tensor, by: int) -> Tensor:
    """Columns moved right by ``by`` (left if negative), zeros where nothing comes from."""
    out = torch.zeros_like(values)
    if by > 0:
        out[:, by:] = values[:, :-by]
    else:
        out[:, :by] = values[:, -by:]
    return out
