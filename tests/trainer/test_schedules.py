import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.trainer.schedules import (
    Op,
    idle_shares,
    interleaved,
    one_forward_one_backward,
    pipeline_bubble,
)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_is_idle_for_the_share_of_the_formula(stages, micros):
    bubble = pipeline_bubble(one_forward_one_backward(stages, micros))
    if micros >= stages:
        assert bubble == pytest.approx([(stages - 1) / (micros + stages - 1)] * stages)
    assert all(0 <= share < 1 for share in bubble)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_interleaving_divides_the_idle_share_by_the_chunks(stages, groups, chunks):
    micros = groups * stages
    bubble = pipeline_bubble(interleaved(stages, micros, chunks=chunks))
    expected = (stages - 1) / (chunks * micros + stages - 1)
    assert bubble == pytest.approx([expected] * stages)


def test_a_pass_without_backward_has_a_bubble_too():
    schedule = [[Op(0), Op(1), Op(2)]] * 2
    assert pipeline_bubble(schedule) == pytest.approx([0.25, 0.25])


def test_backwards_that_cost_twice_leave_the_share_as_it_is():
    schedule = one_forward_one_backward(2, 4)
    assert pipeline_bubble(schedule, backward=2.0) == pytest.approx([1 / 5, 1 / 5])


def test_all_forwards_first_is_no_slower_but_holds_more():
    gpipe = [[Op(m) for m in range(3)] + [Op(m, backward=True) for m in range(3)]] * 2
    assert pipeline_bubble(gpipe) == pytest.approx([1 / 4, 1 / 4])


def test_one_stage_never_waits_and_nothing_gives_nothing():
    assert pipeline_bubble([[Op(0), Op(0, backward=True)]]) == [0.0]
    assert pipeline_bubble([[], []]) == [0.0, 0.0]


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="never comes"):
        pipeline_bubble([[Op(0, backward=True), Op(0)]])
    with pytest.raises(ValueError, match="no multiple"):
        interleaved(2, 3, chunks=2)


def test_ranks_with_fewer_micro_batches_wait_for_the_others():
    assert idle_shares([4, 4]) == [0.0, 0.0]
    assert idle_shares([4, 3, 0]) == pytest.approx([0.0, 0.25, 1.0])
    assert idle_shares([0, 0]) == [0.0, 0.0]
    assert idle_shares([]) == []
