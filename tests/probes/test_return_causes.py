"""Causes of wrong returns and advantages, on three to five rows by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataproto_audit.probes.estimates import GAE, PLUS, REMAX, Estimate
from dataproto_audit.probes.return_causes import (
    FITS,
    close,
    explain_advantages,
    explain_returns,
    largest,
    row_order,
)

ROWS, WIDTH = 6, 5


def made(name: str = PLUS, *, gamma: float = 1.0, lam: float = 1.0, lengths: Any = None,
         seed: int = 0) -> Estimate:  # fmt: skip
    """Random rewards on every token; results are right until something changes them."""
    random = np.random.default_rng(seed)
    counts = np.array([5, 4, 5, 3, 4, 5]) if lengths is None else np.asarray(lengths)
    on = np.arange(WIDTH)[None] < counts[:, None]
    rewards = np.where(on, random.normal(size=on.shape), 0.0)
    values = random.normal(size=on.shape) if name == GAE else np.zeros(on.shape)
    baselines = random.normal(size=(len(on), 1)) if name == REMAX else np.zeros((len(on), 1))
    estimate = Estimate(name, rewards, on, values, baselines, np.zeros(on.shape),
                        np.zeros(on.shape), gamma, lam, 2.0**-23)  # fmt: skip
    estimate.returns = estimate.want_returns
    estimate.advantages = estimate.finished(estimate.raw)
    return estimate


def returns_of(estimate: Estimate, wrong: Any, bad: Any = None) -> Any:
    estimate.returns = wrong
    return explain_returns(estimate, estimate.on if bad is None else bad, estimate.on)


def advantages_of(estimate: Estimate, wrong: Any, **how: Any) -> Any:
    want = estimate.finished(estimate.raw)
    estimate.advantages = wrong
    return explain_advantages(estimate, estimate.on, want, **how)


def test_what_fits() -> None:
    """To ``FITS`` of values above 1, and to ``FITS`` itself below."""
    cells = np.array([True, True, False])
    want = np.array([0.0, 8.0, 5.0])
    assert close(want + np.array([0.99 * FITS, 0.99 * FITS * 8, 9.0]), want, cells)
    assert not close(want + np.array([1.01 * FITS, 0.0, 0.0]), want, cells)
    assert not close(want - [0.0, 1.01 * FITS * 8, 0.0], want, cells)
    assert not close(want, want, np.zeros(3, bool))
    assert largest(want - [0.5, 0.25, 7.0], want, cells) == 0.5
    assert largest(want, want, np.zeros(3, bool)) == 0.0


@pytest.mark.parametrize("used", [0.3, 0.77, 1.25, 1.5])
def test_a_discount_that_nobody_uses_is_read_off_the_last_two_tokens(used: float) -> None:
    said = returns_of(made(), made(gamma=used).want_returns)
    assert said.causes == ("wrong_discount",)
    assert list(said.evidence) == [f"gamma {used:g}"]


def test_what_grows_twofold_a_token_is_no_discount() -> None:
    said = returns_of(made(), made(gamma=2.0).want_returns)
    assert said.causes[0] == "wrong_discount"  # the usual first guess of it
    assert said.evidence == {}


@pytest.mark.parametrize(("gamma", "lam"), [(0.62, 0.9), (0.9, 0.37)])
def test_either_discount_of_gae_is_solved_for(gamma: float, lam: float) -> None:
    said = returns_of(made(GAE, gamma=0.9, lam=0.9), made(GAE, gamma=gamma, lam=lam).want_returns)
    assert list(said.evidence) == [f"gamma {gamma:g}, lambda {lam:g}"]
    assert said.causes == ("wrong_discount",)


def test_a_discount_of_zero_is_told_too() -> None:
    said = returns_of(made(), made(gamma=0.0).want_returns)
    assert list(said.evidence) == ["gamma 0"]
    said = returns_of(made(gamma=0.0), made(gamma=0.9).want_returns)
    assert list(said.evidence) == ["gamma 0.9"]


def test_returns_with_the_other_sign() -> None:
    said = returns_of(made(), -made().want_returns)
    assert said.causes == ("wrong_sign",)
    [(name, numbers)] = said.evidence.items()
    assert name == "with the other sign"
    before = 2 * np.abs(made().want_returns).max()
    assert numbers == f"max error {before:.3g} -> 0"


def test_a_sum_that_starts_again_at_a_gap() -> None:
    estimate = made()
    estimate.on[0, 2] = estimate.on[2, 1] = False
    estimate.__dict__.pop("raw", None)
    fresh = np.zeros(estimate.on.shape)
    for row in range(ROWS):
        running = 0.0
        for t in reversed(range(WIDTH)):
            running = estimate.rewards[row, t] + running if estimate.on[row, t] else 0.0
            fresh[row, t] = running
    estimate.__dict__.pop("want_returns", None)
    assert returns_of(estimate, fresh).causes == ("returns_reset_at_gap",)


def test_nothing_fits_random_returns() -> None:
    noise = np.random.default_rng(9).normal(size=(ROWS, WIDTH))
    said = returns_of(made(), noise)
    assert said.evidence == {}
    assert said.causes == (
        "wrong_discount", "gae_over_masked", "returns_reset_at_gap", "row_permutation",
    )  # fmt: skip
    assert returns_of(made(REMAX), noise).causes == ("returns_reset_at_gap", "row_permutation")


def test_rows_that_hold_what_belongs_to_others() -> None:
    estimate = made(lengths=[4] * ROWS)
    wrong = np.roll(estimate.want_returns, 2, 0)
    said = returns_of(estimate, wrong)
    assert said.causes == ("row_permutation",)
    assert said.evidence == {"rows matched anew": f"each of {ROWS} rows is another row's"}


def test_one_row_that_looks_like_another_is_an_accident() -> None:
    want = made(lengths=[4] * ROWS).want_returns
    on = np.ones(want.shape, bool)
    found, bad = want.copy(), np.zeros(want.shape, bool)
    found[0], bad[0] = want[1], True
    assert row_order(found, want, on, bad) == ""
    found[1], bad[1] = want[0], True
    assert row_order(found, want, on, bad) == "each of 2 rows is another row's"
    found[1, 0] += 3 * FITS * max(1.0, np.abs(want).max())
    assert row_order(found, want, on, bad) == ""


def test_a_row_is_not_its_own_neighbour() -> None:
    """Rows that hold what they should, named as wrong: no other row has that."""
    want = made(lengths=[4] * ROWS).want_returns
    assert row_order(want, want, np.ones(want.shape, bool), np.ones(want.shape, bool)) == ""


@pytest.mark.parametrize(("mean", "std"), [(3.0, 2.0), (-40.0, 0.01)])
def test_mean_and_std_that_were_used_are_told(mean: float, std: float) -> None:
    """Also where that gives values of some thousands: errors count in relation to them."""
    estimate = made()
    wrong = np.where(estimate.on, (estimate.raw - mean) / std, 0.0)
    rounded = 1 + 2e-5 * np.random.default_rng(3).uniform(-1, 1, wrong.shape)
    said = advantages_of(estimate, wrong * rounded)
    assert said.causes == ("wrong_whitening",)
    told = said.evidence["mean and std used"].split(", ")
    assert [float(x) for x in told] == pytest.approx([mean, std], rel=1e-3)
    mine = said.evidence["of the trained tokens"].split(", ")
    on = estimate.raw[estimate.on]
    assert [float(x) for x in mine] == pytest.approx([on.mean(), on.std(ddof=1)], rel=1e-4)
    assert "of all columns, padding included" not in said.evidence


def test_padding_that_was_counted_is_told() -> None:
    estimate = made()
    mean, std = estimate.raw.mean(), estimate.raw.std(ddof=1)
    wrong = np.where(estimate.on, (estimate.raw - mean) / std, 0.0)
    said = advantages_of(estimate, wrong)
    assert said.evidence["of all columns, padding included"] == f"{mean:.6g}, {std:.6g}"


def test_two_cells_lie_on_a_line_by_accident() -> None:
    estimate = made(lengths=[1, 1, 0, 0, 0, 0])
    said = advantages_of(estimate, np.where(estimate.on, [[3.0], [-7.0], [0], [0], [0], [0]], 0.0))
    assert "mean and std used" not in said.evidence


def test_equal_raw_advantages_lie_on_no_line() -> None:
    estimate = made()
    estimate.rewards = np.zeros(estimate.on.shape)
    estimate.__dict__.pop("raw", None)
    noise = np.random.default_rng(4).normal(size=estimate.on.shape)
    estimate.advantages = noise
    said = explain_advantages(estimate, estimate.on, np.zeros(noise.shape))
    assert said.evidence == {}
    assert said.causes == ("wrong_whitening", "wrong_group_normalisation", "row_permutation")


def test_constant_advantages_lie_on_no_line() -> None:
    said = advantages_of(made(), np.where(made().on, 1.0, 0.0))
    assert "mean and std used" not in said.evidence


@pytest.mark.parametrize(("ranks", "pieces"), [(3, 3), (None, 2), (5, 5), (None, ROWS)])
def test_each_rank_whitened_by_itself(ranks: int | None, pieces: int) -> None:
    estimate = made()
    wrong = np.zeros(estimate.on.shape)
    for part in np.array_split(np.arange(ROWS), pieces):
        raw, on = estimate.raw[part], estimate.on[part]
        wrong[part] = np.where(on, (raw - raw[on].mean()) / raw[on].std(ddof=1), 0.0)
    said = advantages_of(estimate, wrong, ranks=ranks)
    assert said.causes == ("wrong_whitening",)
    assert list(said.evidence) == [f"whitened in {pieces} pieces of the batch"]


def test_signs_and_missing_steps() -> None:
    estimate = made()
    want, raw = estimate.finished(estimate.raw), estimate.raw
    for wrong, cause, name in (
        (-want, "wrong_sign", "with the other sign"),
        (-raw, "wrong_sign", "raw"),
        (raw, "wrong_whitening", "not whitened"),
    ):
        said = advantages_of(made(), wrong)
        assert (said.causes, list(said.evidence)) == ((cause,), [name])
    greedy = made(REMAX)
    said = advantages_of(made(REMAX), greedy.raw + np.where(greedy.on, greedy.baselines, 0.0))
    assert said.causes == ("wrong_group_normalisation",)
    assert list(said.evidence) == ["without the greedy baseline"]
    said = advantages_of(made(REMAX), np.random.default_rng(2).normal(size=want.shape))
    assert said.causes == ("wrong_group_normalisation", "row_permutation")


def test_what_is_not_finite_has_no_other_cause() -> None:
    wrong = made().finished(made().raw)
    wrong[0, 0] = np.inf
    assert advantages_of(made(), wrong).causes == ("non_finite",)
