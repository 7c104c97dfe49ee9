"""Where and how evenly two fields disagree."""

from typing import Any

import numpy as np
import pytest

from dataproto_audit.probes import shapes
from dataproto_audit.probes.noise import FP32
from dataproto_audit.probes.repairs import Sides

ROWS, WIDTH = 16, 6


def values() -> np.ndarray:
    return -np.random.default_rng(0).exponential(2.0, (ROWS, WIDTH)) - 0.01


def sides(change: Any, *, lengths: Any = WIDTH) -> Sides:
    """What ``change`` makes of the values, under a mask of these lengths."""
    right = values()
    wrong = right.copy()
    change(wrong)
    mask = np.arange(WIDTH)[None] < np.broadcast_to(lengths, ROWS)[:, None]
    return Sides(wrong, right, mask, mask & (np.abs(wrong - right) > 1e-3), FP32)


def _column(wrong: np.ndarray) -> None:
    wrong[:, 2] -= 4.0


def _tail(wrong: np.ndarray) -> None:
    wrong[:, 3:] -= 4.0


def _every_other(wrong: np.ndarray) -> None:
    wrong[1::2] -= np.linspace(1, 2, WIDTH)


def _one_row(wrong: np.ndarray) -> None:
    wrong[4] -= 2.0


def _everything(wrong: np.ndarray) -> None:
    wrong += np.random.default_rng(1).normal(0, 0.3, wrong.shape)


def test_a_column_is_one_place() -> None:
    found = shapes.one_place(sides(_column))
    assert found is not None
    assert found.measured == "column 2 of 16 rows"
    assert shapes.one_place(sides(_tail)) is None


def test_the_last_token_of_each_row_is_one_place() -> None:
    lengths = np.arange(ROWS) % 5 + 2

    def last(wrong: np.ndarray) -> None:
        wrong[np.arange(ROWS), lengths - 1] -= 3.0

    found = shapes.one_place(sides(last, lengths=lengths))
    assert found is not None
    assert found.measured == "the last token of 16 rows"


def test_a_row_of_one_token_each_is_no_place() -> None:
    assert shapes.one_place(sides(_everything, lengths=1)) is None


def test_from_a_column_on() -> None:
    found = shapes.from_a_column(sides(_tail))
    assert found is not None
    assert found.measured == "from column 3 on in 16 rows"
    assert shapes.from_a_column(sides(_everything)) is None
    assert shapes.from_a_column(sides(_column)) is None
    assert shapes.from_a_column(sides(_one_row)) is None


def test_few_rows_are_outliers_and_many_are_neighbours() -> None:
    few = shapes.few_rows(sides(_one_row))
    assert few is not None
    assert few.measured == "1 of 16 disagree, the others agree"
    assert shapes.few_rows(sides(_every_other)) is None
    many = shapes.some_rows(sides(_every_other))
    assert many is not None
    assert many.measured.endswith("all but the first of each 2")
    assert many.cells is not None
    assert many.cells.sum() == ROWS // 2 * WIDTH
    for nothing in (shapes.few_rows, shapes.some_rows):
        assert nothing(sides(_everything)) is None


def test_rows_that_agree_no_better_are_no_witnesses() -> None:
    def all_but_little(wrong: np.ndarray) -> None:
        wrong -= 9e-4
        wrong[1::2] -= 3e-3

    assert shapes.some_rows(sides(all_but_little)) is None


@pytest.mark.parametrize(("by", "found"), [(0.0125, True), (-0.04, True), (0.2, False)])
def test_an_offset_of_a_cast(by: float, found: bool) -> None:
    def offset(wrong: np.ndarray) -> None:
        wrong += by

    assert (shapes.uniform(sides(offset)) is not None) is found


def test_one_side() -> None:
    def up(wrong: np.ndarray) -> None:
        wrong += np.linspace(0.05, 0.2, WIDTH)

    assert shapes.one_sided(sides(up), sign=1.0) is not None
    assert shapes.one_sided(sides(up), sign=-1.0) is None
    assert shapes.one_sided(sides(_everything), sign=1.0) is None


def test_a_slope_must_explain_the_gap() -> None:
    def colder(wrong: np.ndarray) -> None:
        wrong *= 0.6

    found = shapes.sloped(sides(colder))
    assert found is not None
    assert found.name == "temperature_mismatch"
    assert shapes.sloped(sides(_everything)) is None
    assert shapes.sloped(sides(_one_row)) is None


@pytest.mark.parametrize(
    ("wrong", "right", "slope"),
    [
        ([-1.0, -2.0], [-0.5, -1.0], 0.5),
        ([-1.0, -2.0, -4.0], [-2.0, -4.0, -8.0], 2.0),
        ([-3.0], [-1.0], 1.0),
        ([], [], 1.0),
        ([-2.0, -2.0], [-1.0, -5.0], 1.0),  # values that do not vary have no slope
    ],
)
def test_the_slope_of_a_few_values(wrong: list[float], right: list[float], slope: float) -> None:
    assert shapes.slope_of(np.array(wrong), np.array(right)) == slope


def _cells(*cells: tuple[int, int], by: float = -4.0) -> Any:
    def change(wrong: np.ndarray) -> None:
        for row, column in cells:
            wrong[row, column] += by

    return change


def test_one_row_is_no_place_and_two_are() -> None:
    assert shapes.one_place(sides(_cells((3, 2)))) is None
    found = shapes.one_place(sides(_cells((3, 2), (5, 2))))
    assert found is not None
    assert (found.name, found.measured) == ("row_outlier", "column 2 of 2 rows")
    assert shapes.one_place(sides(_cells((3, 2), (5, 1)))) is None
    assert shapes.one_place(sides(_cells((3, 2), (5, 2), (5, 3)))) is None
    assert shapes.from_a_column(sides(_cells((3, 5)))) is None


@pytest.mark.parametrize(("agree", "found"), [(3, False), (2, True)])
def test_from_a_column_on_means_most_of_what_follows(agree: int, found: bool) -> None:
    """Of 12 cells, four of five have to disagree: the first column as a whole among them."""

    def change(wrong: np.ndarray) -> None:
        _tail(wrong)
        wrong[4:] = values()[4:]
        wrong[:agree, 5] = values()[:agree, 5]

    assert (shapes.from_a_column(sides(change)) is not None) is found


def test_a_quarter_of_the_rows_is_few() -> None:
    for rows, found in ((4, True), (5, False)):
        cause = shapes.few_rows(sides(_cells(*((row, 1) for row in range(rows)))))
        assert (cause is not None) is found


def test_rows_agree_plainly_at_a_tenth_of_the_gap() -> None:
    for by, found in ((9e-3, False), (1.1e-2, True)):

        def change(wrong: np.ndarray, by: float = by) -> None:
            wrong -= 9.9e-4
            wrong[0] -= by - 9.9e-4

        assert (shapes.few_rows(sides(change)) is not None) is found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_but_the_first_of_each_pack(size: int) -> None:
    def change(wrong: np.ndarray) -> None:
        wrong[np.arange(ROWS) % size != 0] -= 2.0

    found = shapes.some_rows(sides(change))
    assert found is not None
    assert found.name == "cross_row_leakage"
    assert found.measured.endswith(f": all but the first of each {size}")


def test_rows_of_no_pack_are_counted() -> None:
    def change(wrong: np.ndarray) -> None:
        wrong[[0, 3, 4, 5, 9, 11]] -= 2.0

    found = shapes.some_rows(sides(change))
    assert found is not None
    assert found.measured == "6 of 16 disagree, the others agree"

    def part_of_each(wrong: np.ndarray) -> None:
        wrong[[0, 3, 4, 5, 9, 11], :4] -= 2.0

    assert shapes.some_rows(sides(part_of_each)) is None


def test_the_offset_of_a_cast_hardly_scatters() -> None:
    for scatter, found in ((0.2, True), (0.3, False)):

        def change(wrong: np.ndarray, scatter: float = scatter) -> None:
            wrong += 0.04
            wrong[::2] += 0.04 * 2 * scatter
            wrong[0, 0] += 1.0  # a single token above what half precision does

        cause = shapes.uniform(sides(change))
        assert (cause is not None) is found


def test_a_gap_that_is_small_everywhere_is_one_of_precision() -> None:
    def change(wrong: np.ndarray) -> None:
        wrong[:, 0] += 0.049

    found = shapes.uniform(sides(change))
    assert found is not None
    assert (found.name, found.test, found.measured) == (
        "precision", "largest gap", "0.049, as half precision has it",
    )  # fmt: skip
    assert shapes.uniform(sides(_cells((0, 0), by=0.06))) is None


def test_a_filter_moves_nearly_all_tokens_up() -> None:
    """Two of a hundred may lie below by rounding; 96 cells here."""
    for down, found in ((1, True), (2, False)):

        def change(wrong: np.ndarray, down: int = down) -> None:
            wrong += 0.1
            wrong.ravel()[:down] -= 0.3

        cause = shapes.one_sided(sides(change), sign=1.0)
        assert (cause is not None) is found
        assert cause is None or cause.measured == "up by 0 to 0.1"
