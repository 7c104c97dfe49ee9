"""A layout's values against the expected ones: how far off, where, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

FACTOR = 4.0
"""A tolerance is so many times the measured noise ..."""
FLOOR = {
    "log_prob": 1e-6,
    "entropy": 1e-6,
    "value": 2e-6,
    "loss": 1e-6,
    "gradient": 1e-5,
    "update": 1e-3,
}
"""... and at least this: nats, nats, rewards, share of the largest loss term, share of the largest
gradient, share of the length of the update (AdamW divides tiny gradients by their own size)."""

ROUNDED = 4 * 2.0**-23
"""Log-probs, entropies and values may be off by so large a share of the largest: four times what
float32 rounds to."""
SCALED = 1e-3
"""Gradients are scaled by one factor if less than this share of them is left over."""


@dataclass(frozen=True)
class Values:
    """What a step computes. ``log_probs`` and ``entropy`` f[rows, response]; ``terms`` of the loss
    by name; ``gradients`` and ``moved`` (weights after one optimizer step less those before) by
    parameter name; ``layers`` f[rows, total, hidden] by layer, of expected values if asked for.
    ``token_values`` f[rows, response] and ``value_gradients`` of a value model on the same layers,
    if asked for."""

    log_probs: Tensor
    entropy: Tensor
    terms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    layers: Mapping[str, Tensor] = field(default_factory=dict)
    token_values: Tensor | None = None
    value_gradients: Mapping[str, Tensor] = field(default_factory=dict)


def differences(ours: Values, expected: Values) -> dict[str, Any]:
    """Largest differences, each with its place."""
    out: dict[str, Any] = {}
    for name, mine, theirs in (
        ("logprob", ours.log_probs, expected.log_probs),
        ("entropy", ours.entropy, expected.entropy),
    ):
        value, row, column = _worst(mine, theirs)
        out[f"max_abs_{name}_diff"], out[f"worst_{name}"] = value, [row, column]
    if expected.token_values is not None:
        assert ours.token_values is not None
        value, row, column = _worst(ours.token_values, expected.token_values)
        out["max_abs_value_diff"], out["worst_value"] = value, [row, column]
        out["max_abs_value_grad_diff"], out["worst_value_gradient"] = _worst_of(
            ours.value_gradients, expected.value_gradients
        )
    terms = {
        # NaN is no smaller and no larger than another number, so max() would pass it over.
        name: float("inf") if math.isnan(gap := abs(ours.terms[name] - value)) else gap
        for name, value in expected.terms.items()
    }
    scale = max((abs(value) for value in expected.terms.values()), default=0.0) or 1.0
    out["worst_term"] = max(terms, key=lambda name: terms[name])
    out["rel_loss_diff"] = terms[out["worst_term"]] / scale
    out["max_abs_grad_diff"], out["worst_gradient"] = _worst_of(ours.gradients, expected.gradients)
    wrong = sum(
        float((ours.moved[name].double() - expected.moved[name]).square().sum())
        for name in expected.gradients
        if name in ours.moved
    )
    moved = sum(float(value.double().square().sum()) for value in expected.moved.values())
    out["rel_update_diff"] = (wrong / moved) ** 0.5 if moved else 0.0
    return out


def tolerances(
    noise: Mapping[str, float],
    *,
    largest_gradient: float,
    largest_value_gradient: float = 0.0,
    largest: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Bounds for :func:`differences`, from the same differences between two ways to compute the
    expected values. ``largest`` absolute ``log_prob``, ``entropy`` and ``value``: a number of nine
    nats is rounded to 1e-6 by itself."""

    def least(name: str) -> float:
        return max(FLOOR[name], ROUNDED * largest.get(name, 0.0))

    bounds = {
        "max_abs_logprob_diff": max(FACTOR * noise["max_abs_logprob_diff"], least("log_prob")),
        "max_abs_entropy_diff": max(FACTOR * noise["max_abs_entropy_diff"], least("entropy")),
        "rel_loss_diff": max(FACTOR * noise["rel_loss_diff"], FLOOR["loss"]),
        "max_abs_grad_diff": max(
            FACTOR * noise["max_abs_grad_diff"], FLOOR["gradient"] * largest_gradient
        ),
        "rel_update_diff": max(FACTOR * noise["rel_update_diff"], FLOOR["update"]),
    }
    if "max_abs_value_diff" in noise:
        bounds["max_abs_value_diff"] = max(FACTOR * noise["max_abs_value_diff"], least("value"))
        bounds["max_abs_value_grad_diff"] = max(
            FACTOR * noise["max_abs_value_grad_diff"], FLOOR["gradient"] * largest_value_gradient
        )
    return bounds


def wrong_gradients(ours: Values, expected: Values, *, bound: float) -> list[str]:
    """Parameters whose gradient is off by more than ``bound``, or missing; in the model's order."""
    return [
        name
        for name, value in expected.gradients.items()
        if name not in ours.gradients or not _largest(ours.gradients[name], value) <= bound
    ]


def gradient_factor(ours: Values, expected: Values) -> float | None:
    """The one number by which every expected gradient is multiplied in ``ours``; None if there is
    none, or if it is 1 within a thousandth."""
    names = list(expected.gradients)
    if not names or any(name not in ours.gradients for name in names):
        return None
    flat = [
        torch.cat([of.gradients[name].double().flatten() for name in names])
        for of in (ours, expected)
    ]
    mine, theirs = flat
    square = float(theirs.square().sum())
    if not square:
        return None
    factor = float(mine @ theirs) / square
    rest = float((mine - factor * theirs).norm())
    if abs(factor - 1) <= SCALED or not rest <= SCALED * float(mine.norm()):
        return None
    return factor


def first_wrong(wrong: Sequence[str], *, layer: str | None, gradients: Sequence[str]) -> str | None:
    """The first place of a step that disagrees: a layer (if layers were compared), ``forward``,
    ``lm_head``, ``loss``, ``gradient NAME`` (the parameter nearest to the input), ``optimizer`` or,
    where all of these agree, ``value_head``.

    ``layer`` is the first diverging one, "" if all agree and None if they were not looked at.
    """
    if layer:
        return layer
    if {"max_abs_logprob_diff", "max_abs_entropy_diff"} & set(wrong):
        return "forward" if layer is None else "lm_head"
    if "rel_loss_diff" in wrong:
        return "loss"
    if "max_abs_grad_diff" in wrong:
        return f"gradient {gradients[0]}"
    if "rel_update_diff" in wrong:
        return "optimizer"
    return "value_head" if wrong else None


def wrong_values(found: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    """Names of the differences beyond their bounds; NaN and infinity are beyond every bound."""
    return [
        name
        for name, bound in bounds.items()
        if not found[name] <= bound or math.isinf(found[name])
    ]


def not_judged(bounds: Mapping[str, float], sizes: Mapping[str, float]) -> list[str]:
    """Names of the differences whose bound is as large as what is compared: zeros would agree.

    ``sizes`` are the largest absolute expected values, by the names of ``bounds``.
    """
    return [name for name, bound in bounds.items() if bound > 0 and bound >= sizes[name]]


def sizes_of(expected: Values) -> dict[str, float]:
    """What :func:`differences` would give for zeros in the place of ``expected``."""
    sizes = {
        "max_abs_logprob_diff": _size([expected.log_probs]),
        "max_abs_entropy_diff": _size([expected.entropy]),
        "rel_loss_diff": 1.0,
        "max_abs_grad_diff": _size(expected.gradients.values()),
        "rel_update_diff": 1.0,
        "max_abs_value_grad_diff": _size(expected.value_gradients.values()),
    }
    if expected.token_values is not None:
        sizes["max_abs_value_diff"] = _size([expected.token_values])
    return sizes


def _size(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value; NaN if there is one."""
    found = [float(tensor.abs().max()) for tensor in tensors if tensor.numel()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _worst(ours: Tensor, expected: Tensor) -> tuple[float, int, int]:
    gap = (ours.double() - expected.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    at = int(gap.argmax())
    return float(gap.reshape(-1)[at]), *divmod(at, gap.shape[1])


def _worst_of(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    gaps = {
        name: _largest(ours[name], value) if name in ours else float("inf")
        for name, value in expected.items()
    }
    name = max(gaps, key=lambda each: gaps[each])
    return gaps[name], name


def _largest(ours: Tensor, expected: Tensor) -> float:
    gap = (ours.double() - expected.double()).abs()
    return float(torch.where(gap.isnan(), torch.inf, gap).max()) if gap.numel() else 0.0
