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
