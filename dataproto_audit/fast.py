"""Compiled loops for large batches, where numba is installed (extra ``fast``).

numpy goes over memory once for each operation; one compiled loop goes over it once for all of them.
Loading numba takes about a second, so it is loaded only after a process has handled
:data:`PAYS_AFTER` values: a single saved batch is checked without it. Results are the same: bit for
bit for fingerprints, within float64 rounding for sums.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 16
"""Values below which a call costs more than it saves."""
PAYS_AFTER = 1 << 28
"""Values that a process handles before numba is loaded."""

_seen = 0


def loops(values: int) -> Any:
    """The compiled loops for an array of that many values, or None where numpy is to be used."""
    global _seen
    if values < SMALL:
        return None
    _seen += values
    return _compiled() if _seen > PAYS_AFTER else None


def plain(*arrays: NDArray[Any]) -> bool:
    """True for arrays of one shape in float32 or float64, which the loops can read."""
    known = all(array.dtype in (np.float32, np.float64) for array in arrays)
    return known and len({array.shape for array in arrays}) == 1


@cache
def _compiled() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    from numba import njit

    compile_ = njit(cache=True, nogil=True)
    return SimpleNamespace(hash_rows=compile_(_hash_rows), masked_gap=compile_(_masked_gap))


def _hash_rows(words: NDArray[Any], multipliers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    rows, width = words.shape
    out = np.empty(rows, np.uint64)
    for row in range(rows):
        total = np.uint64(width)
        for column in range(width):
            word = np.uint64(words[row, column]) * np.uint64(0x9E3779B97F4A7C15)
            word ^= word >> np.uint64(29)
            total += word * multipliers[column]
        out[row] = total
    return out


def _masked_gap(
    left: NDArray[Any], right: NDArray[Any], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], int, float, float, float]:
    rows, width = left.shape
    row_max = np.zeros(rows, np.float64)
    tokens, absolute, signed, k3 = 0, 0.0, 0.0, 0.0
    for row in range(rows):
        largest = 0.0
        for column in range(width):
            if mask[row, column]:
                gap = np.float64(left[row, column]) - np.float64(right[row, column])
                if math.isfinite(gap):
                    size = abs(gap)
                    largest = max(largest, size)
                    tokens += 1
                    absolute += size
                    signed += gap
                    k3 += math.expm1(min(max(gap, -20.0), 20.0)) - gap
        row_max[row] = largest
    return row_max, tokens, absolute, signed, k3
