"""How far apart the token probabilities of two engines are: the numbers that verl logs.

Definitions as in verl's ``calculate_debug_metrics`` (``verl/utils/debug/metrics.py``, 0.9.1):
largest, mean and standard deviation of ``|exp(left) - exp(right)|``, and the Pearson correlation of
the two probabilities, over the tokens under the response mask. A cell that is not finite makes all
of them NaN, as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.codes import UsageError
from dataproto_audit.narrow import row_sum
from dataproto_audit.probes.scan import Stat, scan, some

FIELDS = ("old_log_probs", "rollout_log_probs")
FEW = 1e-3
"""Spread, relative to the squares, below which sums are taken in float64."""
NONE = 1e-12
"""Spread that is rounding in float64, too."""


class ProbabilityGap(NamedTuple):
    """Sums over ``tokens``: of ``p``, of ``p`` and ``q`` squared, of ``e = p - q``, its square
    and ``|e|``.
    """

    tokens: int
    largest: float
    p: float
    pp: float
    qq: float
    e: float
    ee: float
    absolute: float

    @property
    def mean(self) -> float:
        """Mean of ``|e|``; NaN without tokens."""
        return self.absolute / self.tokens if self.tokens else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of ``|e|``, n - 1 in the denominator; NaN below two tokens."""
        if self.tokens < 2:
            return math.nan
        return math.sqrt(max(self.ee - self.absolute * self.mean, 0.0) / (self.tokens - 1))

    @property
    def correlation(self) -> float:
        """Pearson correlation of ``p`` and ``q``; NaN where one of them does not vary, as below two
        tokens.

        From the variance of the difference, which is exact where the two hardly differ.
        """
        if self.tokens < 2:
            return math.nan
        if not min(self.spread_p, self.spread_q) > NONE:
            return math.nan
        of_p, of_q = self.pp * self.spread_p, self.qq * self.spread_q
        of_e = self.ee - self.e**2 / self.tokens
        return (of_p + of_q - of_e) / (2 * math.sqrt(of_p * of_q))

    @property
    def spread_p(self) -> float:
        """The part of the squares of ``p`` that is not its mean's; NaN where they are zero."""
        return 1 - self.p**2 / (self.tokens * self.pp) if self.pp else math.nan

    @property
    def spread_q(self) -> float:
        """The same of ``q``."""
        return 1 - (self.p - self.e) ** 2 / (self.tokens * self.qq) if self.qq else math.nan


def _sums(p: Any, q: Any) -> ProbabilityGap:
    """Of two flat arrays; ``p`` is used up."""
    first = p.sum(), np.vdot(p, p), np.vdot(q, q)
    e = np.subtract(p, q, out=p)
    second = e.sum(), np.vdot(e, e)
    absolute = np.abs(e, out=p)
    largest, sums = float(absolute.max(initial=0.0)), (*first, *second, absolute.sum())
    return ProbabilityGap(p.size, largest, *map(float, sums))


def _trained(block: Block, *fields: str) -> list[Any]:
    """Values of ``fields`` under the response mask, flat, as arrays of their own.

    Where each row trains on its first tokens and on no others, whole rows are copied, which is
    cheaper than picking cells.
    """
    mask = block.mask
    if some(mask[:, 1:] > mask[:, :-1]):
        return [block[name][mask] for name in fields]
    lengths = row_sum(mask).tolist()
    return [
        np.concatenate([row[:length] for row, length in zip(block[name], lengths, strict=True)])
        for name in fields
    ]


def probability_gap(left: str, right: str) -> Stat:
    """The :class:`ProbabilityGap` between the exponentials of two fields ``[B,R]``."""

    def compute(block: Block) -> ProbabilityGap:
        values = _trained(block, left, right)
        found = _sums(*map(np.exp, values))
        if min(found.spread_p, found.spread_q) < FEW:  # what float32 sums leave of it is rounding
            found = _sums(*(np.exp(value, dtype=np.float64) for value in values))
        return found

    def merge(parts: Sequence[ProbabilityGap]) -> ProbabilityGap:
        tokens, largest, *sums = zip(*parts, strict=True)
        return ProbabilityGap(sum(tokens), float(np.max(largest)), *map(math.fsum, sums))

    return Stat(f"probability:{left}:{right}", (left, right, "response_mask"), compute, merge)


GAP = probability_gap(*FIELDS)


def debug_metrics(batch: Any) -> dict[str, float]:
    """What verl's ``calculate_debug_metrics`` returns for ``batch``, under the same names.

    ``batch`` has ``old_log_probs`` and ``rollout_log_probs`` ``[B,R]`` and a ``response_mask``
    ``[B,R]``; any form that :func:`dataproto_audit.check` takes. Numbers agree within 1e-6. Raises
    :class:`UsageError` when one of the three is missing or of another shape. Not covered: verl's
    fallback to the attention mask.
    """
    view = BatchView.of(batch)
    needed = (*FIELDS, "response_mask")
    lacking = [name for name in needed if name not in view.tensors]
    if lacking:
        raise UsageError(
            "DPA101",
            f"the batch has no {', '.join(lacking)}.",
            "Compute old log-probs, and set rollout.calculate_log_probs=True.",
        )
    shapes = {name: view.numpy(name).shape for name in needed}
    if len(set(shapes.values())) > 1:
        raise UsageError(
            "DPA103", f"the shapes differ: {shapes}.", "All three are [rows, response columns]."
        )
    with np.errstate(all="ignore"):  # what is not finite shows in the numbers
        gap: ProbabilityGap | None = scan(view, [GAP]).get(GAP.name)
    gap = gap or ProbabilityGap(0, math.nan, *[0.0] * 6)
    return {
        "training/rollout_probs_diff_valid": int(gap.tokens > 0),
        "training/rollout_probs_diff_max": gap.largest if gap.tokens else math.nan,
        "training/rollout_probs_diff_mean": gap.mean,
        "training/rollout_probs_diff_std": gap.std,
        "training/rollout_actor_probs_pearson_corr": gap.correlation,
    }
