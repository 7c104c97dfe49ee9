"""Recursions over the tokens of a row: by hand, and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from dataproto_audit.reference.recursions import (
    discounted,
    gae_terms,
    mean_and_std,
    next_values,
    until_gaps,
)

WALKED = np.array([[True, False, True, True, False], [False, False, False, False, False]])
TERMS = np.array([[1.0, 50.0, 2.0, 4.0, 70.0], [1.0, 1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("factor", "want"), [(1.0, [7.0, 0, 6.0, 4.0, 0]), (0.5, [3.0, 0, 4.0, 4.0, 0])]
)
def test_cells_in_between_are_passed_over(factor: float, want: list[float]) -> None:
    got = discounted(TERMS, WALKED, factor)
    assert got.tolist() == [want, [0.0] * 5]


def test_a_sum_that_starts_again_at_every_gap() -> None:
    assert until_gaps(TERMS, WALKED, 1.0).tolist() == [[1.0, 0, 6.0, 4.0, 0], [0.0] * 5]


def test_the_next_value_is_that_of_the_next_walked_cell() -> None:
    values = np.array([[0.1, 9.0, 0.3, 0.4, 8.0]])
    walked = WALKED[:1]
    assert next_values(values, walked)[0, [0, 2, 3]].tolist() == [0.3, 0.4, 0.0]
    assert next_values(values, walked, beyond=True)[0, [0, 2, 3]].tolist() == [0.3, 0.4, 8.0]


def test_nothing_is_behind_the_last_column() -> None:
    values, walked = np.array([[1.0, 2.0]]), np.array([[True, True]])
    assert next_values(values, walked, beyond=True).tolist() == [[2.0, 0.0]]


def test_gae_by_hand() -> None:
    rewards, values = np.array([[0.0, 5.0, 1.0]]), np.array([[0.5, 7.0, 0.25]])
    walked = np.array([[True, False, True]])
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    got = gae_terms(rewards, values, walked, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(got, [[first, 0.0, last]], atol=1e-15)


def test_what_is_not_walked_does_no_harm() -> None:
    rewards, values = np.array([[0.0, np.nan, 1.0]]), np.array([[0.5, np.inf, 0.25]])
    walked = np.array([[True, False, True]])
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8)):
        assert np.isfinite(gae_terms(rewards, values, walked, gamma=gamma, lam=lam)).all()


def test_mean_and_std_are_those_of_the_chosen_cells() -> None:
    mean, std = mean_and_std(np.array([[1.0, 3.0, 99.0]]), np.array([[True, True, False]]), eps=0.0)
    assert (mean, std) == (2.0, pytest.approx(2**0.5))


def test_sums_over_every_column_begin_at_the_last_one() -> None:
    """And end at the first: no column is counted twice."""
    terms, walked = np.array([[1.0, 2.0, 4.0]]), np.ones((1, 3), bool)
    for sums in (discounted, until_gaps):
        assert sums(terms, walked, 0.5).tolist() == [[3.0, 4.0, 4.0]]
        assert sums(terms, walked, 1.0).tolist() == [[7.0, 6.0, 4.0]]
        assert sums(terms[:, :1], walked[:, :1], 0.5).tolist() == [[1.0]]


def test_the_eps_of_the_whitening() -> None:
    """1e-8 under the root: of cells that are all alike the std is 1e-4."""
    mean, std = mean_and_std(np.full((1, 3), 2.0), np.ones((1, 3), bool))
    assert (mean, std) == (2.0, pytest.approx(1e-4))
