"""The policy loss per token and its aggregation over a mini-batch.

Suffix legend: ``_BR`` rows of a micro-batch x response columns.

Every term of the loss (policy, KL, entropy) is a per-token quantity ``l``. A mini-batch's value of
it is ``sum(l * weight)`` over all tokens of all ranks, with a weight that depends on the
aggregation mode and on counts of the *whole* mini-batch. A micro-batch therefore contributes a
plain partial sum, and the result does not depend on how rows were split over ranks and
micro-batches.

===========================  =========================  ==========
mode                         weight of a trained token  normaliser
===========================  =========================  ==========
``token-mean``               1 / N                      N
``seq-mean-token-sum``       1 / S                      S
``seq-mean-token-mean``      1 / (S * L_i)              S
``seq-mean-token-sum-norm``  1 / (S * R)                S
===========================  =========================  ==========

N trained tokens and S rows with at least one of them in the mini-batch, L_i trained tokens of row
i, R the padded response width of the batch. Sources: PPO (arXiv 1707.06347), dual clip
(1912.09729), token-mean and the wider upper clip (DAPO, 2503.14476), the per-sequence mean
(DeepSeekMath, 2402.03300), the constant length (Dr.GRPO, 2503.20783).
"""

from dataclasses import dataclass

import torch
from beartype import beartype
from jaxtyping import Float, Shaped, jaxtyped
from torch import Tensor

from dataproto_audit.codes import UsageError

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Counts:
    """What a mini-batch holds over all ranks: the normaliser of its loss comes from here.

    ``tokens`` trained tokens, ``sequences`` rows with at least one of them, ``width`` columns of
    the response as padded in the whole batch.
    """

    tokens: int
    sequences: int
    width: int

    def normaliser(self, mode: str) -> int:
        """Tokens or sequences, whichever ``mode`` counts; raises DPA851 for another mode."""
        if mode not in AGGREGATION_MODES:
            raise UsageError(
                "DPA851",
                f"unknown actor.loss_agg_mode {mode!r}.",
                f"Choose one of {', '.join(AGGREGATION_MODES)}.",
            )
        return self.tokens if mode == "token-mean" else self.sequences

    def scale_factor(self, mode: str) -> float:
        """By what sums are divided besides the normaliser: the width in the ``norm`` mode."""
        return float(self.width) if mode == "seq-mean-token-sum-norm" else 1.0


@jaxtyped(typechecker=beartype)
def token_weights(
    mask: Shaped[Tensor, "rows response"],
    *,
    mode: str,
    counts: Counts,
) -> Float[Tensor, "rows response"]:
    """Weight of each token in the mini-batch's value; 0 outside ``mask``.

    All weights are 0 where the mini-batch has nothing to train on.
    """
    weights_BR = mask.to(torch.float32)
    if mode == "seq-mean-token-mean":
        weights_BR = weights_BR / weights_BR.sum(-1, keepdim=True).clamp(min=1.0)
    return weights_BR / (max(counts.normaliser(mode), 1) * counts.scale_factor(mode))


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token outcome of the clipped policy loss, each [rows, response].

    ``loss`` carries the gradient. ``kl`` is old minus new log-prob (nats), ``clipped`` and
    ``clipped_lower`` tell where the upper and the dual clip are active; all three are detached.
    """

    loss: Tensor
    kl: Tensor
    clipped: Tensor
    clipped_lower: Tensor


@jaxtyped(typechecker=beartype)
def policy_loss(
    log_probs: Float[Tensor, "rows response"],
    old_log_probs: Float[Tensor, "rows response"],
    advantages: Float[Tensor, "rows response"],
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyTerms:
    """PPO's clipped objective as a loss per token, with the dual clip for negative advantages.

    ``max(-A*r, -A*clip(r, 1-clip_low, 1+clip_high))``, and for ``A < 0`` at most ``-A*clip_c``;
    ``r = exp(log_probs - old_log_probs)`` with the exponent held in +-20. ``clip_c`` must be
    above 1 (DPA851). Not covered: importance weights against another rollout policy.
    """
    if clip_c <= 1.0:
        raise UsageError(
            "DPA851", f"actor.clip_ratio_c is {clip_c}.", "The dual clip needs a value above 1."
        )
    log_ratio_BR = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BR = log_ratio_BR.exp()
    plain_BR = -advantages * ratio_BR
    held_BR = -advantages * ratio_BR.clamp(1.0 - clip_low, 1.0 + clip_high)
    upper_BR = torch.maximum(plain_BR, held_BR)
    ceiling_BR = -advantages * clip_c
    negative_BR = advantages < 0
    loss_BR = torch.where(negative_BR, torch.minimum(upper_BR, ceiling_BR), upper_BR)
    return PolicyTerms(
        loss=loss_BR,
        kl=-log_ratio_BR.detach(),
        clipped=(held_BR > plain_BR).detach(),
        clipped_lower=((upper_BR > ceiling_BR) & negative_BR).detach(),
    )


@jaxtyped(typechecker=beartype)
def negative_log_likelihood(
    log_probs: Float[Tensor, "rows response"],
) -> Float[Tensor, "rows response"]:
    """The supervised warm-up's loss per token, in nats."""
    return -log_probs


@jaxtyped(typechecker=beartype)
def value_loss(
    values: Float[Tensor, "rows response"],
    old_values: Float[Tensor, "rows response"],
    returns: Float[Tensor, "rows response"],
    *,
    clip: float,
) -> tuple[Float[Tensor, "rows response"], Shaped[Tensor, "rows response"]]:
    """PPO's clipped value loss per token, and where the clip is active.

    ``max((v - R)^2, (v' - R)^2) / 2`` with ``v'`` the value held within ``clip`` of the old one
    (OpenAI's baselines, ppo2/model.py; verl's ``critic.cliprange_value``). Gradient by ``values``.
    """
    held_BR = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain_BR, clipped_BR = (values - returns).square(), (held_BR - returns).square()
    return torch.maximum(plain_BR, clipped_BR) / 2, (clipped_BR > plain_BR).detach()
