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

    # Sums may be taken in any order, so that they run in vector registers.
    compile_ = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
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


def _count_rows(flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    rows, width = flags.shape
    out = np.empty(rows, np.int64)
    for row in range(rows):
        total = 0
        for column in range(width):
            total += flags[row, column]
        out[row] = total
    return out


def _masked_gap(
    left: NDArray[Any], right: NDArray[Any], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], int, float, float, float]:
    rows, width = left.shape
    row_max = np.zeros(rows, np.float64)
    gaps, sizes = np.empty(width, np.float64), np.empty(width, np.float64)
    bits = sizes.view(np.int64)  # of floats >= 0 their bits have the order of their values
    largest = np.zeros(1, np.int64)
    tokens, absolute, signed, k3 = 0, 0.0, 0.0, 0.0
    for row in range(rows):
        count = 0
        for column in range(width):
            gap = np.float64(left[row, column]) - np.float64(right[row, column])
            size = abs(gap)
            counted = mask[row, column] & (size < math.inf)  # false for NaN, too
            gaps[column] = gap if counted else 0.0
            sizes[column] = size if counted else 0.0
            count += counted
        most, row_absolute, row_signed, row_k3 = np.int64(0), 0.0, 0.0, 0.0
        for column in range(width):
            gap, size = gaps[column], sizes[column]
            most = max(most, bits[column])
            row_absolute += size
            row_signed += gap
            series = gap * gap * (0.5 + gap * (1 / 6 + gap * (1 / 24 + gap / 120)))
            row_k3 += series if size <= 0.01 else 0.0  # the series of probes.scan, within 1e-10
        largest[0] = most
        row_max[row] = largest.view(np.float64)[0]
        if row_max[row] > 0.01:
            for column in range(width):
                if sizes[column] > 0.01:
                    row_k3 += math.expm1(min(max(gaps[column], -20.0), 20.0)) - gaps[column]
        tokens, absolute = tokens + count, absolute + row_absolute
        signed, k3 = signed + row_signed, k3 + row_k3
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


def _range_where(
    values: NDArray[Any], where: NDArray[np.bool_], turn: Any, empty: tuple[Any, Any], odd: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Smallest and largest integer of each row, in the order with negative ones xor ``turn``.

    ``empty`` stands for no value, and ``odd`` for a range that goes beyond it.
    """
    rows, width = values.shape
    low, high = np.empty(rows, values.dtype), np.empty(rows, values.dtype)
    for row in range(rows):
        least, most = empty
        for column in range(width):
            value, there = values[row, column], where[row, column]
            value ^= turn if value < 0 else 0
            least = min(least, value if there else empty[0])
            most = max(most, value if there else empty[1])
        if least < empty[1] or most > empty[0]:
            low[row] = high[row] = odd
        else:
            low[row] = least ^ (turn if least < 0 else 0)
            high[row] = most ^ (turn if most < 0 else 0)
    return low, high


_LOOPS = (
    _hash_rows, _count_rows, _masked_gap, _positions_wrong, _ids_differ, _beyond_bits, _range_where,
)  # fmt: skip
