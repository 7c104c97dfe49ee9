"""KL estimators for one sampled token, in the names verl uses.

With ``d = log_prob - ref_log_prob`` of the sampled token (nats):

* ``kl``/``k1``: ``d``;
* ``abs``: ``|d|``;
* ``mse``/``k2``: ``d**2 / 2``;
* ``low_var_kl``/``k3``: ``exp(-d) + d - 1``, with ``d`` held in +-20 and the result in +-10.

Source: J. Schulman, "Approximating KL divergence" (2020). A trailing ``+`` takes the value of the
named estimator and the gradient of ``k2``, whose expectation is the gradient of the KL.
Not covered: the full-vocabulary KL.
"""

import torch
from beartype import beartype
from jaxtyping import Float, jaxtyped
from torch import Tensor

from dataproto_audit.codes import UsageError

DIFFERENCE_LIMIT = 20.0
"""Nats; keeps ``exp`` finite for a token that one policy has all but ruled out."""
VALUE_LIMIT = 10.0

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


@jaxtyped(typechecker=beartype)
def kl_per_token(
    log_probs: Float[Tensor, "rows response"],
    ref_log_probs: Float[Tensor, "rows response"],
    *,
    estimator: str = "low_var_kl",
) -> Float[Tensor, "rows response"]:
    """Per-token estimate of KL(policy || reference) in nats, same shape as the inputs.

    Raises ``UsageError`` DPA851 for an unknown name.
    """
    name = estimator.removesuffix("+")
    value = _estimate(log_probs, ref_log_probs, name)
    if name == estimator:
        return value
    gradient = 0.5 * (log_probs - ref_log_probs).square()
    return gradient + (value - gradient).detach()


def _estimate(log_probs: Tensor, ref_log_probs: Tensor, name: str) -> Tensor:
    difference = log_probs - ref_log_probs
    if name in ("kl", "k1"):
        return difference
    if name == "abs":
        return difference.abs()
    if name in ("mse", "k2"):
        return 0.5 * difference.square()
    if name in ("low_var_kl", "k3"):
        held = difference.clamp(-DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
        return (torch.exp(-held) + held - 1.0).clamp(-VALUE_LIMIT, VALUE_LIMIT)
    raise UsageError(
        "DPA851", f"unknown KL estimator {name!r}.", f"Choose one of {', '.join(ESTIMATORS)}."
    )
