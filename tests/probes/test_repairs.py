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


def test_one_pair_of_cells_that_fits_is_no_shift() -> None:
    """A shift leaves one column less; two cells have to agree after it."""
    right = values()[:1, :3]
    assert repairs.shift(sides(np.roll(right, 1, 1)[:, :2], right[:, :2])) is None
    found = repairs.shift(sides(np.roll(right, 1, 1), right))
    assert found is not None
    assert "100% of 2 tokens fit" in found.measured


@pytest.mark.parametrize(("moved", "found"), [(16, True), (15, False)])
def test_four_of_five_cells_have_to_fit(moved: int, found: bool) -> None:
    right = values()
    wrong = right + 5.0
    wrong[:, 1] = right[:, 0]
    wrong[moved:, 1] += 1.0  # of two columns one pair a row
    assert (repairs.shift(sides(wrong[:, :2], right[:, :2])) is not None) is found


def test_the_better_of_two_shifts_is_named() -> None:
    right = np.tile(values()[:, :1], (1, WIDTH))
    right[:, ::2] += np.arange(4) * 1.0
    wrong = np.roll(right, -2, 1)
    found = repairs.shift(sides(wrong, right))
    assert found is not None
    assert found.test == "shift by +2"


def test_columns_that_a_shift_leaves_without_a_source_are_wrong() -> None:
    right = values()
    for by, empty in ((1, -1), (-1, 0), (2, -2)):
        found = repairs.shift(sides(np.roll(right, by, 1), right))
        assert found is not None
        assert found.cells is not None
        assert found.cells[:, empty].all()


def test_one_row_that_fits_another_one_is_chance() -> None:
    right = values()
    wrong = right.copy()
    wrong[3] = right[4]
    assert repairs.row_permutation(sides(wrong, right)) is None
    wrong[4] = right[3]
    found = repairs.row_permutation(sides(wrong, right))
    assert found is not None
    assert found.measured.endswith("-> 0, 2 of 2 rows fit another one")


@pytest.mark.parametrize(("noise", "tokens"), [(FP32, 3), (HALF_NOISE, 6)])
def test_cells_from_which_a_row_is_told(noise: Noise, tokens: int) -> None:
    """Twice as many where values are known to half precision only."""
    for width, found in ((tokens, True), (tokens - 1, False)):
        right = values()[:, :width]
        gap = sides(np.roll(right, 1, 0), right, noise)
        assert (repairs.row_permutation(gap) is not None) is found


def test_half_of_the_rows_have_to_fit_another_one() -> None:
    right = values()
    for rows, found in ((10, True), (9, False)):
        wrong = right - 30.0
        wrong[:rows] = np.roll(right[:rows], 1, 0)
        assert (repairs.row_permutation(sides(wrong, right)) is not None) is found


def test_zeros_are_counted_among_the_cells_that_disagree() -> None:
    right = values()
    wrong = right.copy()
    right[:5, 0] = 0.0  # on either side
    wrong[5:9, 1] = 0.0
    wrong[9, 2] -= 1.0
    found = repairs.placeholder(sides(wrong, right))
    assert found is not None
    assert (found.test, found.measured) == ("exactly 0.0", "9 of 10 cells")


def test_what_counts_as_equal_in_half_precision() -> None:
    right = np.array([[-1.0, -8.0]])
    gap = Sides(right, right, np.ones((1, 2), bool), np.zeros((1, 2), bool), HALF_NOISE)
    assert gap.bound == 2 * HALF_NOISE.mean
    most = gap.bound + HALF_NOISE.relative * np.abs(right)
    assert gap.alike(right + 0.99 * most, right).all()
    assert not gap.alike(right - 1.01 * most, right).any()
    exact = Sides(right, right - 0.5, gap.mask, gap.bad, FP32)
    assert (exact.bound, exact.gap.tolist()) == (FP32.token, [[0.5, 0.5]])
