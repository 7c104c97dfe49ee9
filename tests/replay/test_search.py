"""Halving: few calls, and all rows that are needed together."""

import math

import numpy as np
import pytest

from dataproto_audit.replay.search import culprits


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1000, 1024])
def test_one_culprit_takes_two_calls_a_halving(rows: int) -> None:
    for row in {0, rows // 3, rows - 1}:
        found, calls = culprits(range(rows), lambda part, row=row: row in part)
        assert found == [row]
        assert calls <= 2 * math.ceil(math.log2(rows)) if rows > 1 else calls == 0


def test_rows_that_fail_only_together_are_all_named() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        wanted = set(random.choice(200, int(random.integers(2, 5)), replace=False).tolist())
        found, calls = culprits(range(200), lambda part, wanted=wanted: wanted <= set(part))
        assert set(found) == wanted
        assert calls < 120


def test_it_stops_at_the_limit() -> None:
    found, calls = culprits(range(1024), lambda part: {1, 500, 1000} <= set(part), limit=5)
    assert {1, 500, 1000} <= set(found)
    assert calls <= 6
    assert culprits([], lambda part: True) == ([], 0)
