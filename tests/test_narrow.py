"""Row sums and maxima are those of numpy, for short and for long rows."""

import numpy as np
import pytest

from dataproto_audit.narrow import NARROW, row_max, row_sum


@pytest.mark.parametrize("columns", [0, 1, 10, NARROW, NARROW + 1, 100])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_are_reduced_as_numpy_does(rows, columns):
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    mask = values > 0
    assert row_sum(mask).tolist() == mask.sum(1).tolist()
    assert row_sum(mask).dtype == np.int64
    np.testing.assert_allclose(row_sum(values, np.float64), values.sum(1, dtype=np.float64))
    assert row_max(values).tolist() == values.max(1, initial=0.0).tolist()
    assert row_max(values).dtype == np.float32


def test_parts_of_an_array_and_nan():
    values = np.arange(12.0).reshape(3, 4)[:, 1:3]
    assert row_sum(values, np.float64).tolist() == [3.0, 11.0, 19.0]
    values[1, 0] = np.nan
    assert np.isnan(row_max(values)).tolist() == [False, True, False]
