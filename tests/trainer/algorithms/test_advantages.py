import numpy as np
import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.reference import advantages as reference
from dataproto_audit.trainer.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    group_normalised,
    register,
)


def inputs(seed: int, *, by_std: bool = True, groups: int = 7, n: int = 4) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    rows, width = groups * n, 5
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    rewards = torch.zeros(rows, width)
    scores = torch.randint(0, 3, (rows,), generator=generator).float()
    rewards[torch.arange(rows), lengths - 1] = scores
    uid = np.array([f"u{i % groups}" for i in range(rows)], dtype=object)
    options = {"norm_adv_by_std_in_grpo": by_std}
    return AdvantageInputs(rewards, mask, uid, options=options)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_grpo_equals_the_reference(seed, by_std):
    given = inputs(seed, by_std=by_std)
    advantages, returns = compute_advantages("grpo", given)
    expected, _ = reference.grpo(
        given.token_level_rewards, given.response_mask, given.uid, norm_by_std=by_std
    )
    assert torch.equal(advantages, returns)
    torch.testing.assert_close(advantages.double(), expected, atol=1e-6, rtol=1e-6)
    assert not advantages[given.response_mask == 0].any()


def test_equal_scores_give_exact_zeros_and_a_pair_gives_plus_and_minus_root_half():
    scores = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    normalised = group_normalised(scores, groups, divide_by_std=True)
    assert normalised[:3].abs().max() < 1e-9
    torch.testing.assert_close(
        normalised[3:], torch.tensor([0.5, -0.5]) * 2**0.5, atol=1e-5, rtol=0
    )


def test_a_row_without_peers_keeps_its_score_as_in_verl():
    out = group_normalised(torch.tensor([3.0]), torch.tensor([0]), divide_by_std=True)
    torch.testing.assert_close(out, torch.tensor([2.999997]), atol=1e-6, rtol=0)


def test_the_order_of_rows_does_not_matter():
    given = inputs(3)
    order = torch.randperm(len(given.uid), generator=torch.Generator().manual_seed(0))
    moved = AdvantageInputs(
        given.token_level_rewards[order], given.response_mask[order], given.uid[order.numpy()]
    )
    torch.testing.assert_close(
        compute_advantages("grpo", moved)[0], compute_advantages("grpo", given)[0][order]
    )


def valued(seed: int, *, gamma: float = 0.97, lam: float = 0.9) -> AdvantageInputs:
    """Rows with values everywhere and a gap in the mask of most of them."""
    given, generator = inputs(seed), torch.Generator().manual_seed(seed)
    mask = given.response_mask * (torch.rand(28, 5, generator=generator) > 0.2)
    values = torch.randn(28, 5, generator=generator)
    options = {"gamma": gamma, "lam": lam}
    return AdvantageInputs(given.token_level_rewards, mask, given.uid, values, options)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_reference(seed, gamma, lam):
    given = valued(seed, gamma=gamma, lam=lam)
    found = compute_advantages("gae", given)
    expected = reference.gae(
        given.token_level_rewards, given.values, given.response_mask, gamma=gamma, lam=lam
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)
        assert not ours[given.response_mask == 0].any()


def test_gae_of_a_batch_without_trained_tokens_or_with_one_is_finite():
    given = valued(0)
    for count in (0, 1):
        mask = torch.zeros_like(given.response_mask)
        mask[0, :count] = 1
        made = AdvantageInputs(given.token_level_rewards, mask, given.uid, given.values)
        advantages, returns = compute_advantages("gae", made)
        assert not advantages.any()
        assert int((returns != 0).sum()) <= count


def test_gae_without_values_says_what_is_missing():
    with pytest.raises(UsageError, match=r"DPA851 gae was given no values"):
        compute_advantages("gae", inputs(0))


def test_an_unknown_estimator_names_the_known_ones():
    with pytest.raises(UsageError, match=r"DPA851 .*'gea'.*grpo"):
        compute_advantages("gea", inputs(0))


def test_a_registered_estimator_is_found_by_name():
    @register("test_zero")
    def zero(given):
        return torch.zeros_like(given.token_level_rewards), given.token_level_rewards

    advantages, returns = compute_advantages("test_zero", inputs(0))
    assert not advantages.any()
    assert returns.any()


def test_shapes_that_disagree_are_refused_by_the_annotations():
    given = inputs(0)
    with pytest.raises(Exception, match="response_mask"):
        AdvantageInputs(given.token_level_rewards, given.response_mask[:, 1:], given.uid)
