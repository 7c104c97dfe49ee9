"""How far two healthy log-probs of one token may lie apart.

``fp32``: two float32 engines (transformers, vLLM, FSDP2) differed by at most 1.8e-5 over thousands
of steps of a tiny model (largest of the runs in docs/benchmarks); rounding grows with the size of
the logits, hence the relative part. ``half``: a bf16 forward differed from float32 by 0.03 to 0.07
at most on tiny models; published runs of large models report means of 0.010 to 0.018 with single
tokens far above, so half precision bounds the mean and not the single token. A precision that
nobody told counts as half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FULL = ("float32", "float64", "fp32", "f32", "float", "double")
FEW = 0.2
"""Means of N tokens scatter: their bound is wider by this over the root of N."""


@dataclass(frozen=True)
class Noise:
    """Bounds on ``|a - b|``: of a single token (None: no bound) and of the mean over tokens.

    ``above_zero`` is how far rounding may lift a log-prob above 0.
    """

    name: str
    token: float | None
    relative: float
    mean: float
    above_zero: float

    def exceeded(
        self, gap: NDArray[Any], size: NDArray[Any], mask: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | None:
        """Cells of ``gap`` that this noise does not explain, or None; all three ``[B,R]``.

        ``size`` is the log-prob itself. Cells that are not finite are left to the finite checks.
        """
        mask = mask & np.isfinite(gap)
        if self.token is not None:
            bad = mask & (gap > self.token + self.relative * np.abs(size))
            return bad if bad.any() else None
        if not mask.any() or gap[mask].mean(dtype=np.float64) <= self.mean_of(int(mask.sum())):
            return None
        bad = mask & (gap > self.mean)
        return bad if bad.any() else None

    def mean_of(self, tokens: int) -> float:
        """Bound on the mean over that many tokens."""
        return self.mean + FEW / math.sqrt(max(1, tokens))


FP32 = Noise("fp32 on both sides", 1e-3, 1e-4, 1e-4, 1e-4)
HALF_NOISE = Noise("half precision on one side", None, 0.0, 0.05, 0.1)
UNKNOWN = Noise("precision unknown, taken as half", None, 0.0, 0.05, 0.1)


def noise_between(left: str | None, right: str | None) -> Noise:
    """The noise model for log-probs computed in dtypes ``left`` and ``right``."""
    if not left or not right:
        return UNKNOWN
    known = all(str(dtype).removeprefix("torch.") in FULL for dtype in (left, right))
    return FP32 if known else HALF_NOISE
