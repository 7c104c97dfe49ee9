"""Recursions over the tokens of each row, in numpy and float64.

``walked [B,R]`` says which cells a recursion visits; it goes from the last one back and sees the
others not at all, as if they were cut out. Results are 0 there. All arrays are ``[rows, response]``
and every function is one pass over the columns at most.

Source: generalised advantage estimation, arXiv 1506.02438.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Exact = NDArray[np.float64]
Cells = NDArray[np.bool_]


def discounted(terms: Exact, walked: Cells, factor: float) -> Exact:
    """G_t = x_t + factor * G_{t+1}, where t+1 is the next walked cell; 0 behind the last one."""
    if factor == 1.0:
        kept = np.where(walked, terms, 0.0)
        sums: Exact = np.cumsum(kept[:, ::-1], 1)[:, ::-1]
        return np.where(walked, sums, 0.0)
    columns, on = np.ascontiguousarray(terms.T), np.ascontiguousarray(walked.T)
    out = np.zeros_like(columns)
    running = np.zeros(columns.shape[1])
    for t in range(len(columns) - 1, -1, -1):
        np.copyto(running, columns[t] + factor * running, where=on[t])
        np.copyto(out[t], running, where=on[t])
    return out.T


def next_values(values: Exact, walked: Cells, *, beyond: bool = False) -> Exact:
    """Value at the next walked cell of each cell; 0 behind the last one.

    ``beyond`` gives the last walked cell the value of the column behind it instead, if there is
    one: the classic slip of an end index that is one too high.
    """
    rows, width = values.shape
    at = np.where(walked, np.arange(width), width)
    first = np.minimum.accumulate(at[:, ::-1], 1)[:, ::-1]  # the first walked cell from t on
    following = np.full((rows, width), width)
    following[:, :-1] = first[:, 1:]
    if beyond:
        last = walked & (following == width)
        following[last] = np.nonzero(last)[1] + 1
    padded = np.concatenate([values, np.zeros((rows, 1))], 1)
    taken: Exact = np.take_along_axis(padded, following, 1)
    return taken


def gae_terms(
    rewards: Exact,
    values: Exact,
    walked: Cells,
    *,
    gamma: float,
    lam: float,
    beyond: bool = False,
) -> Exact:
    """Raw GAE: A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t."""
    delta = rewards + gamma * next_values(values, walked, beyond=beyond) - values
    return discounted(delta, walked, gamma * lam)


def until_gaps(terms: Exact, walked: Cells, factor: float) -> Exact:
    """As :func:`discounted`, but the sum starts at 0 again at every cell that is not walked."""
    out = np.zeros_like(terms)
    running = np.zeros(len(terms))
    for t in range(terms.shape[1] - 1, -1, -1):
        running = np.where(walked[:, t], terms[:, t] + factor * running, 0.0)
        out[:, t] = running
    return out


def mean_and_std(values: Exact, on: Cells, *, eps: float = 1e-8) -> tuple[float, float]:
    """Mean and sqrt(unbiased variance + eps) of the cells ``on``, which must be two or more."""
    trained: Any = values[on]
    return float(trained.mean()), float(np.sqrt(trained.var(ddof=1) + eps))
