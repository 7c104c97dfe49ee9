"""The rules that turn scores of a group into one advantage a row, in use in the field.

Functions, and :data:`GROUP_RULES` with names, so that a probe can say which rule explains the
advantages it found. A group of one row has mean 0 and std 1 here; frameworks differ there, so
:func:`fit_group_rules` judges by the rows of larger groups only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dataproto_audit.reference.groups import GroupStats
from dataproto_audit.reference.shapes import ExactRows, checked


@checked
def scaled_by_std(stats: GroupStats, *, eps: float = 1e-6, unbiased: bool = True) -> ExactRows:
    """(S - mean) / (std + eps) over the group: GRPO, arXiv 2402.03300."""
    return stats.deviation / (stats.std(unbiased=unbiased) + eps)


@checked
def mean_only(stats: GroupStats) -> ExactRows:
    """S - mean over the group: Dr.GRPO, arXiv 2503.20783."""
    return stats.deviation


@checked
def leave_one_out(stats: GroupStats) -> ExactRows:
    """S - mean of the others = n/(n-1) (S - mean): RLOO, arXiv 2402.14740."""
    return stats.deviation * stats.size / (stats.size - 1).clamp(min=1)


@checked
def leave_one_out_std(stats: GroupStats, *, eps: float = 1e-6) -> ExactRows:
    """S minus the mean of the others, over the unbiased std of the others (NeMo-RL).

    Where the others are equal the difference is left as it is; a pair has one other row, so it is
    never scaled.
    """
    others = (stats.size - 1).clamp(min=1)
    # The others deviate from their own mean by this sum of squares (parallel-axis theorem).
    squares = (stats.squares - stats.deviation.square() * stats.size / others).clamp(min=0)
    std = (squares / (others - 1).clamp(min=1)).sqrt()
    # Below this, the sum of squares is rounding: the others are equal.
    equal = squares <= 1e-14 * stats.squares
    return leave_one_out(stats) / torch.where(equal | stats.single, 1.0, std + eps)


@checked
def group_mean_batch_std(stats: GroupStats, *, eps: float = 1e-4) -> ExactRows:
    """(S - group mean) / (unbiased std of all scores of the batch + eps) (TRL, scale "batch")."""
    return stats.deviation / (_spread(stats.scores, torch.ones_like(stats.scores)) + eps)


@checked
def whitened_scores(stats: GroupStats, *, eps: float = 1e-8) -> ExactRows:
    """Scores whitened over all trained tokens: REINFORCE++ without discount, arXiv 2501.03262."""
    return _whitened(stats.scores, stats.lengths, eps)


@checked
def whitened_deviations(stats: GroupStats, *, eps: float = 1e-8) -> ExactRows:
    """S - group mean, whitened over all trained tokens: REINFORCE++-baseline, 2501.03262."""
    return _whitened(stats.deviation, stats.lengths, eps)


@checked
def best_only(stats: GroupStats, *, eps: float = 1e-6, by_std: bool = True) -> ExactRows:
    """Best row: (best - second best), over std + eps unless ``by_std`` is off; 0 for the others.

    Pass@k training, arXiv 2503.19595. A tie for the best gives 0 to every row of the group, and so
    does a group of one row, which has no second best.
    """
    lowest = stats.scores.new_full((stats.num_groups,), -torch.inf)
    best = lowest.scatter_reduce(0, stats.codes, stats.scores, reduce="amax")[stats.codes]
    is_best = stats.scores == best
    rest = torch.where(is_best, -torch.inf, stats.scores)
    second = lowest.scatter_reduce(0, stats.codes, rest, reduce="amax")[stats.codes]
    alone = stats.total(is_best.double()) == 1
    gap = torch.where(is_best & alone & ~stats.single, best - second, 0.0)
    return gap / (stats.std() + eps) if by_std else gap


@checked
def length_weighted_baseline(stats: GroupStats) -> ExactRows:
    """S - sum(L S) / sum(L) over the group: OPO, arXiv 2505.23585.

    The baseline is 0 for a group of one row and for a group without trained tokens.
    """
    weight = stats.total(stats.lengths)
    baseline = stats.total(stats.lengths * stats.scores) / weight.clamp(min=1)
    return stats.scores - torch.where(stats.single | (weight == 0), 0.0, baseline)


@checked
def global_factor(stats: GroupStats) -> ExactRows:
    """rows / #(S != 0) * (S - group mean): GPG, arXiv 2504.02546, over the batch as given."""
    return stats.deviation * stats.size.numel() / stats.scores.count_nonzero().clamp(min=1)


@checked
def raw_score(stats: GroupStats) -> ExactRows:
    """S without any baseline: what remains when every row is a group of its own."""
    return stats.scores


def _spread(values: Tensor, weights: Tensor) -> Tensor:
    """Unbiased std, each value counted ``weights`` times; 0 for fewer than two."""
    count = weights.sum()
    mean = (weights * values).sum() / count.clamp(min=1)
    return ((weights * (values - mean).square()).sum() / (count - 1).clamp(min=1)).sqrt()


def _whitened(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    mean = (weights * values).sum() / weights.sum().clamp(min=1)
    return (values - mean) / (_spread(values, weights).square() + eps).sqrt()


@dataclass(frozen=True)
class GroupRule:
    """A named normalisation rule: call it with :class:`GroupStats`, get one advantage a row."""

    name: str
    formula: str
    used_by: str
    function: Callable[[GroupStats], Tensor]

    def __call__(self, stats: GroupStats) -> Tensor:
        """One float64 advantage a row, [rows]."""
        return self.function(stats)


_RULES = (
    GroupRule(
        "std_unbiased_eps_1e-6", "(S - mean) / (std + 1e-6)", "verl grpo, slime", scaled_by_std
    ),
    GroupRule(
        "std_unbiased_eps_1e-4",
        "(S - mean) / (std + 1e-4)",
        "TRL",
        lambda stats: scaled_by_std(stats, eps=1e-4),
    ),
    GroupRule(
        "std_unbiased_eps_1e-9",
        "(S - mean) / (std + 1e-9)",
        "OpenRLHF",
        lambda stats: scaled_by_std(stats, eps=1e-9),
    ),
    GroupRule(
        "std_population_eps_1e-8",
        "(S - mean) / (population std + 1e-8)",
        "open-instruct",
        lambda stats: scaled_by_std(stats, eps=1e-8, unbiased=False),
    ),
    GroupRule("mean_only", "S - mean", "Dr.GRPO, prime-rl", mean_only),
    GroupRule("leave_one_out", "S - mean of the others", "RLOO", leave_one_out),
    GroupRule(
        "leave_one_out_std",
        "(S - mean of the others) / (std of the others + 1e-6)",
        "NeMo-RL",
        leave_one_out_std,
    ),
    GroupRule(
        "group_mean_batch_std",
        "(S - mean) / (batch std + 1e-4)",
        "TRL with scale_rewards=batch",
        group_mean_batch_std,
    ),
    GroupRule(
        "whitened_scores", "S whitened over the batch's tokens", "REINFORCE++", whitened_scores
    ),
    GroupRule(
        "whitened_deviations",
        "S - mean, whitened over the batch's tokens",
        "REINFORCE++-baseline",
        whitened_deviations,
    ),
    GroupRule(
        "best_only_std", "(best - second) / (std + 1e-6) for the best row", "pass@k", best_only
    ),
    GroupRule(
        "best_only",
        "best - second for the best row",
        "pass@k without std",
        lambda stats: best_only(stats, by_std=False),
    ),
    GroupRule("length_weighted_baseline", "S - sum(L S) / sum(L)", "OPO", length_weighted_baseline),
    GroupRule("global_factor", "rows / #(S != 0) * (S - mean)", "GPG", global_factor),
    GroupRule("raw_score", "S", "groups of one row, plain REINFORCE", raw_score),
)
GROUP_RULES: dict[str, GroupRule] = {rule.name: rule for rule in _RULES}


@dataclass(frozen=True)
class RuleFit:
    """How well one rule explains the advantages: the largest error over the judged rows."""

    rule: GroupRule
    max_error: float


@checked
def fit_group_rules(
    stats: GroupStats,
    row_advantages: Float[Tensor, " rows"],
    *,
    rules: Iterable[GroupRule] = _RULES,
) -> list[RuleFit]:
    """Rules by how well they explain one advantage a row, best first; equals keep their order.

    Judges the rows of groups of two or more; the list is empty when there are none. Rules can
    coincide (all scores of a group equal: every centred rule gives 0; no score of 0: GPG is
    mean-only), and eps 1e-6 and 1e-9 differ by little more than float32 rounding, so report every
    rule whose error is within the tolerance, not only the first.
    """
    judged = ~stats.single
    if not bool(judged.any()):
        return []
    exact = row_advantages.double()
    fits = [
        RuleFit(rule, float((rule(stats) - exact)[judged].abs().nan_to_num(torch.inf).max()))
        for rule in rules
    ]
    return sorted(fits, key=lambda fit: fit.max_error)
