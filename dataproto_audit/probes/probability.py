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
from dataproto_audit.probes.scan import Stat, scan

FIELDS = ("old_log_probs", "rollout_log_probs")


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
        n, q = self.tokens, self.p - self.e
        of_p, of_q = self.pp - self.p**2 / n, self.qq - q**2 / n
        if not (of_p > 0 and of_q > 0):
            return math.nan
        return (of_p + of_q - (self.ee - self.e**2 / n)) / (2 * math.sqrt(of_p * of_q))


def _sums(p: Any, q: Any) -> tuple[list[float], float]:
    """The sums of :class:`ProbabilityGap` in its order, and the largest ``|e|``; ``p`` is used."""
    first = p.sum(), np.vdot(p, p), np.vdot(q, q)
    e = np.subtract(p, q, out=p)
    second = e.sum(), np.vdot(e, e)
    absolute = np.abs(e, out=p)
    return list(map(float, (*first, *second, absolute.sum()))), float(absolute.max(initial=0.0))


def probability_gap(left: str, right: str) -> Stat:
    """The :class:`ProbabilityGap` between the exponentials of two fields ``[B,R]``."""

    def compute(block: Block) -> ProbabilityGap:
        mask = block.mask
        tokens, weight = int(np.count_nonzero(mask)), None
        p, q = np.exp(block[left]), np.exp(block[right])
        if tokens < mask.size:
            weight = mask.astype(p.dtype)
            p *= weight
            q *= weight
        found = _sums(p, q)
        if not np.isfinite(found[0]).all() and weight is not None:  # NaN times 0 is NaN
            found = _sums(np.exp(block[left][mask]), np.exp(block[right][mask]))
        return ProbabilityGap(tokens, found[1], *found[0])

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
