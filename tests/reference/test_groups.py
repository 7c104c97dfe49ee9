import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.reference.groups import group_codes, group_stats, rounding_bound

SCORES = torch.tensor([1.0, 0.2, 0.6, 5.0], dtype=torch.float64)
UID = ["A", "A", "A", "B"]


def _float32_grpo(scores: torch.Tensor, codes: torch.Tensor, eps: float) -> torch.Tensor:
    """GRPO as a trainer computes it: float32, group by group."""
    out = torch.empty_like(scores)
    for code in codes.unique():
        group = scores[codes == code]
        mean, std = group.mean(), group.std()
        out[codes == code] = (group - mean) / (std + eps)
    return out


@pytest.mark.parametrize(
    "labels",
    [
        ["x", "y", "x", "z"],
        np.array(["x", "y", "x", "z"], dtype=object),
        np.array(["x", "y", "x", "z"]),
        ((1, 2), (3, 4), (1, 2), "z"),
        torch.tensor([0, 1, 0, 2]),
    ],
    ids=["list", "objects", "strings", "tuple of any", "codes"],
)
def test_codes_number_labels_by_first_appearance(labels: object) -> None:
    assert group_codes(labels).tolist() == [0, 1, 0, 2]


def test_codes_refuse_negative_numbers() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        group_codes(torch.tensor([0, -1]))


def test_statistics_are_those_of_the_row_s_group() -> None:
    stats = group_stats(SCORES, UID, lengths=torch.tensor([3.0, 1.0, 2.0, 4.0]).double())
    assert stats.num_groups == 2
    assert stats.size.tolist() == [3, 3, 3, 1]
    assert stats.mean.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.0])
    assert stats.deviation.tolist() == pytest.approx([0.4, -0.4, 0.0, 5.0])
    assert stats.std().tolist() == pytest.approx([0.4, 0.4, 0.4, 1.0])
    population = (0.32 / 3) ** 0.5
    assert stats.std(unbiased=False).tolist() == pytest.approx([population] * 3 + [1.0])
    assert stats.single.tolist() == [False, False, False, True]
    assert stats.total(stats.lengths).tolist() == [6, 6, 6, 4]


def test_codes_may_have_gaps() -> None:
    gapped = group_stats(SCORES, torch.tensor([7, 7, 7, 2]))
    plain = group_stats(SCORES, UID)
    assert torch.equal(gapped.deviation, plain.deviation)
    assert torch.equal(gapped.std(), plain.std())


def test_equal_scores_deviate_by_exactly_nothing() -> None:
    # In float64, three times 0.1 does not average to 0.1.
    stats = group_stats(torch.tensor([0.1] * 3 + [0.7] * 7).double(), [0] * 3 + [1] * 7)
    assert stats.deviation.count_nonzero() == 0
    assert stats.std().count_nonzero() == 0


def test_a_nan_stays_in_its_group() -> None:
    stats = group_stats(torch.tensor([float("nan"), 1.0, 2.0, 3.0]), ["A", "A", "B", "B"])
    assert stats.deviation.isnan().tolist() == [True, True, False, False]


def test_labels_must_match_the_rows() -> None:
    with pytest.raises(ValueError, match="3 group labels for 4 rows"):
        group_stats(SCORES, ["A", "A", "B"])


def test_an_empty_batch_has_no_groups() -> None:
    assert group_stats(torch.zeros(0), []).num_groups == 0


def test_near_ties_are_allowed_a_large_error() -> None:
    # Scores that differ in the last digit: float32 may miss the advantage by far more than 1e-5.
    tight = rounding_bound(group_stats(torch.tensor([0.7, 0.7, 0.6999999]), [0, 0, 0]))
    loose = rounding_bound(group_stats(torch.tensor([0.7, 0.1, 0.3]), [0, 0, 0]))
    assert bool((tight > 0.1).all())
    assert bool((loose < 1e-5).all())


def test_without_std_the_bound_follows_the_scores() -> None:
    stats = group_stats(torch.tensor([0.7, 0.7, 0.6999999]), [0, 0, 0])
    assert bool((rounding_bound(stats, norm_by_std=False) < 1e-6).all())


def test_a_larger_magnitude_widens_the_bound() -> None:
    stats = group_stats(torch.tensor([0.7, 0.1]), [0, 0])
    wide = rounding_bound(stats, magnitude=torch.tensor([70.0, 10.0]).double())
    assert bool((wide > 50 * rounding_bound(stats)).all())


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(2, 16),
    spread=st.sampled_from([1.0, 1e-2, 1e-5, 1e-7, 0.0]),
    offset=st.sampled_from([0.0, 0.1, 0.7, 3.0, -2.0]),
)
def test_float32_stays_within_the_rounding_bound(
    seed: int, n: int, spread: float, offset: float
) -> None:
    noise = torch.randn(4 * n, generator=torch.Generator().manual_seed(seed))
    scores = (offset + spread * noise).float()
    codes = torch.arange(4).repeat_interleave(n)
    stats = group_stats(scores, codes)
    exact = stats.deviation / (stats.std() + 1e-6)
    error = (_float32_grpo(scores, codes, 1e-6).double() - exact).abs()
    assert bool((error <= rounding_bound(stats, eps=1e-6)).all())


@given(seed=st.integers(0, 2**31), groups=st.integers(1, 5), n=st.integers(1, 6))
def test_deviations_sum_to_nothing_and_follow_a_permutation(seed: int, groups: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(groups * n, generator=generator)
    codes = torch.arange(groups).repeat(n)
    stats = group_stats(scores, codes)
    if n > 1:
        assert stats.total(stats.deviation).abs().max() < 1e-12
    order = torch.randperm(groups * n, generator=generator)
    moved = group_stats(scores[order], codes[order])
    torch.testing.assert_close(moved.deviation, stats.deviation[order], rtol=0, atol=1e-12)
    torch.testing.assert_close(moved.std(), stats.std()[order], rtol=0, atol=1e-12)
