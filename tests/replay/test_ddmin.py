"""A smallest part that still passes, found in few tests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.replay.ddmin import ddmin


def counted(test):
    calls = []

    def asked(items):
        calls.append(list(items))
        return test(items)

    return asked, calls


@given(st.sets(st.integers(0, 63), max_size=6))
def test_exactly_what_is_needed_is_left(needed):
    assert set(ddmin(range(64), lambda some: needed <= set(some))) == needed


@pytest.mark.parametrize("culprit", [0, 77, 255])
def test_one_culprit_takes_a_logarithmic_number_of_tests(culprit):
    test, calls = counted(lambda some: culprit in some)
    assert ddmin(range(256), test, least=1) == [culprit]
    assert len(calls) <= 4 * 8


def test_a_threshold_takes_a_linear_number_of_tests():
    test, calls = counted(lambda some: len(some) >= 100)
    assert len(ddmin(range(256), test)) == 100
    assert len(calls) < 4 * 256


@given(st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=3), min_size=1, max_size=4))
def test_no_single_item_can_be_left_out(ways):
    def test(some):
        return any(way <= set(some) for way in ways)

    left = ddmin(range(16), test)
    assert test(left)
    assert not any(test([x for x in left if x != item]) for item in left)


def test_least_items_stay():
    assert len(ddmin(range(10), lambda some: True, least=3)) == 3
    assert ddmin([], lambda some: True) == []
    assert ddmin([7], lambda some: True) == []
