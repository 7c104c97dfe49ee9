"""Advantages and returns of a batch, float64, from the papers' formulas.

Every function returns ``(advantages, returns)``, both float64 [rows, response] and exactly 0 where
the response mask is 0. Implementations differ off the mask (GAE in verl leaves values there, ReMax
leaves returns on tool tokens), so compare on the mask. S is the row's score: the sum of its
token-level rewards over *all* columns, as the group-relative estimators use it; estimators with a
reward-to-go see only rewards on trained tokens. ``uid`` is one label a row, or precomputed int64
codes (:func:`dataproto_audit.reference.groups.group_codes`), which saves about 0.1 ms at 512 rows.

Not covered: GDPO, the optimal token baselines, and best-of-session broadcasting over several
outputs.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dataproto_audit.reference import rules
from dataproto_audit.reference.groups import (
    GroupStats,
    group_codes,
    group_stats,
    stats_of_codes,
)
from dataproto_audit.reference.recursions import discounted, gae_terms
from dataproto_audit.reference.rules import GROUP_RULES, fit_group_rules
from dataproto_audit.reference.shapes import Exact, GroupIds, Mask, Tokens, as_bool, checked

__all__ = [
    "ESTIMATOR_NEEDS",
    "GROUP_RULES",
    "fit_group_rules",
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rewards_to_go",
    "rloo",
    "row_stats",
    "whiten",
]

Pair = tuple[Exact, Exact]

ESTIMATOR_NEEDS: dict[str, tuple[str, ...]] = {
    "gae": ("token_level_rewards", "values", "response_mask"),
    "grpo": ("token_level_rewards", "response_mask", "uid"),
    "grpo_passk": ("token_level_rewards", "response_mask", "uid"),
    "gpg": ("token_level_rewards", "response_mask", "uid"),
    "opo": ("token_level_rewards", "response_mask", "uid"),
    "reinforce_plus_plus": ("token_level_rewards", "response_mask"),
    "reinforce_plus_plus_baseline": ("token_level_rewards", "response_mask", "uid"),
    "remax": ("token_level_rewards", "response_mask", "reward_baselines"),
    "rloo": ("token_level_rewards", "response_mask", "uid"),
}
"""Fields each estimator of this module reads, by verl's name of the estimator."""


@checked
def row_stats(token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds) -> GroupStats:
    """Group statistics of the rows' scores and lengths, for the rules of ``GROUP_RULES``."""
    return group_stats(
        token_level_rewards.double().sum(dim=-1),
        uid,
        lengths=as_bool(response_mask).sum(dim=-1).double(),
    )


def _spread_over_tokens(advantage: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.where(as_bool(response_mask), advantage[:, None], 0.0)
    return tokens, tokens


def _by_rule(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: GroupIds,
    rule: Callable[[GroupStats], Tensor],
) -> tuple[Tensor, Tensor]:
    stats = row_stats(token_level_rewards, response_mask, uid)
    return _spread_over_tokens(rule(stats), response_mask)


@checked
def grpo(
    token_level_rewards: Tokens,
    response_mask: Mask,
    uid: GroupIds,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """GRPO (arXiv 2402.03300): (S - mean) / (unbiased std + eps) over the group.

    ``norm_by_std=False`` is Dr.GRPO (arXiv 2503.20783): S - mean. A group of one row keeps its raw
    score (mean 0, std 1).
    """
    # This one runs at every step: no second check of a signature but the labels'.
    codes = uid if isinstance(uid, Tensor) else group_codes(uid)
    stats = stats_of_codes(token_level_rewards.double().sum(dim=-1), codes)
    advantage = stats.deviation / (stats.std() + eps) if norm_by_std else stats.deviation
    return _spread_over_tokens(advantage, response_mask)


@checked
def rloo(token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds) -> Pair:
    """RLOO (arXiv 2402.14740): S minus the mean of the group's other rows.

    A group of one row keeps its raw score; verl's ``rloo_vectorized`` gives it 0.
    """
    return _by_rule(token_level_rewards, response_mask, uid, rules.leave_one_out)


@checked
def grpo_passk(
    token_level_rewards: Tokens,
    response_mask: Mask,
    uid: GroupIds,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Pair:
    """Pass@k (arXiv 2503.19595): best minus second best for the best row, 0 for the others.

    Raises:
        ValueError: a group of one row, which has no second best.
    """
    stats = row_stats(token_level_rewards, response_mask, uid)
    if bool(stats.single.any()):
        row = int(stats.single.nonzero()[0])
        raise ValueError(f"pass@k needs two rows in every group; row {row} is alone in its group")
    advantage = rules.best_only(stats, eps=eps, by_std=norm_by_std)
    return _spread_over_tokens(advantage, response_mask)


@checked
def opo(token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds) -> Pair:
    """OPO (arXiv 2505.23585): S - sum(L S) / sum(L), L the trained tokens of a row."""
    return _by_rule(token_level_rewards, response_mask, uid, rules.length_weighted_baseline)


@checked
def gpg(token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds) -> Pair:
    """GPG (arXiv 2504.02546): rows / #(S != 0) * (S - group mean), over the batch as given."""
    return _by_rule(token_level_rewards, response_mask, uid, rules.global_factor)


@checked
def remax(
    token_level_rewards: Tokens,
    response_mask: Mask,
    reward_baselines: Float[Tensor, " rows"],
) -> Pair:
    """ReMax (arXiv 2310.10505): reward-to-go minus the score of the greedy response."""
    on = as_bool(response_mask)
    returns = rewards_to_go(token_level_rewards, response_mask)
    return torch.where(on, returns - reward_baselines.double()[:, None], 0.0), returns


@checked
def reinforce_plus_plus(
    token_level_rewards: Tokens, response_mask: Mask, *, gamma: float = 1.0, eps: float = 1e-8
) -> Pair:
    """REINFORCE++ (arXiv 2501.03262): discounted reward-to-go, whitened over the batch.

    Observation tokens between two turns are skipped: the return passes over them undiminished, so
    the turns before a tool reply share the reward. verl 0.7.1 resets the return there.

    Raises:
        ValueError: fewer than two trained tokens.
    """
    returns = rewards_to_go(token_level_rewards, response_mask, gamma=gamma)
    return whiten(returns, response_mask, eps=eps), returns


@checked
def reinforce_plus_plus_baseline(
    token_level_rewards: Tokens, response_mask: Mask, uid: GroupIds, *, eps: float = 1e-8
) -> Pair:
    """REINFORCE++-baseline (arXiv 2501.03262): S - group mean, whitened over the batch's tokens.

    Raises:
        ValueError: fewer than two trained tokens.
    """
    centred, _ = _by_rule(token_level_rewards, response_mask, uid, rules.mean_only)
    advantages = whiten(centred, response_mask, eps=eps)
    return advantages, advantages


@checked
def gae(
    token_level_rewards: Tokens,
    values: Tokens,
    response_mask: Mask,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
    eps: float = 1e-8,
) -> Pair:
    """GAE (arXiv 1506.02438) over the trained tokens of each row, as if the others were cut out.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t+1 is the
    next *trained* token and V is 0 after the last one. Returns are A + V before whitening. A
    reward on a masked token is lost, as it is in verl.

    Raises:
        ValueError: ``whitened`` with fewer than two trained tokens.
    """
    on, exact = as_bool(response_mask), values.double()
    parts = (x.cpu().numpy() for x in (token_level_rewards.double(), exact, on))
    raw = gae_terms(*parts, gamma=gamma, lam=lam)
    advantages = torch.from_numpy(raw).to(exact.device)
    returns = torch.where(on, advantages + exact, 0.0)
    return (whiten(advantages, response_mask, eps=eps) if whitened else advantages), returns


@checked
def rewards_to_go(token_level_rewards: Tokens, response_mask: Mask, *, gamma: float = 1.0) -> Exact:
    """G_t = r_t + gamma G_{t+1} over the trained tokens of each row; 0 off the mask."""
    rewards = token_level_rewards.double()
    returns = discounted(rewards.cpu().numpy(), as_bool(response_mask).cpu().numpy(), gamma)
    return torch.from_numpy(returns).to(rewards.device)


@checked
def whiten(values: Tokens, response_mask: Mask, *, eps: float = 1e-8) -> Exact:
    """(x - mean) / sqrt(unbiased variance + eps) over all trained tokens; 0 off the mask.

    Raises:
        ValueError: fewer than two trained tokens, for which there is no unbiased variance.
    """
    on = as_bool(response_mask)
    trained = values[on].double()
    if trained.numel() < 2:
        raise ValueError(f"whitening needs two trained tokens, the mask has {trained.numel()}")
    scaled = (values.double() - trained.mean()) / (trained.var(unbiased=True) + eps).sqrt()
    return torch.where(on, scaled, 0.0)
