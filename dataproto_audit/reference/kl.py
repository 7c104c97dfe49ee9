"""Per-token estimators of KL(policy || reference) and what is made of them.

Notation: d = log p - log p_ref of the sampled token. Source: J. Schulman, "Approximating KL
Divergence" (2020); k3 is bounded as verl bounds it, d to +-20 and the result to +-10.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from dataproto_audit.reference.shapes import Exact, Mask, Scalar, Tokens, as_bool, checked

LOG_RATIO_BOUND = 20.0
LOW_VAR_BOUND = 10.0

_ALIASES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
KL_KINDS: tuple[str, ...] = tuple(_ALIASES) + tuple(f"{name}+" for name in _ALIASES)
"""Accepted names. A trailing ``+`` keeps the value and takes the gradient of k2."""


@checked
def kl_estimate(
    log_probs: Float[Tensor, "*shape"], ref_log_prob: Float[Tensor, "*shape"], kind: str
) -> Float[Tensor, "*shape"]:
    """Estimator ``kind`` of the KL at each token, float64, differentiable in ``log_probs``.

    k1 = d; abs = |d|; k2 = d^2/2; k3 = exp(-d) + d - 1, never negative. The value of ``k3+`` is
    that of k3 and its gradient that of k2, which is the gradient of the KL itself.

    Raises:
        ValueError: unknown ``kind``. The exact KL over the vocabulary is not covered.
    """
    return kl_of_difference(log_probs.double() - ref_log_prob.double(), kind)


def kl_of_difference(difference: Tensor, kind: str) -> Tensor:
    """:func:`kl_estimate` of d = log p - log p_ref, any shape, in the dtype of d."""
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_KINDS)}")
    base = _ALIASES[kind.removesuffix("+")]
    value = _estimate(difference, base)
    if not kind.endswith("+"):
        return value
    slope = _estimate(difference, "k2")
    return value.detach() + slope - slope.detach()


def _estimate(difference: Tensor, base: str) -> Tensor:
    if base == "k1":
        return difference
    if base == "abs":
        return difference.abs()
    if base == "k2":
        return difference.square() / 2
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # May come out a rounding error (2e-16) below 0; expm1 would be exact at three times the cost.
    return ((-bounded).exp() - 1 + bounded).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)


@checked
def rewards_with_kl(
    token_level_scores: Tokens,
    log_probs: Tokens,
    ref_log_prob: Tokens,
    response_mask: Mask,
    *,
    coefficient: float,
    kind: str = "kl",
) -> Exact:
    """Token-level rewards with the KL inside: r = s - coefficient * kl * mask."""
    penalty = kl_estimate(log_probs, ref_log_prob, kind)
    penalty = torch.where(as_bool(response_mask), penalty, penalty.new_zeros(()))
    return token_level_scores.double() - coefficient * penalty


@checked
def sequence_mean(values: Tokens, response_mask: Mask) -> Scalar:
    """Mean over rows of each row's mean over its trained tokens.

    A row without trained tokens counts as 0, as in verl's KL controller.
    """
    on = as_bool(response_mask)
    sums = torch.where(on, values.double(), values.new_zeros((), dtype=torch.float64)).sum(dim=-1)
    return (sums / on.sum(dim=-1).clamp(min=1)).mean()


@checked
def adapted_coefficient(
    coefficient: float, measured_kl: float, *, target: float, horizon: float, rows: int
) -> float:
    """Next KL coefficient of the adaptive controller (Ziegler et al., arXiv 1909.08593).

    coefficient * (1 + clip(measured / target - 1, +-0.2) * rows / horizon).
    """
    error = min(max(measured_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * rows / horizon)
