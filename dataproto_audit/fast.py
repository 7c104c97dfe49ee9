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
    return SimpleNamespace(**{loop.__name__[1:]: compile_(loop) for loop in _LOOPS})


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
                size = abs(gap)
                if size < math.inf:  # false for NaN, too
                    largest = max(largest, size)
                    tokens += 1
                    absolute += size
                    signed += gap
                    if size <= 0.01:  # the series of probes.scan, within 1e-10
                        k3 += gap * gap * (0.5 + gap * (1 / 6 + gap * (1 / 24 + gap / 120)))
                    else:
                        k3 += math.expm1(min(max(gap, -20.0), 20.0)) - gap
        row_max[row] = largest
    return row_max, tokens, absolute, signed, k3


def _positions_wrong(positions: NDArray[Any], attended: NDArray[np.bool_]) -> bool:
    rows, width = attended.shape
    for row in range(rows):
        count = 0
        for column in range(width):
            if attended[row, column]:
                if positions[row, column] != count:
                    return True
                count += 1
    return False


def _ids_differ(ids: NDArray[Any], prompts: NDArray[Any], responses: NDArray[Any]) -> bool:
    rows, prompt = prompts.shape
    for row in range(rows):
        different = 0
        for column in range(prompt):
            different |= ids[row, column] ^ prompts[row, column]
        for column in range(responses.shape[1]):
            different |= ids[row, prompt + column] ^ responses[row, column]
        if different != 0:
            return True
    return False


def _beyond_bits(values: NDArray[Any], bits: int) -> bool:
    rows, width = values.shape
    for row in range(rows):
        found = 0
        for column in range(width):
            found |= values[row, column]
        if found & ~bits:
            return True
    return False


def _changes_direction(attended: NDArray[np.uint8], prompt: int) -> bool:
    rows, width = attended.shape
    for row in range(rows):
        wrong = 0
        for column in range(1, prompt):
            wrong |= attended[row, column - 1] > attended[row, column]
        for column in range(prompt + 1, width):
            wrong |= attended[row, column] > attended[row, column - 1]
        if wrong:
            return True
    return False


def _range_where(
    values: NDArray[Any], where: NDArray[np.bool_], empty: tuple[Any, Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Smallest and largest value of each row; NaN spreads, ``empty`` stands for no value."""
    rows, width = values.shape
    low, high = np.empty(rows, values.dtype), np.empty(rows, values.dtype)
    for row in range(rows):
        least, most, odd = empty[0], empty[1], False
        for column in range(width):
            if where[row, column]:
                value = values[row, column]
                least = value if value < least else least
                most = value if value > most else most
                odd |= value != value
        low[row], high[row] = least, most
        if odd:
            low[row] = high[row] = math.nan
    return low, high


_LOOPS = (
    _hash_rows, _masked_gap, _positions_wrong, _ids_differ, _beyond_bits, _changes_direction,
    _range_where,
)  # fmt: skip
