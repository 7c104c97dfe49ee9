"""Optimizer steps on plain dictionaries of tensors: float64 arithmetic, nothing in place.

Parameters and gradients are mappings name -> tensor; results have the parameters' dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


def clip_gradients(
    gradients: Mapping[str, Tensor], *, max_norm: float
) -> tuple[dict[str, Tensor], float]:
    """Gradients scaled to a global 2-norm of at most ``max_norm``, and the norm before.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch. A norm that is not finite makes
    every gradient NaN or 0; callers skip such a step.
    """
    total = sum(float(value.double().square().sum()) for value in gradients.values())
    norm = total**0.5
    factor = min(1.0, max_norm / (norm + 1e-6))
    return {name: value * factor for name, value in gradients.items()}, norm


def sgd_step(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    lr: float,
    weight_decay: float = 0.0,
) -> dict[str, Tensor]:
    """p - lr (g + weight_decay p)."""
    _same_names(parameters, gradients)
    return {
        name: (value.double() - lr * (gradients[name].double() + weight_decay * value.double())).to(
            value.dtype
        )
        for name, value in parameters.items()
    }


@dataclass(frozen=True)
class AdamWState:
    """Steps done, and the float64 moving averages of gradient and squared gradient."""

    step: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)


def adamw_step(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: AdamWState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> tuple[dict[str, Tensor], AdamWState]:
    """One step of Adam with decoupled weight decay (arXiv 1711.05101), and the new state.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p = p (1 - lr weight_decay) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
    """
    _same_names(parameters, gradients)
    beta1, beta2 = betas
    step = state.step + 1
    updated, first, second = {}, {}, {}
    for name, value in parameters.items():
        gradient = gradients[name].double()
        m, v = state.first.get(name), state.second.get(name)
        m = torch.zeros_like(gradient) if m is None else m
        v = torch.zeros_like(gradient) if v is None else v
        first[name] = m = beta1 * m + (1 - beta1) * gradient
        second[name] = v = beta2 * v + (1 - beta2) * gradient.square()
        direction = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        decayed = value.double() * (1 - lr * weight_decay)
        updated[name] = (decayed - lr * direction).to(value.dtype)
    return updated, AdamWState(step, first, second)


def _same_names(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    differing = sorted(set(parameters) ^ set(gradients))
    if differing:
        raise ValueError(f"parameters and gradients differ in names: {', '.join(differing[:5])}")
