"""Advantage estimators by name.

An estimator takes :class:`AdvantageInputs` and returns ``(advantages, returns)``, both
f32[rows, response]. Register another one with :func:`register`; ``algorithm.adv_estimator`` then
names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, Shaped, jaxtyped
from torch import Tensor

from dataproto_audit.codes import UsageError

STD_EPSILON = 1e-6


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class AdvantageInputs:
    """What estimators read. ``uid`` names the group of each row; ``options`` holds the keys of
    the configuration's ``algorithm`` section that an estimator looks at."""

    token_level_rewards: Float[Tensor, "rows response"]
    response_mask: Shaped[Tensor, "rows response"]
    uid: Shaped[np.ndarray, " rows"]
    values: Float[Tensor, "rows response"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


Estimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
_ESTIMATORS: dict[str, Estimator] = {}


def register(name: str) -> Callable[[Estimator], Estimator]:
    """Make an estimator available under ``name``."""

    def add(estimator: Estimator) -> Estimator:
        _ESTIMATORS[name] = estimator
        return estimator

    return add


def compute_advantages(name: str, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """``(advantages, returns)`` by the estimator ``name``; raises DPA851 if there is none."""
    if name not in _ESTIMATORS:
        raise UsageError(
            "DPA851",
            f"unknown algorithm.adv_estimator {name!r}.",
            f"Choose one of {', '.join(sorted(_ESTIMATORS))}.",
        )
    return _ESTIMATORS[name](inputs)


@jaxtyped(typechecker=beartype)
def group_normalised(
    scores: Float[Tensor, " rows"], groups: Int[Tensor, " rows"], *, divide_by_std: bool
) -> Float[Tensor, " rows"]:
    """Each score less its group's mean, over the group's unbiased std plus 1e-6 if asked.

    ``groups`` numbers the groups from 0. A group of one row keeps its score (mean 0, std 1), as
    verl does. Statistics are taken in float64: a group of equal scores gives zeros.
    """
    wide = scores.double()
    size = torch.bincount(groups).double()
    mean = torch.zeros_like(size).index_add_(0, groups, wide) / size
    mean = torch.where(size > 1, mean, torch.zeros_like(mean))
    centred = wide - mean[groups]
    if divide_by_std:
        squares = torch.zeros_like(size).index_add_(0, groups, centred.square())
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        std = torch.where(size > 1, std, torch.ones_like(std))
        centred = centred / (std[groups] + STD_EPSILON)
    return centred.to(scores.dtype)


@register("grpo")
def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-relative advantage of an outcome reward, the same on every trained token of a row.

    The score is the sum of the row's token-level rewards, on the mask or off it. Source:
    DeepSeekMath (arXiv 2402.03300); without the division by the std
    (``norm_adv_by_std_in_grpo=false``) Dr.GRPO (2503.20783). Returns equal advantages.
    """
    _, numbers = np.unique(inputs.uid.astype(str), return_inverse=True)
    scores = group_normalised(
        inputs.token_level_rewards.sum(-1),
        torch.from_numpy(numbers.astype(np.int64)),
        divide_by_std=bool(inputs.options.get("norm_adv_by_std_in_grpo", True)),
    )
    advantages = scores[:, None] * inputs.response_mask.to(scores.dtype)
    return advantages, advantages


@register("gae")
def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over trained tokens, whitened; returns before whitening.

    ``A_t = r_t + gamma V_t' - V_t + gamma lam A_t'`` with ``t'`` the next trained token of the row,
    behind the last one 0; ``returns = A + V``. Advantages are then shifted and scaled to mean 0 and
    unbiased variance 1 over all trained tokens of the batch. Both are 0 off the mask (verl leaves
    other numbers there). Source: arXiv 1506.02438. Needs ``values`` (DPA851 without).
    """
    if inputs.values is None:
        raise UsageError("DPA851", "gae was given no values.", "Run a critic before it.")
    gamma, lam = (float(inputs.options.get(name, 1.0)) for name in ("gamma", "lam"))
    values, mask = inputs.values.double(), inputs.response_mask != 0
    rewards = inputs.token_level_rewards.double()
    raw = torch.zeros_like(values)
    following, running = values.new_zeros(2, len(values))  # of the next trained token
    for t in range(values.shape[1] - 1, -1, -1):
        on = mask[:, t]
        error = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(on, error + gamma * lam * running, running)
        following = torch.where(on, values[:, t], following)
        raw[:, t] = torch.where(on, running, 0.0)
    returns = torch.where(mask, raw + values, 0.0)
    dtype = inputs.token_level_rewards.dtype
    return whitened(raw, mask).to(dtype), returns.to(dtype)


@jaxtyped(typechecker=beartype)
def whitened(
    values: Float[Tensor, "rows response"], mask: Bool[Tensor, "rows response"]
) -> Float[Tensor, "rows response"]:
    """``values`` less their mean, over the root of their unbiased variance plus 1e-8, on ``mask``;
    0 off it. Fewer than two values are only shifted."""
    chosen = values[mask]
    if not chosen.numel():
        return torch.zeros_like(values)
    variance = chosen.var() if chosen.numel() > 1 else torch.ones((), dtype=values.dtype)
    scaled = (values - chosen.mean()) * (variance + 1e-8).rsqrt()
    return torch.where(mask, scaled, 0.0)
