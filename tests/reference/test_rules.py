from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.reference import rules
from dataproto_audit.reference.groups import GroupStats, group_stats
from dataproto_audit.reference.rules import GROUP_RULES, fit_group_rules


def _one_group(*scores: float, lengths: list[int] | None = None) -> GroupStats:
    exact = None if lengths is None else torch.tensor(lengths).double()
    return group_stats(torch.tensor(scores).double(), [0] * len(scores), lengths=exact)


def _random_batch(seed: int, groups: int = 6, n: int = 4) -> GroupStats:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(groups * n, generator=generator)
    scores[::5] = 0.0  # without a score of 0, GPG's factor is 1
    return group_stats(
        scores,
        torch.arange(groups).repeat_interleave(n),
        lengths=torch.randint(1, 17, (groups * n,), generator=generator).double(),
    )


def _by_hand(stats: GroupStats, name: str) -> list[float]:
    return GROUP_RULES[name](stats).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # mean 0.5, unbiased std 0.5, population std sqrt(1/6) = 0.4082483
        ("std_unbiased_eps_1e-6", [0.999998, -0.999998, 0.0]),
        ("std_unbiased_eps_1e-4", [0.9998000, -0.9998000, 0.0]),
        ("std_unbiased_eps_1e-9", [0.999999998, -0.999999998, 0.0]),
        ("std_population_eps_1e-8", [1.2247448, -1.2247448, 0.0]),
        ("mean_only", [0.5, -0.5, 0.0]),
        ("leave_one_out", [0.75, -0.75, 0.0]),
        # others of row 0: 0 and 0.5, mean 0.25, std 0.3535534; of row 2: 1 and 0, std 0.7071068
        ("leave_one_out_std", [2.1213143, -2.1213143, 0.0]),
        ("group_mean_batch_std", [0.9998000, -0.9998000, 0.0]),
        ("best_only_std", [0.999998, 0.0, 0.0]),
        ("best_only", [0.5, 0.0, 0.0]),
        # baseline (1 * 1 + 3 * 0 + 4 * 0.5) / 8 = 0.375
        ("length_weighted_baseline", [0.625, -0.375, 0.125]),
        # three rows, two scores that are not 0
        ("global_factor", [0.75, -0.75, 0.0]),
        ("raw_score", [1.0, 0.0, 0.5]),
        # over 8 tokens: mean 0.375, sum of squares 1 * 0.390625 + 3 * 0.140625 + 4 * 0.015625,
        # std = sqrt(0.875 / 7) = 0.3535534
        ("whitened_scores", [1.7677669, -1.0606602, 0.3535534]),
        # deviations 0.5, -0.5, 0: mean -0.125, same spread
        ("whitened_deviations", [1.7677669, -1.0606602, 0.3535534]),
    ],
)
def test_rules_on_one_group_of_three(name: str, expected: list[float]) -> None:
    stats = _one_group(1.0, 0.0, 0.5, lengths=[1, 3, 4])
    assert _by_hand(stats, name) == pytest.approx(expected, abs=1e-6)


def test_every_rule_has_a_hand_computed_case() -> None:
    marks = test_rules_on_one_group_of_three.pytestmark
    tested = {case[0] for mark in marks for case in mark.args[1]}
    assert tested == set(GROUP_RULES)


def test_nemo_rl_leaves_the_only_success_unscaled() -> None:
    # A file that NeMo-RL wrote: rewards 0 1 1 1 and 0 1 0 0.
    assert _by_hand(_one_group(0, 1, 1, 1), "leave_one_out_std") == pytest.approx(
        [-1.0, 0.57734925, 0.57734925, 0.57734925]
    )
    assert _by_hand(_one_group(0, 1, 0, 0), "leave_one_out_std") == pytest.approx(
        [-0.5773493, 1.0, -0.5773493, -0.5773493]
    )


def test_a_pair_has_no_spread_of_the_others() -> None:
    assert _by_hand(_one_group(1.0, 0.0), "leave_one_out_std") == [1.0, -1.0]


def test_pass_at_k_rewards_the_best_row_only() -> None:
    # EasyR1 issue 585: other rows kept their scores.
    assert _by_hand(_one_group(0.2, 1.0, 0.6), "best_only") == pytest.approx([0.0, 0.4, 0.0])
    assert _by_hand(_one_group(1.0, 1.0, 0.6), "best_only") == [0.0, 0.0, 0.0]
    assert _by_hand(_one_group(3.0), "best_only") == [0.0]


def test_an_untrained_group_has_no_length_weighted_baseline() -> None:
    stats = _one_group(1.0, 0.0, lengths=[0, 0])
    assert _by_hand(stats, "length_weighted_baseline") == [1.0, 0.0]


def test_no_score_at_all_leaves_gpg_finite() -> None:
    assert _by_hand(_one_group(0.0, 0.0), "global_factor") == [0.0, 0.0]


@pytest.mark.parametrize("name", GROUP_RULES)
def test_a_batch_of_equal_scores_is_finite(name: str) -> None:
    advantages = GROUP_RULES[name](_one_group(0.3, 0.3, 0.3))
    assert bool(advantages.isfinite().all())


@pytest.mark.parametrize("name", GROUP_RULES)
def test_the_rule_that_made_the_advantages_is_named(name: str) -> None:
    stats = _random_batch(seed=3)
    fits = fit_group_rules(stats, GROUP_RULES[name](stats))
    assert fits[0].rule.name == name
    assert fits[0].max_error == 0.0
    assert fits[1].max_error > 0.0
    assert [fit.max_error for fit in fits] == sorted(fit.max_error for fit in fits)


@pytest.mark.parametrize("name", [n for n in GROUP_RULES if not n.endswith(("1e-6", "1e-9"))])
def test_float32_is_enough_to_tell_most_rules_apart(name: str) -> None:
    stats = _random_batch(seed=4)
    first, second = fit_group_rules(stats, GROUP_RULES[name](stats).float())[:2]
    assert first.rule.name == name
    assert first.max_error < 1e-6
    assert second.max_error > 1e-5


def test_rows_alone_in_their_group_are_not_judged() -> None:
    stats = group_stats(torch.tensor([1.0, 0.0, 3.0]), ["A", "A", "B"])
    advantages = GROUP_RULES["mean_only"](stats)
    advantages[2] = 0.0  # another convention than ours
    assert fit_group_rules(stats, advantages)[0].max_error == 0.0


def test_only_singles_give_no_verdict() -> None:
    assert fit_group_rules(group_stats(torch.ones(3), [0, 1, 2]), torch.ones(3)) == []


def test_nan_advantages_fit_no_rule() -> None:
    stats = _random_batch(seed=5)
    fits = fit_group_rules(stats, torch.full((24,), float("nan")))
    assert {fit.max_error for fit in fits} == {float("inf")}


def test_a_rule_can_be_asked_alone() -> None:
    stats = _random_batch(seed=6)
    fits = fit_group_rules(stats, rules.mean_only(stats), rules=[GROUP_RULES["raw_score"]])
    assert [fit.rule.name for fit in fits] == ["raw_score"]


@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(GROUP_RULES)))
def test_rules_follow_a_permutation_of_the_rows(seed: int, name: str) -> None:
    stats = _random_batch(seed)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    moved = group_stats(stats.scores[order], stats.codes[order], lengths=stats.lengths[order])
    torch.testing.assert_close(
        GROUP_RULES[name](moved), GROUP_RULES[name](stats)[order], rtol=1e-9, atol=1e-9
    )


@given(seed=st.integers(0, 2**31))
def test_leave_one_out_is_the_score_minus_the_mean_of_the_others(seed: int) -> None:
    stats = _random_batch(seed, groups=2, n=5)
    direct, spread = [], []
    for row in range(10):
        others = (stats.codes == stats.codes[row]) & (torch.arange(10) != row)
        gap = stats.scores[row] - stats.scores[others].mean()
        direct.append(gap)
        spread.append(gap / (stats.scores[others].std() + 1e-6))
    torch.testing.assert_close(rules.leave_one_out(stats), torch.stack(direct))
    torch.testing.assert_close(rules.leave_one_out_std(stats), torch.stack(spread))


@pytest.mark.parametrize(
    ("rule", "eps", "root"),
    [
        (rules.scaled_by_std, 1e-6, False),
        (rules.leave_one_out_std, 1e-6, False),
        (rules.group_mean_batch_std, 1e-4, False),
        (rules.best_only, 1e-6, False),
        (rules.whitened_scores, 1e-8, True),
        (rules.whitened_deviations, 1e-8, True),
    ],
)
def test_the_eps_of_a_rule_is_that_of_its_source(rule: Any, eps: float, root: bool) -> None:
    """Read off scores of which it makes up much: spread 1e-4 and 2e-4, or its square."""
    stats = _one_group(1.0, 1.0001, 1.0003, lengths=[1, 1, 1])
    given = rule(stats, eps=eps)
    assert torch.equal(rule(stats), given)
    assert not torch.allclose(given, rule(stats, eps=3 * eps), rtol=1e-5)
    exact = rule(stats, eps=0.0)
    kept = exact != 0
    spread = given[kept] / exact[kept]  # std / (std + eps)
    assert bool((spread < 1).all())
    assert bool((rule(stats, eps=-0.0)[kept] == exact[kept]).all())


def test_the_population_std_is_smaller() -> None:
    stats = _one_group(1.0, 0.0, 0.5)
    wide = rules.scaled_by_std(stats, unbiased=False)
    assert (wide / rules.scaled_by_std(stats)).tolist()[:2] == pytest.approx([1.5**0.5] * 2, 1e-5)


def test_the_best_row_without_a_division() -> None:
    stats = _one_group(1.0, 0.0, 0.5)
    assert rules.best_only(stats, by_std=False).tolist() == [0.5, 0.0, 0.0]
    assert rules.best_only(stats).tolist() == pytest.approx([0.999998, 0.0, 0.0], abs=1e-6)
