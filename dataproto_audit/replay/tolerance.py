"""How far a recorded log-prob may lie from a recomputation, and which cells are then listed.

Whether a field is wrong is decided by the noise model of its precision; which cells are named is
decided by what the other cells of the same field differ by, which is much less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.probes.noise import noise_between

FEW_TOKENS = 4
"""Tokens of a row from which on its median tells."""
FLOOR = 3e-5
"""Float32 passes of two libraries differ by up to 2e-5 on tiny models."""
MOST = 1e-4
"""The same where most cells are wrong, so that none tells what is usual."""
MANY = 30.0
"""Times the median difference from where a cell stands out."""


def noise(
    gap: NDArray[Any], expected: NDArray[Any], looked: NDArray[np.bool_], dtype: str | None
) -> NDArray[Any]:
    """Bound on ``gap`` of each cell ``[rows, response]``.

    Half precision bounds the mean over all tokens and the median of a row, and no single token:
    healthy runs of large models show single tokens that are nats apart.
    """
    model = noise_between(dtype, "float32")
    if model.token is not None:
        out: NDArray[Any] = model.token + model.relative * np.abs(expected)
        return out
    seen = np.where(looked & np.isfinite(gap), gap, np.nan)
    told = seen[~np.isnan(seen)]
    everywhere = bool(len(told)) and float(told.mean()) > model.mean_of(len(told))
    far = np.zeros(len(gap), np.bool_)
    for row in np.flatnonzero((~np.isnan(seen)).sum(1) >= FEW_TOKENS):
        far[row] = np.nanmedian(seen[row]) > 2 * model.mean
    limit: NDArray[Any] = np.where(far | everywhere, 2 * model.mean, np.inf)
    return np.broadcast_to(limit[:, None], gap.shape)


def listed_bound(gap: NDArray[Any], looked: NDArray[np.bool_], dtype: str | None) -> Any:
    """From which difference on a cell of a wrong field is named, ``[rows, 1]`` or one number.

    In half precision a row that is wrong as a whole has its cells named from the mean bound on, as
    the checks do; of other rows only cells far outside of it are.
    """
    seen = gap[looked & np.isfinite(gap)]
    usual = float(np.median(seen)) if len(seen) else 0.0
    model = noise_between(dtype, "float32")
    if model.token is None:
        wrong = np.isfinite(noise(gap, gap, looked, dtype)).all(1, keepdims=True)
        most = np.where(wrong, model.mean, 2 * model.mean)
        return np.minimum(most, max(FLOOR, MANY * usual))
    return max(FLOOR, MANY * usual) if MANY * usual < model.token else MOST
