"""A layout's values against the expected ones: how far off, where, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTOR = 4.0
"""A tolerance is so many times the measured noise ..."""
FLOOR = {"log_prob": 1e-6, "entropy": 1e-6, "loss": 1e-6, "gradient": 1e-5, "update": 1e-3}
"""... and at least this: nats, nats, share of the largest loss term, share of the largest gradient,
share of the length of the update (AdamW divides tiny gradients by their own size)."""


@dataclass(frozen=True)
class Values:
    """What a step computes. ``log_probs`` and ``entropy`` f[rows, response]; ``terms`` of the loss
    by name; ``gradients`` and ``moved`` (weights after one optimizer step less those before) by
    parameter name."""

    log_probs: Tensor
    entropy: Tensor
    terms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]


def differences(ours: Values, expected: Values) -> dict[str, Any]:
    """Largest differences, each with its place."""
    out: dict[str, Any] = {}
    for name, mine, theirs in (
        ("logprob", ours.log_probs, expected.log_probs),
        ("entropy", ours.entropy, expected.entropy),
    ):
        value, row, column = _worst(mine, theirs)
        out[f"max_abs_{name}_diff"], out[f"worst_{name}"] = value, [row, column]
    terms = {
        # NaN is no smaller and no larger than another number, so max() would pass it over.
        name: float("inf") if math.isnan(gap := abs(ours.terms[name] - value)) else gap
        for name, value in expected.terms.items()
    }
    scale = max((abs(value) for value in expected.terms.values()), default=0.0) or 1.0
    out["worst_term"] = max(terms, key=lambda name: terms[name])
    out["rel_loss_diff"] = terms[out["worst_term"]] / scale
    grads = {
        name: _largest(ours.gradients[name], expected.gradients[name])
        if name in ours.gradients
        else float("inf")
        for name in expected.gradients
    }
    out["worst_gradient"] = max(grads, key=lambda name: grads[name])
    out["max_abs_grad_diff"] = grads[out["worst_gradient"]]
    wrong = sum(float((ours.moved[n].double() - expected.moved[n]).square().sum()) for n in grads
                if n in ours.moved)  # fmt: skip
    moved = sum(float(value.double().square().sum()) for value in expected.moved.values())
    out["rel_update_diff"] = (wrong / moved) ** 0.5 if moved else 0.0
    return out


def tolerances(noise: Mapping[str, float], *, largest_gradient: float) -> dict[str, float]:
    """Bounds for :func:`differences`, from the same differences between two ways to compute the
    expected values."""
    return {
        "max_abs_logprob_diff": max(FACTOR * noise["max_abs_logprob_diff"], FLOOR["log_prob"]),
        "max_abs_entropy_diff": max(FACTOR * noise["max_abs_entropy_diff"], FLOOR["entropy"]),
        "rel_loss_diff": max(FACTOR * noise["rel_loss_diff"], FLOOR["loss"]),
        "max_abs_grad_diff": max(
            FACTOR * noise["max_abs_grad_diff"], FLOOR["gradient"] * largest_gradient
        ),
        "rel_update_diff": max(FACTOR * noise["rel_update_diff"], FLOOR["update"]),
    }


def wrong_values(found: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    """Names of the differences beyond their bounds; NaN is beyond."""
    return [name for name, bound in bounds.items() if not found[name] <= bound]


def _worst(ours: Tensor, expected: Tensor) -> tuple[float, int, int]:
    gap = (ours.double() - expected.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    at = int(gap.argmax())
    return float(gap.reshape(-1)[at]), *divmod(at, gap.shape[1])


def _largest(ours: Tensor, expected: Tensor) -> float:
    gap = (ours.double() - expected.double()).abs()
    return float(torch.where(gap.isnan(), torch.inf, gap).max()) if gap.numel() else 0.0
