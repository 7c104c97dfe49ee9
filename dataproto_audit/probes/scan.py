"""One row-blocked pass over a batch that computes the statistics several probes share.

A statistic is a function of one row block; blocks are sized to stay in cache, and the masks that
most statistics use are computed once per block. Probes read the merged results and look at single
cells only after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dataproto_audit import fast
from dataproto_audit.batch import BatchView, Block
from dataproto_audit.narrow import row_max, row_range, row_sum

Merge = Callable[[Sequence[Any]], Any]


def _total(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)


def _join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Stat:
    """``compute(block)`` for each block, merged by ``merge`` into one value for the batch."""

    name: str
    needs: tuple[str, ...]
    compute: Callable[[Block], Any]
    merge: Merge


def scan(view: BatchView, stats: Iterable[Stat], *, rows: int | None = None) -> dict[str, Any]:
    """The value of each statistic, by name. ``rows`` sets the rows of a block."""
    wanted = {stat.name: stat for stat in stats}
    parts: dict[str, list[Any]] = {name: [] for name in wanted}
    for block in view.blocks(rows):
        for name, stat in wanted.items():
            parts[name].append(stat.compute(block))
    return {name: stat.merge(parts[name]) for name, stat in wanted.items() if parts[name]}


def some(array: Any) -> bool:
    """True when any value of the array is not zero."""
    return bool(np.count_nonzero(array))


def any_of(name: str, needs: tuple[str, ...], compute: Callable[[Block], Any]) -> Stat:
    """A statistic that is true when it is true in any block."""
    return Stat(name, needs, compute, any)


def sum_of(name: str, needs: tuple[str, ...], compute: Callable[[Block], Any]) -> Stat:
    """A statistic that is summed over blocks."""
    return Stat(name, needs, compute, _total)


def per_row(name: str, needs: tuple[str, ...], compute: Callable[[Block], Any]) -> Stat:
    """A statistic with one value per row."""
    return Stat(name, needs, compute, _join)


SERIES = 0.01
"""Nats up to which a power series stands for the exponential."""

ATTENDED = ("attention_mask", "responses")
"""What the attention of the prompt and of the response part are read from."""
RESPONSE_LENGTH = per_row(
    "response_length", ATTENDED, lambda block: row_sum(block.response_attention)
)
"""Attended response tokens of each row."""
TRAINED_TOKENS = per_row("trained_tokens", ("response_mask",), lambda block: row_sum(block.mask))
"""Tokens of each row under the response mask."""
PROMPT_LENGTH = per_row(
    "prompt_length", ATTENDED, lambda block: row_sum(block.attended[:, : block.view.prompt or 0])
)
"""Attended prompt tokens of each row."""


def masked_range(field: str) -> Stat:
    """Smallest and largest value of ``field`` under the response mask; NaN spreads to both.

    A block without trained tokens contributes nothing; a batch without any has 0 and 0.
    """

    def compute(block: Block) -> Any:
        values = block[field]
        if fast.loops(values.size) is not None and fast.plain(values):
            low, high = row_range(values, block.mask)
            least, most = np.minimum.reduce(low), np.maximum.reduce(high)
            return None if least > most else np.array([least, most], np.float64)
        values = values[block.mask]
        if not values.size:
            return None
        return np.array([np.minimum.reduce(values), np.maximum.reduce(values)], np.float64)

    def merge(parts: Sequence[Any]) -> Any:
        ranges = [part for part in parts if part is not None]
        if not ranges:
            return np.zeros(2)
        low, high = np.asarray(ranges).T
        return np.array([low.min(), high.max()])

    return Stat(f"range:{field}", (field, "response_mask"), compute, merge)


class Gap(NamedTuple):
    """What separates two fields under the response mask, cells that are not finite left out.

    ``row_max`` is the largest ``|left - right|`` of each row; over all ``tokens`` there are the
    sums of ``|d|``, of ``d = left - right``, and of ``exp(d) - 1 - d``.
    """

    row_max: Any
    tokens: int
    absolute: float
    signed: float
    k3: float

    @property
    def largest(self) -> float:
        """The largest difference of all; 0 without tokens."""
        return float(self.row_max.max(initial=0.0))

    def mean(self, total: float) -> float:
        """``total`` over the tokens; 0 without tokens."""
        return float(total / max(self.tokens, 1))


def _sum_of_k3(diff: Any, size: Any) -> float:
    """The sum of ``exp(d) - 1 - d``; of small differences by its series, which is cheaper.

    Four terms are within ``d**4 / 360`` of it, relatively: below 1e-10 under :data:`SERIES`.
    """
    square = diff * diff
    series = float(np.vdot(square, 0.5 + diff * (1 / 6 + diff * (1 / 24 + diff / 120))))
    large = size > SERIES
    if not some(large):
        return series
    few, squares = diff[large], square[large]
    series -= float(np.vdot(squares, 0.5 + few * (1 / 6 + few * (1 / 24 + few / 120))))
    return series + float((np.expm1(np.clip(few, -20.0, 20.0)) - few).sum())


def masked_gap(left: str, right: str) -> Stat:
    """The :class:`Gap` between two fields ``[B,R]``."""

    def compute(block: Block) -> Gap:
        compiled = fast.loops(block[left].size)
        if compiled is not None and fast.plain(block[left], block[right]):
            return Gap(*compiled.masked_gap(block[left], block[right], block.mask))
        diff = np.subtract(block[left], block[right], dtype=np.float64)
        counted = block.mask & np.isfinite(diff)
        diff[~counted] = 0.0
        size = np.abs(diff)
        return Gap(
            row_max(size),
            int(np.count_nonzero(counted)),
            float(size.sum()),
            float(diff.sum()),
            _sum_of_k3(diff, size),
        )

    def merge(parts: Sequence[Gap]) -> Gap:
        if len(parts) == 1:
            return parts[0]
        rows, tokens, *sums = zip(*parts, strict=True)
        return Gap(np.concatenate(rows), sum(tokens), *map(sum, sums))

    return Stat(f"gap:{left}:{right}", (left, right, "response_mask"), compute, merge)
