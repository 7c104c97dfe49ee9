"""Losses of the policy update, float64 and unsplit: one device, the whole mini-batch.

All functions take per-token tensors [rows, response], look at trained tokens only (a NaN off the
mask does no harm and gets no gradient), and are differentiable in ``log_probs`` and ``entropy``.
"""

from typing import TypedDict

import torch
from torch import Tensor

from dataproto_audit.reference.kl import LOG_RATIO_BOUND, kl_of_difference
from dataproto_audit.reference.shapes import Mask, Scalar, Tokens, as_bool, checked

TOKEN_MEAN = "token-mean"
TOKEN_SUM = "token-sum"
AGGREGATION_MODES: tuple[str, ...] = (
    TOKEN_MEAN,
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    TOKEN_SUM,
)

LOSS_MODES = ("vanilla", "gspo", "sapo", "geo_mean")
"""Policy losses that :func:`policy_loss` computes, by verl's names."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""verl bounds GSPO's log ratio from above only."""
TINY_WEIGHT = 1e-10
"""What verl adds to a weight of ``geo_mean``, whose logarithm it takes."""


class LossTerms(TypedDict):
    """Terms of one mini-batch, float64 scalars; a term whose input was not given is 0."""

    pg_loss: Tensor
    kl_loss: Tensor
    entropy_loss: Tensor
    total: Tensor
    normaliser: Tensor
    ppo_kl: Tensor
    pg_clipfrac: Tensor
    pg_clipfrac_lower: Tensor


@checked
def count_normaliser(response_mask: Mask, mode: str) -> float:
    """What ``mode`` divides by on this mask: trained tokens, rows with any, or 1 for a sum.

    Raises:
        ValueError: unknown mode.
    """
    return _Tokens(response_mask).normaliser(mode, None)


@checked
def aggregate(
    values: Tokens,
    response_mask: Mask,
    mode: str,
    *,
    normaliser: float | None = None,
    loss_scale_factor: float | None = None,
) -> Scalar:
    """One number from per-token values. L_i trained tokens of row i, N the normaliser.

    * ``token-mean``: sum of all values / N tokens
    * ``seq-mean-token-sum``: sum of all values / N rows
    * ``seq-mean-token-sum-norm``: the same / ``loss_scale_factor`` (default: padded width)
    * ``seq-mean-token-mean``: sum over rows of (row sum / L_i) / N rows
    * ``token-sum``: sum of all values

    ``normaliser`` defaults to the count on this mask (:func:`count_normaliser`). Pass the count of
    the whole mini-batch to get the share of a part: shares of a partition then add up to the
    whole. verl's engine counts rows that are fully masked, too; pass that count to follow it.
    An empty mask gives 0.

    Raises:
        ValueError: unknown mode, or a normaliser or scale factor that is not positive.
    """
    tokens = _Tokens(response_mask)
    return _aggregate(
        tokens.pick(values), tokens, mode, tokens.normaliser(mode, normaliser), loss_scale_factor
    )


@checked
def policy_loss(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    ref_log_prob: Tokens | None = None,
    entropy: Tokens | None = None,
    rollout_is_weights: Tokens | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = TOKEN_MEAN,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "low_var_kl",
    entropy_coeff: float = 0.0,
    normaliser: float | None = None,
    loss_scale_factor: float | None = None,
    loss_mode: str = "vanilla",
    gate_temperatures: tuple[float, float] = (1.0, 1.05),
) -> LossTerms:
    """PPO's clipped loss (arXiv 1707.06347) with dual clip (arXiv 1912.09729), KL and entropy.

    With ratio = exp(clamp(new - old, +-20)): per token max(-A ratio, -A clip(ratio, 1 - low,
    1 + high)), and for A < 0 at most -A c; times ``rollout_is_weights`` if given.
    ``loss_mode`` ``gspo`` (arXiv 2507.18071): the ratio of a token is exp of the mean log ratio of
    its row, and there is no dual clip. ``sapo`` (arXiv 2511.20347): no clip, but per token
    -A sigmoid(tau (ratio - 1)) 4 / tau, with the first of ``gate_temperatures`` for A > 0.
    ``geo_mean`` (GMPO, arXiv 2507.20673): every token of a row stands for its row, -mean(A)
    exp(mean of log ratios, each clipped to [-low, high] where that lowers A's gain); weights count
    by their geometric mean in the row.
    total = pg_loss + kl_loss_coef * kl_loss - entropy_coeff * entropy_loss, each aggregated by
    ``loss_agg_mode`` (:func:`aggregate`).

    ``ppo_kl`` (mean of old - new), ``pg_clipfrac`` (upper clip active) and ``pg_clipfrac_lower``
    (dual clip active) are plain means over the trained tokens given, whatever the mode.

    Raises:
        ValueError: a coefficient without its input, unknown mode or estimator, c <= 1.

    Not covered: other policy losses (CISPO, DPPO, ...). What gradients are stopped at is
    not what ``gspo`` differentiates, so that mode is for values only.
    """
    if loss_mode not in LOSS_MODES:
        raise ValueError(f"unknown loss_mode {loss_mode!r}; known: {', '.join(LOSS_MODES)}")
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; the dual clip needs a bound above 1")
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high

    tokens = _Tokens(response_mask)
    new = tokens.pick(log_probs)
    log_ratio = (new - tokens.pick(old_log_probs)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    if loss_mode == "gspo":
        means = tokens.of_rows(new - tokens.pick(old_log_probs))
        ratio = means.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
        clip_ratio_c = None

    cost = -tokens.pick(advantages)
    unclipped = cost * ratio
    clipped = cost * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    if loss_mode == "sapo":
        up, down = gate_temperatures
        tau = torch.where(cost < 0, up, down)
        loss = clipped = unclipped = cost * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
        clip_ratio_c = None
    weights = None if rollout_is_weights is None else tokens.pick(rollout_is_weights)
    if loss_mode == "geo_mean":
        drift, gain = new - tokens.pick(old_log_probs), -cost.sign()
        unclipped, clipped = -gain * drift, -gain * drift.clamp(-low, high)
        loss = (
            tokens.of_rows(cost) * tokens.of_rows(-gain * torch.maximum(unclipped, clipped)).exp()
        )
        weights = None if weights is None else tokens.of_rows((weights + TINY_WEIGHT).log()).exp()
        clip_ratio_c = None
    lower_hits = torch.zeros_like(loss, dtype=torch.bool)
    if clip_ratio_c is not None:
        bound = cost * clip_ratio_c
        lower_hits = (cost > 0) & (loss > bound)
        loss = torch.where(lower_hits, bound, loss)
    if weights is not None:
        loss = loss * weights

    count = tokens.normaliser(loss_agg_mode, normaliser)

    def combined(values: Tensor) -> Tensor:
        return _aggregate(values, tokens, loss_agg_mode, count, loss_scale_factor)

    pg_loss = combined(loss)
    total, zero = pg_loss, torch.zeros_like(pg_loss.detach())
    kl_loss = entropy_loss = zero
    if ref_log_prob is not None:
        kl_loss = combined(kl_of_difference(new - tokens.pick(ref_log_prob), kl_loss_type))
    elif kl_loss_coef:
        raise ValueError(f"kl_loss_coef is {kl_loss_coef} but ref_log_prob was not given")
    if entropy is not None:
        entropy_loss = combined(tokens.pick(entropy))
    elif entropy_coeff:
        raise ValueError(f"entropy_coeff is {entropy_coeff} but entropy was not given")
    # A term with weight 0 is reported but stays out of the graph: 0 * NaN would spoil the total.
    if kl_loss_coef:
        total = total + kl_loss_coef * kl_loss
    if entropy_coeff:
        total = total - entropy_coeff * entropy_loss

    trained = max(len(tokens), 1)
    return LossTerms(
        pg_loss=pg_loss,
        kl_loss=kl_loss,
        entropy_loss=entropy_loss,
        total=total,
        normaliser=torch.full_like(zero, count),
        ppo_kl=-log_ratio.detach().sum() / trained,
        pg_clipfrac=(clipped > unclipped).sum().double() / trained,
        pg_clipfrac_lower=lower_hits.sum().double() / trained,
    )


class _Tokens:
    """The trained tokens of a mask, as flat positions; values are gathered before any arithmetic.

    Gathering, unlike multiplying by the mask, keeps NaN and infinity off the mask out of sums and
    gradients.
    """

    def __init__(self, response_mask: Tensor) -> None:
        self.mask = as_bool(response_mask)
        self.rows, self.width = self.mask.shape
        self.positions = self.mask.reshape(-1).nonzero().squeeze(1)

    def __len__(self) -> int:
        return self.positions.numel()

    def pick(self, values: Tensor) -> Tensor:
        """Trained tokens of ``values`` in row order, float64 [tokens]."""
        return values.reshape(-1).index_select(0, self.positions).double()

    def row_means(self, picked: Tensor) -> Tensor:
        """Mean over the tokens of each row, [rows]; 0 for a row without tokens."""
        sums = picked.new_zeros(self.rows).index_add(0, self.positions // self.width, picked)
        return sums / self.mask.sum(dim=-1).clamp(min=1)

    def of_rows(self, picked: Tensor) -> Tensor:
        """The mean of its row for each token, [tokens]."""
        return self.row_means(picked)[self.positions // self.width]

    def normaliser(self, mode: str, given: float | None) -> float:
        """The given count, or the one of this mask (0 for an empty mask)."""
        _check_mode(mode)
        if given is not None:
            if not given > 0:
                raise ValueError(f"the normaliser of a loss must be positive, not {given}")
            return float(given)
        if mode == TOKEN_SUM:
            return 1.0
        return float(len(self) if mode == TOKEN_MEAN else int(self.mask.any(dim=-1).sum()))


def _aggregate(
    picked: Tensor, tokens: _Tokens, mode: str, count: float, scale: float | None
) -> Tensor:
    if mode == TOKEN_SUM:
        return picked.sum()
    divisor = max(count, 1.0) if len(tokens) == 0 else count
    if mode == "seq-mean-token-mean":
        return tokens.row_means(picked).sum() / divisor
    if mode == "seq-mean-token-sum-norm":
        scale = float(tokens.width) if scale is None else scale
        if not scale > 0:
            raise ValueError(f"loss_scale_factor must be positive, not {scale}")
        divisor *= scale
    return picked.sum() / divisor


def _check_mode(mode: str) -> None:
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(AGGREGATION_MODES)}")
