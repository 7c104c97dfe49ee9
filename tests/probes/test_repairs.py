"""Repairs of a gap: what they set right, and what they leave alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.probes import repairs
from dataproto_audit.probes.noise import FP32, HALF_NOISE, Noise
from dataproto_audit.probes.repairs import Sides

ROWS, WIDTH = 20, 7


def values(seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(2.0, (ROWS, WIDTH))


def sides(wrong: np.ndarray, right: np.ndarray, noise: Noise = FP32) -> Sides:
    bound = noise.token or noise.mean
    return Sides(wrong, right, np.ones(wrong.shape, bool), np.abs(wrong - right) > bound, noise)


@given(by=st.sampled_from([1, -1, 2, -2]), seed=st.integers(0, 50), rows=st.integers(1, ROWS))
def test_a_shift_of_any_rows_is_undone(by: int, seed: int, rows: int) -> None:
    right = values(seed)
    wrong = right.copy()
    wrong[:rows] = np.roll(right[:rows], by, 1)
    found = repairs.shift(sides(wrong, right))
    assert found is not None
    assert found.test == f"shift by {-by:+d}"
    assert found.cells is not None
    assert np.flatnonzero(found.cells.any(1)).tolist() == list(range(rows))


@given(seed=st.integers(0, 50))
def test_other_weights_are_no_repair(seed: int) -> None:
    right = values(seed)
    gap = sides(right + np.random.default_rng(seed).normal(0, 0.4, right.shape), right)
    assert repairs.shift(gap) is None
    assert repairs.row_permutation(gap) is None
    assert repairs.placeholder(gap) is None


def test_half_of_the_cells_is_no_shift() -> None:
    right = values()
    wrong = np.roll(right, 1, 1)
    wrong[::2] += 3.0
    assert repairs.shift(sides(wrong, right)) is None


@pytest.mark.parametrize("noise", [FP32, HALF_NOISE])
@pytest.mark.parametrize("by", [1, 5, -3])
def test_rolled_rows_fit_others(by: int, noise: Noise) -> None:
    found = repairs.row_permutation(sides(np.roll(values(), by, 0), values(), noise))
    assert found is not None
    assert f"{ROWS} of {ROWS} rows fit another one" in found.measured


def test_two_tokens_fit_another_row_by_chance() -> None:
    right = values()[:, :2]
    assert repairs.row_permutation(sides(np.roll(right, 1, 0), right)) is None


@pytest.mark.parametrize(("zeros", "found"), [(10, True), (8, True), (5, False)])
def test_zeros_must_be_most_of_what_disagrees(zeros: int, found: bool) -> None:
    right = values()
    wrong = right.copy()
    wrong[:10, 0] -= 1.0
    wrong[:zeros, 0] = 0.0
    assert (repairs.placeholder(sides(wrong, right)) is not None) is found


def test_one_column_has_no_shift() -> None:
    right = values()[:, :1]
    assert repairs.shift(sides(right - 1.0, right)) is None
