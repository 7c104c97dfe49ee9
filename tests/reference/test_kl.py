import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.reference import kl

LOG_PROBS = st.lists(st.floats(-30, 0), min_size=1, max_size=8)


def _at(difference: float, kind: str) -> float:
    reference = torch.tensor([-3.0], dtype=torch.float64)
    return kl.kl_estimate(reference + difference, reference, kind).item()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", 0.2),
        ("kl", 0.2),
        ("abs", 0.2),
        ("k2", 0.02),
        ("mse", 0.02),
        ("k3", 0.0187307531),  # exp(-0.2) + 0.2 - 1
        ("low_var_kl", 0.0187307531),
    ],
)
def test_estimators_at_a_ratio_of_exp_0_2(kind: str, expected: float) -> None:
    assert _at(0.2, kind) == pytest.approx(expected, abs=1e-10)
    assert _at(0.2, f"{kind}+") == pytest.approx(expected, abs=1e-10)


def test_argument_order_changes_k3() -> None:
    assert _at(-0.2, "k3") == pytest.approx(math.exp(0.2) - 0.2 - 1)
    assert _at(-0.2, "k1") == pytest.approx(-0.2)


def test_k3_is_bounded() -> None:
    assert _at(-100.0, "k3") == 10.0
    assert _at(2.0, "k3") == pytest.approx(math.exp(-2.0) + 1)
    # d is cut at 20 before the result is cut at 10.
    assert _at(100.0, "k3") == 10.0


@pytest.mark.parametrize("kind", kl.KL_KINDS)
def test_equal_policies_have_no_divergence(kind: str) -> None:
    assert _at(0.0, kind) == 0.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_divergence(kind: str) -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl.kl_estimate(p.log(), q.log(), kind)).sum(), exact)


@pytest.mark.parametrize("name", ["k1+", "k3+", "low_var_kl+", "abs+"])
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    value = kl.kl_estimate(log_probs, reference, name)
    assert value.tolist() == kl.kl_estimate(log_probs, reference, name[:-1]).tolist()
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    assert gradient.tolist() == [0.5, -1.0]


def test_unknown_estimators_are_named() -> None:
    for kind in ("full", "k4", "k3++", "+"):
        with pytest.raises(ValueError, match=r"unknown KL estimator .*low_var_kl"):
            kl.kl_estimate(torch.zeros(1), torch.zeros(1), kind)


def test_the_sign_of_k1_misleads_where_abs_does_not() -> None:
    # verl-like report: logging k1 shows a negative "KL" (case B090).
    old, ref = torch.tensor([-0.5, -1.2, -0.3]), torch.tensor([-0.3, -1.0, -0.5])
    assert kl.kl_estimate(old, ref, "abs").mean().item() == pytest.approx(0.2, abs=1e-7)
    assert kl.kl_estimate(old, ref, "k1").mean().item() == pytest.approx(-0.0667, abs=1e-4)


def test_rewards_with_kl_subtract_on_the_mask_only() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0]])
    log_probs = torch.tensor([[-1.0, -2.0, 5.0]])
    reference = torch.tensor([[-1.5, -1.0, float("nan")]])
    mask = torch.tensor([[1, 1, 0]])
    rewards = kl.rewards_with_kl(scores, log_probs, reference, mask, coefficient=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.05, 1.1, 0.0])


def test_sequence_mean_weighs_rows_alike() -> None:
    values = torch.tensor([[1.0, 3.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, float("nan")]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    # (2 + 6 + 0) / 3; a token mean would be 10 / 3.
    assert kl.sequence_mean(values, mask).item() == pytest.approx(8 / 3)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(12.0, 0.102), (6.0, 0.1), (0.0, 0.098), (6.3, 0.1005)],
)
def test_adapted_coefficient_moves_by_at_most_a_fifth(measured: float, expected: float) -> None:
    new = kl.adapted_coefficient(0.1, measured, target=6.0, horizon=1000, rows=100)
    assert new == pytest.approx(expected)


@given(LOG_PROBS, st.integers(0, 2**31))
def test_k2_and_k3_are_never_negative(values: list[float], seed: int) -> None:
    log_probs = torch.tensor(values, dtype=torch.float64)
    noise = torch.randn(len(values), generator=torch.Generator().manual_seed(seed))
    for kind in ("k2", "k3", "abs"):
        # The last digit of d may be lost in exp(-d) - 1 + d.
        assert bool((kl.kl_estimate(log_probs, log_probs + noise, kind) >= -1e-15).all())
