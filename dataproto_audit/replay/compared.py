"""One recorded field against what it should be: the verdict, the cells, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dc_field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.bool_]
Verdict = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True)
class Compared:
    """One recorded field against its recomputation.

    ``cells [rows, columns]`` are those that differ, ``looked`` those that were compared;
    ``missing`` says what to record or pass where the verdict is ``unknown``.
    """

    stage: str
    field: str
    verdict: Verdict
    boundary: int = -1
    cells: Cells | None = None
    looked: Cells | None = None
    evidence: Mapping[str, Any] = dc_field(default_factory=dict)
    missing: str = ""
    model: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that differ."""
        if self.cells is None:
            return ()
        return tuple(np.flatnonzero(self.cells.any(1)).tolist())

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "stage": self.stage, "field": self.field, "verdict": self.verdict,
            "rows": list(self.rows), "cells": 0 if self.cells is None else int(self.cells.sum()),
            "evidence": dict(self.evidence), "missing": self.missing, "model": self.model,
        }  # fmt: skip


def compare(
    stage: str,
    name: str,
    recorded: Any,
    expected: Any,
    looked: Cells,
    bound: Any,
    *,
    least: Any = None,
    **evidence: Any,
) -> Compared:
    """Where ``recorded`` and ``expected`` lie further apart than ``bound``, on cells ``looked``.

    Where one does, the cells beyond ``least`` are named, if there are any. NaN equals NaN.
    """
    recorded, expected = np.asarray(recorded, np.float64), np.asarray(expected, np.float64)
    alike = (recorded == expected) | (np.isnan(recorded) & np.isnan(expected))
    gap = np.where(looked & ~alike, np.abs(recorded - expected), 0.0)
    bad = looked & ~alike & ~(gap <= bound)
    told = {
        "max |difference|": float(np.max(gap, initial=0.0)),
        "compared": int(looked.sum()),
        **evidence,
    }
    if not bad.any():
        return Compared(stage, name, "agrees", looked=looked, evidence=told)
    if least is not None:
        named = looked & ~alike & ~(gap <= least)
        bad = named if named.any() else bad
    told["differ"] = int(bad.sum())
    return Compared(stage, name, "differs", cells=bad, looked=looked, evidence=told)
