"""What an estimator should have given: by hand, and how exactly it must be met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataproto_audit.probes.estimates import (
    GAE,
    PLUS,
    PLUS_BASELINE,
    RELATIVE,
    REMAX,
    ROUNDINGS,
    USUAL,
    Estimate,
)

ON = np.array([[True, True, True, False], [True, True, False, False], [True] * 4])
REWARDS = np.array([[0.0, 0.0, 1.0, 0.0], [0.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]])
VALUES = np.array([[0.1, 0.2, 0.3, 9.0], [0.4, 0.5, 9.0, 9.0], [0.1, 0.0, 0.2, 0.3]])
SINGLE, HALF = 2.0**-23, 2.0**-7


def made(name: str, gamma: float | None = 1.0, lam: float | None = 1.0, **other: Any) -> Estimate:
    """An estimate of the three rows above; its results are whatever ``other`` says."""
    none = np.zeros(ON.shape)
    baselines = np.array([[0.25], [0.5], [1.0]]) if name == REMAX else np.zeros((3, 1))
    fields: dict[str, Any] = {
        "rewards": REWARDS, "on": ON, "values": np.where(ON, VALUES, 9.0) if name == GAE else none,
        "baselines": baselines, "advantages": none, "returns": None, "unit": SINGLE,
        "codes": np.array([0, 0, 1]) if name == PLUS_BASELINE else None,
    }  # fmt: skip
    return Estimate(name, gamma=gamma, lam=lam, **(fields | other))


def test_gae_by_hand() -> None:
    """Row 1 has two tokens: A1 = r1 - v1, A0 = r0 + gamma v1 - v0 + gamma lambda A1."""
    for gamma, lam in ((1.0, 1.0), (0.5, 0.25), (0.0, 0.9), (0.9, 0.0)):
        late = -2.0 - 0.5
        early = 0.0 + gamma * 0.5 - 0.4 + gamma * lam * late
        estimate = made(GAE, gamma, lam)
        assert estimate.raw[1].tolist() == pytest.approx([early, late, 0.0, 0.0])
        assert estimate.want_returns[1].tolist() == pytest.approx([early + 0.4, -2.0, 0.0, 0.0])


def test_a_discount_of_zero_is_a_discount() -> None:
    assert made(PLUS, 0.0).raw[2].tolist() == [0.0, 0.0, 0.0, 0.5]
    assert made(PLUS, 0.5).raw[2].tolist() == [0.0625, 0.125, 0.25, 0.5]
    assert list(made(GAE, 0.0, 0.0).guesses()) == [(0.0, 0.0)]


def test_remax_takes_the_greedy_score_off() -> None:
    estimate = made(REMAX, 0.5, 0.5)  # it has no discounts
    assert estimate.raw[:, 0].tolist() == [0.75, -2.5, -0.5]
    assert estimate.want_returns[0].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert estimate.finished(estimate.raw) is estimate.raw


def test_deviations_from_the_group_are_whitened_and_are_the_returns() -> None:
    estimate = made(PLUS_BASELINE, None, None)
    assert estimate.raw[:, 0].tolist() == [1.5, -1.5, 0.5]  # alone in its group
    assert np.array_equal(estimate.want_returns, estimate.finished(estimate.raw))


@pytest.mark.parametrize("name", [GAE, PLUS, PLUS_BASELINE])
def test_whitened_over_trained_tokens_and_zero_elsewhere(name: str) -> None:
    estimate = made(name)
    done = estimate.finished(estimate.raw)
    assert done[ON].mean() == pytest.approx(0.0, abs=1e-12)
    assert done[ON].std(ddof=1) == pytest.approx(1.0, rel=1e-6)
    assert not done[~ON].any()


def test_returns_tell_the_advantages_before_the_whitening() -> None:
    estimate = made(GAE, returns=np.where(ON, 2.0, 7.0))
    assert estimate.raw_of_returns[0].tolist() == pytest.approx([1.9, 1.8, 1.7, 0.0])
    greedy = made(REMAX, returns=np.ones(ON.shape))
    assert greedy.raw_of_returns[:, 0].tolist() == [0.75, 0.5, 0.0]


@pytest.mark.parametrize(
    ("name", "gamma", "lam", "settled"),
    [
        (GAE, None, 1.0, False), (GAE, 1.0, None, False), (GAE, 0.0, 0.0, True),
        (PLUS, None, 1.0, False), (PLUS, 1.0, None, True),
        (PLUS_BASELINE, None, None, True), (REMAX, None, None, True),
    ],
)  # fmt: skip
def test_which_discounts_an_estimator_needs(
    name: str, gamma: float | None, lam: float | None, settled: bool
) -> None:
    assert made(name, gamma, lam).settled is settled


def test_known_discounts_are_not_guessed() -> None:
    assert [pair[0] for pair in made(PLUS, None, None).guesses()] == list(USUAL)
    assert {pair[1] for pair in made(PLUS, None, None).guesses()} == {0.0}
    assert list(made(GAE, None, 0.9).guesses()) == [(gamma, 0.9) for gamma in USUAL]
    assert list(made(GAE, 0.9, None).guesses()) == [(0.9, lam) for lam in USUAL]
    assert len(list(made(GAE, None, None).guesses())) == len(USUAL) ** 2


@pytest.mark.parametrize("value", [1.0, 0.999, 0.995, 0.99, 0.98, 0.97, 0.95, 0.9, 0.8])
@pytest.mark.parametrize("name", [GAE, PLUS])
def test_every_discount_in_use_is_inferred_from_the_returns(name: str, value: float) -> None:
    truth = made(name, 1.0 if name == GAE else value, value)
    estimate = made(name, None, None, returns=truth.want_returns)
    assert estimate.inferred()
    assert (estimate.gamma, estimate.lam) == (truth.gamma, value if name == GAE else 0.0)
    assert estimate.settled


def test_nothing_is_inferred_from_other_returns_or_without_any() -> None:
    assert not made(PLUS, None, None).inferred()
    odd = made(PLUS, None, None, returns=made(PLUS, 0.7).want_returns)
    assert not odd.inferred()
    assert odd.gamma is None
    one_row = made(PLUS, 0.9).want_returns
    one_row[2, 0] += 0.1  # of the row with the most tokens, which is looked at last
    assert not made(PLUS, None, None, returns=one_row).inferred()


def _apart(error: float, *, unit: float = 0.0, want: float = 0.0, scaled: bool = False) -> Any:
    estimate = replace(made(PLUS), rewards=np.zeros(ON.shape), unit=unit)
    wanted = np.full(ON.shape, want)
    return estimate.apart(wanted + np.where(ON, error, 99.0), wanted, scaled=scaled)


def test_results_may_differ_by_rounding_and_no_more() -> None:
    """By ``RELATIVE`` up to 1 and in relation to larger values; what is off the mask is free."""
    assert _apart(0.99 * RELATIVE) is None
    assert np.array_equal(_apart(1.01 * RELATIVE), ON)
    assert _apart(0.99 * RELATIVE * 4, want=4.0) is None
    assert np.array_equal(_apart(1.01 * RELATIVE * 4, want=-4.0), ON)


def test_coarse_numbers_may_differ_by_their_own_rounding() -> None:
    step = ROUNDINGS * HALF
    assert _apart(RELATIVE * 4 + 0.99 * step * 4, want=4.0, unit=HALF) is None
    assert np.array_equal(_apart(RELATIVE * 4 + 1.01 * step * 4, want=4.0, unit=HALF), ON)


def test_terms_of_a_row_round_together() -> None:
    """Rounding grows with the root of the squares of rewards, twice the values, and the result."""
    estimate = made(GAE, unit=2.0**-10)
    terms = np.where(ON, np.abs(REWARDS) + 2 * np.abs(estimate.values) + np.abs(estimate.raw), 0.0)
    step = ROUNDINGS * estimate.unit
    want = estimate.want_returns
    most = step * np.sqrt((terms**2).sum(1))[:, None] + step * np.abs(want)
    most += RELATIVE * np.maximum(1.0, np.abs(want))
    assert estimate.apart(want + 0.99 * most, want, scaled=False) is None
    assert np.array_equal(estimate.apart(want + 1.01 * most, want, scaled=False), ON)


def test_whitening_magnifies_rounding() -> None:
    """By 1 / std: mean and std of the trained tokens are off by rounding, too."""
    scores = np.array([100.0, 100.001, 99.999])
    estimate = made(PLUS, rewards=np.where(REWARDS != 0, scores[:, None], 0.0))
    want = estimate.finished(estimate.raw)
    for error, scaled, within in ((0.05, False, False), (0.05, True, True), (5.0, True, False)):
        found = want + np.where(ON, error, 0.0)
        assert (estimate.apart(found, want, scaled=scaled) is None) is within
    greedy = made(REMAX, rewards=estimate.rewards)
    assert greedy.apart(greedy.raw + np.where(ON, 0.05, 0.0), greedy.raw, scaled=True) is not None


def test_nan_is_never_within_rounding() -> None:
    assert np.array_equal(_apart(np.nan), ON)


def test_some_rows_of_an_estimate() -> None:
    estimate = made(REMAX, returns=np.ones(ON.shape))
    part = estimate.of_rows([2, 0])
    assert part.raw[:, 0].tolist() == [-0.5, 0.75]
    assert part.returns.shape == (2, 4)
    assert made(GAE).of_rows([1]).returns is None
