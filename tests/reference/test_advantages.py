from collections.abc import Callable

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataproto_audit.reference import advantages as adv
from dataproto_audit.reference.masks import mask_of_lengths, outcome_rewards

Pair = tuple[Tensor, Tensor]

# Six rows, two prompts of three samples; scores on the last trained token.
LENGTHS = torch.tensor([3, 4, 2, 5, 2, 4])
MASK = mask_of_lengths(LENGTHS, 5).long()
SCORES = torch.tensor([1.0, 0.2, 0.6, 0.1, 0.9, 0.8], dtype=torch.float64)
REWARDS = outcome_rewards(SCORES, MASK)
UID = np.array(["A", "A", "A", "B", "B", "B"], dtype=object)

# One row of a tool run: columns 2..4 are the tool's tokens.
TOOL_MASK = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0]])
TOOL_REWARDS = outcome_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]))
TOOL_VALUES = torch.tensor([[0.2, 0.3, 9.0, 9.0, 9.0, 0.4, 0.5, 0.0]])

ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Pair]] = {
    "grpo": adv.grpo,
    "dr_grpo": lambda r, m, uid: adv.grpo(r, m, uid, norm_by_std=False),
    "rloo": adv.rloo,
    "grpo_passk": adv.grpo_passk,
    "opo": adv.opo,
    "gpg": adv.gpg,
    "reinforce_plus_plus": lambda r, m, uid: adv.reinforce_plus_plus(r, m, gamma=0.9),
    "reinforce_plus_plus_baseline": adv.reinforce_plus_plus_baseline,
    "remax": lambda r, m, uid: adv.remax(r, m, r.double().sum(dim=-1) / 2),
    "gae": lambda r, m, uid: adv.gae(r, r.cumsum(dim=-1).sin(), m, gamma=0.9, lam=0.8),
}


def _row_values(result: Pair) -> list[float]:
    """The one value of each row, after checking that it fills the mask and nothing else."""
    advantages, returns = result
    rows = advantages[:, 0]
    assert torch.equal(advantages, torch.where(MASK.bool(), rows[:, None], 0.0))
    assert torch.equal(returns, advantages)
    return rows.tolist()


def _random(seed: int, groups: int = 3, n: int = 3, width: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = groups * n
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    holes = torch.rand(rows, width, generator=generator) < 0.8
    mask = mask_of_lengths(lengths, width) & holes
    mask[:, 0] = True
    rewards = torch.randn(rows, width, generator=generator) * mask
    return rewards, mask, torch.arange(groups).repeat(n)


def test_grpo_of_two_prompts() -> None:
    # A: mean 0.6, std 0.4; B: mean 0.6, std sqrt(0.38 / 2) = 0.4358899
    assert _row_values(adv.grpo(REWARDS, MASK, UID)) == pytest.approx(
        [0.9999975, -0.9999975, 0.0, -1.1470761, 0.6882457, 0.4588304], abs=1e-6
    )
    assert _row_values(adv.grpo(REWARDS, MASK, UID, norm_by_std=False)) == pytest.approx(
        [0.4, -0.4, 0.0, -0.5, 0.3, 0.2]
    )


def test_grpo_of_a_pair_and_of_a_single() -> None:
    rewards = outcome_rewards(torch.tensor([1.0, 0.0, 3.0]), torch.ones(3, 2, dtype=torch.int64))
    advantages, _ = adv.grpo(rewards, torch.ones(3, 2, dtype=torch.int64), ["A", "A", "B"])
    assert advantages[:, 0].tolist() == pytest.approx([0.70711, -0.70711, 2.999997], abs=5e-6)
    assert advantages[2, 0].item() == pytest.approx(2.999997, abs=1e-7)


def test_grpo_of_scores_that_verl_normalised() -> None:
    # Rows of one prompt from a run of verl 0.7.1 (scores and advantages as it wrote them).
    scores = torch.tensor([0.352941185, 0.039999999, 0.076923080, 0.133333340])
    mask = torch.ones(4, 1, dtype=torch.int64)
    advantages, _ = adv.grpo(scores[:, None], mask, ["u"] * 4)
    recorded = [1.442626357, -0.7907425765, -0.5272334815, -0.1246500685]
    assert advantages[:, 0].tolist() == pytest.approx(recorded, abs=3e-7)


def test_grpo_gives_equal_scores_exactly_nothing() -> None:
    scores = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7])
    assert adv.grpo(outcome_rewards(scores, MASK), MASK, UID)[0].count_nonzero() == 0


def test_grpo_counts_rewards_off_the_mask() -> None:
    # The reward of a row that ends on a user's token sits where the mask is 0 and still counts.
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages, _ = adv.grpo(rewards, torch.tensor([[1, 1, 0], [1, 1, 0]]), ["A", "A"])
    assert advantages[0].tolist() == pytest.approx([0.70711, 0.70711, 0.0], abs=5e-6)


def test_a_baseline_of_other_scores_does_not_centre() -> None:
    # prime-rl PR 2040: corrected rewards must be compared with the mean of corrected rewards.
    mask = torch.ones(3, 1, dtype=torch.int64)
    corrected = torch.tensor([[0.9], [0.6], [0.0]])
    advantages, _ = adv.grpo(corrected, mask, [0, 0, 0], norm_by_std=False)
    assert advantages[:, 0].tolist() == pytest.approx([0.4, 0.1, -0.5])


def test_rloo() -> None:
    # n/(n-1) = 1.5 times the deviation
    assert _row_values(adv.rloo(REWARDS, MASK, UID)) == pytest.approx(
        [0.6, -0.6, 0.0, -0.75, 0.45, 0.3]
    )


def test_pass_at_k() -> None:
    assert _row_values(adv.grpo_passk(REWARDS, MASK, UID, norm_by_std=False)) == pytest.approx(
        [0.4, 0.0, 0.0, 0.0, 0.1, 0.0]
    )
    assert _row_values(adv.grpo_passk(REWARDS, MASK, UID)) == pytest.approx(
        [0.9999975, 0.0, 0.0, 0.0, 0.2294152, 0.0], abs=1e-6
    )


def test_pass_at_k_needs_a_second_row() -> None:
    with pytest.raises(ValueError, match="row 2 is alone in its group"):
        adv.grpo_passk(REWARDS, MASK, ["A", "A", "C", "B", "B", "B"])


def test_opo() -> None:
    # A: (3 * 1 + 4 * .2 + 2 * .6) / 9 = 5/9; B: (5 * .1 + 2 * .9 + 4 * .8) / 11 = 0.5
    assert _row_values(adv.opo(REWARDS, MASK, UID)) == pytest.approx(
        [0.4444444, -0.3555556, 0.0444444, -0.4, 0.4, 0.3], abs=1e-6
    )


def test_gpg() -> None:
    rewards = REWARDS.clone()
    rewards[3] = 0.0  # five of six scores are left: factor 1.2; B: mean 1.7 / 3
    assert _row_values(adv.gpg(rewards, MASK, UID)) == pytest.approx(
        [0.48, -0.48, 0.0, -0.68, 0.4, 0.28]
    )


def test_remax_subtracts_the_greedy_score() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    advantages, returns = adv.remax(rewards, mask, torch.tensor([0.25, 2.0]))
    assert returns.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.5, 0.0]]
    assert advantages.tolist() == [[0.75, 0.75, 0.0], [-1.0, -1.5, 0.0]]


def test_reward_to_go_ends_at_the_mask() -> None:
    # TRL issue 7024: rewards on padding must not flow into earlier tokens.
    rewards = torch.tensor([[0.4, 0.2, 0.3, 0.3]], dtype=torch.float64)
    returns = adv.rewards_to_go(rewards, torch.tensor([[1, 1, 0, 0]]))
    assert returns[0].tolist() == pytest.approx([0.6, 0.2, 0.0, 0.0])


def test_the_return_passes_over_a_tool_reply() -> None:
    # verl issue 7278: 0.7.1 gives the first turn a return of 0.
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    _, returns = adv.reinforce_plus_plus(rewards, mask)
    assert returns.tolist() == [[1, 1, 0, 0, 1, 1]]


def test_a_tool_reply_costs_no_discount() -> None:
    returns = adv.rewards_to_go(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5
    )
    assert returns.tolist() == [[0.5, 0.0, 1.0]]


def test_reinforce_plus_plus_whitens_the_returns() -> None:
    rewards = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, returns = adv.reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 1.0], [2.0, 0.0]]
    # mean 7/6, variance (16 + 1 + 25) / 36 / 2
    std = (42 / 72) ** 0.5
    assert advantages.flatten().tolist() == pytest.approx(
        [-4 / 6 / std, -1 / 6 / std, 5 / 6 / std, 0.0]
    )


def test_reinforce_plus_plus_baseline_centres_then_whitens() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, _ = adv.reinforce_plus_plus_baseline(rewards, mask, ["A", "A"])
    # deviations 0.5, 0.5, -0.5: mean 1/6, variance 1/3
    std = (1 / 3) ** 0.5
    assert advantages.flatten().tolist() == pytest.approx(
        [1 / 3 / std, 1 / 3 / std, -2 / 3 / std, 0.0]
    )


def test_gae_skips_tool_tokens() -> None:
    # miles PR 1827: walking over the tool's tokens gives 2.6123, 2.7915, ...
    advantages, returns = adv.gae(TOOL_REWARDS, TOOL_VALUES, TOOL_MASK, lam=0.9, whitened=False)
    expected = [0.6355, 0.595, 0.0, 0.0, 0.0, 0.55, 0.5, 0.0]
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.8355, 0.895, 0, 0, 0, 0.95, 1.0, 0], abs=1e-6)


def test_gae_ignores_what_the_critic_says_about_tool_tokens() -> None:
    noisy = torch.where(TOOL_MASK.bool(), TOOL_VALUES, float("nan"))
    for first, second in zip(
        adv.gae(TOOL_REWARDS, TOOL_VALUES, TOOL_MASK),
        adv.gae(TOOL_REWARDS, noisy, TOOL_MASK),
        strict=True,
    ):
        assert torch.equal(first, second)


def test_gae_loses_a_reward_on_a_masked_token() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = adv.gae(rewards, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    assert advantages.count_nonzero() == returns.count_nonzero() == 0


def test_whitening_needs_two_tokens() -> None:
    one = torch.tensor([[1, 0]])
    for call in (
        lambda: adv.whiten(torch.ones(1, 2), one),
        lambda: adv.gae(torch.ones(1, 2), torch.ones(1, 2), one),
        lambda: adv.reinforce_plus_plus(torch.ones(1, 2), one),
    ):
        with pytest.raises(ValueError, match="needs two trained tokens, the mask has 1"):
            call()


def test_a_mask_of_another_width_is_refused() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="response_mask"):
        adv.grpo(REWARDS, MASK[:, 1:], UID)


def test_advantages_are_no_mask() -> None:
    # verl issue 2506: another float field passed as the response mask.
    with pytest.raises(jaxtyping.TypeCheckError, match="response_mask"):
        adv.grpo(REWARDS, REWARDS, UID)


def test_labels_must_be_one_a_row() -> None:
    with pytest.raises(ValueError, match="2 group labels for 6 rows"):
        adv.grpo(REWARDS, MASK, ["A", "B"])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_are_float64_and_zero_off_the_mask(name: str) -> None:
    rewards, mask, codes = _random(seed=1)
    for result in ESTIMATORS[name](rewards.float(), mask, codes):
        assert result.dtype == torch.float64
        assert result[~mask].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
def test_masks_of_any_integer_kind(dtype: torch.dtype) -> None:
    rewards, mask, codes = _random(seed=2)
    expected = adv.grpo(rewards, mask, codes)[0]
    assert torch.equal(adv.grpo(rewards, mask.to(dtype), codes)[0], expected)


@pytest.mark.parametrize("name", adv.ESTIMATOR_NEEDS)
def test_the_estimators_are_here_under_verl_s_names(name: str) -> None:
    assert callable(getattr(adv, name))


@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(ESTIMATORS)))
def test_estimators_follow_a_permutation_of_the_rows(seed: int, name: str) -> None:
    rewards, mask, codes = _random(seed)
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed))
    moved = ESTIMATORS[name](rewards[order], mask[order], codes[order])
    for result, original in zip(moved, ESTIMATORS[name](rewards, mask, codes), strict=True):
        torch.testing.assert_close(result, original[order], rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(set(ESTIMATORS) - {"gae"})))
def test_padding_on_the_right_changes_nothing(seed: int, name: str) -> None:
    rewards, mask, codes = _random(seed)
    pad = torch.nn.functional.pad
    wide = ESTIMATORS[name](pad(rewards, (0, 3)), pad(mask, (0, 3)), codes)
    for result, original in zip(wide, ESTIMATORS[name](rewards, mask, codes), strict=True):
        torch.testing.assert_close(result[:, :-3], original, rtol=1e-12, atol=1e-12)


@given(
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
)
def test_gae_is_the_discounted_sum_of_its_deltas(seed: int, gamma: float, lam: float) -> None:
    rewards, mask, _ = _random(seed)
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(seed + 1))
    advantages, returns = adv.gae(rewards, values, mask, gamma=gamma, lam=lam, whitened=False)
    for row in range(len(rewards)):
        on = mask[row]
        r, v = rewards[row, on].double(), values[row, on].double()
        delta = r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
        direct = torch.stack(
            [
                sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
                for t in range(len(delta))
            ]
        )
        torch.testing.assert_close(advantages[row, on], direct)
        torch.testing.assert_close(returns[row, on], direct + v)


@given(seed=st.integers(0, 2**31))
def test_undiscounted_gae_returns_are_the_reward_to_go(seed: int) -> None:
    rewards, mask, _ = _random(seed)
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(seed + 1))
    _, returns = adv.gae(rewards, values, mask)
    torch.testing.assert_close(returns, adv.rewards_to_go(rewards, mask), rtol=0, atol=1e-6)


@given(seed=st.integers(0, 2**31))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int) -> None:
    rewards, mask, _ = _random(seed)
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(seed))
    advantages, _ = adv.gae(rewards, values, mask)
    assert advantages[mask].mean().abs() < 1e-9
    assert advantages[mask].var().item() == pytest.approx(1.0, abs=1e-6)


@given(seed=st.integers(0, 2**31), name=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_rows_of_a_group_cancel(seed: int, name: str) -> None:
    rewards, mask, codes = _random(seed)
    rows = ESTIMATORS[name](rewards, mask, codes)[0][:, 0]
    for code in codes.unique():
        assert rows[codes == code].sum().abs() < 1e-9
