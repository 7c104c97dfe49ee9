import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.batching import (
    agreed_micro_batches,
    balance,
    counted_micro_batches,
    dynamic_micro_batches,
    fewest_micro_batches,
    mini_batch_rows,
    static_micro_batches,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def partition(parts, rows):
    return sorted(np.concatenate(parts).tolist()) == list(range(rows))


@given(st.integers(1, 5), st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_balance_is_a_permutation_with_even_chunks(ranks, base):
    lengths = np.array([length + k for k in range(ranks) for length in base])
    order = balance(lengths, ranks=ranks)
    assert partition([order], lengths.size)
    sums = lengths[order].reshape(ranks, -1).sum(1)
    assert sums.max() - sums.min() <= lengths.max()


def test_balance_evens_out_what_contiguous_chunks_would_not():
    lengths = np.array([9] * 8 + [1] * 8)
    sums = lengths[balance(lengths, ranks=2)].reshape(2, -1).sum(1)
    assert sums.tolist() == [40, 40]


def test_balance_refuses_rows_that_do_not_divide():
    with pytest.raises(UsageError, match="DPA854 5 rows"):
        balance(np.ones(5, dtype=int), ranks=2)


def test_static_micro_batches_are_runs_with_a_shorter_last_one():
    parts = static_micro_batches(7, size=3)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(UsageError, match="DPA851"):
        static_micro_batches(7, size=0)


@given(LENGTHS, st.integers(0, 60))
def test_the_token_limit_is_hard_and_few_micro_batches_are_used(lengths, room):
    lengths = np.array(lengths)
    limit = int(lengths.max()) + room
    parts = fewest_micro_batches(lengths, limit=limit)
    assert partition(parts, lengths.size)
    assert max(lengths[part].sum() for part in parts) <= limit
    # Any two micro-batches together would not fit into one: first-fit leaves no such pair.
    sums = sorted(lengths[part].sum() for part in parts)
    assert len(sums) < 2 or sums[0] + sums[1] > limit


@given(LENGTHS, st.integers(0, 60), st.integers(0, 10))
def test_a_larger_count_is_met_exactly_without_empty_micro_batches(lengths, room, more):
    lengths = np.array(lengths)
    limit = int(lengths.max()) + room
    fewest = len(fewest_micro_batches(lengths, limit=limit))
    count = min(fewest + more, lengths.size)
    parts = dynamic_micro_batches(lengths, limit=limit, count=count)
    assert len(parts) == count
    assert partition(parts, lengths.size)
    assert all(part.size and lengths[part].sum() <= limit for part in parts)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**16), st.integers(0, 40))
def test_every_rank_gets_equally_many_micro_batches(ranks, rows, seed, room):
    lengths = np.random.default_rng(seed).integers(1, 50, (ranks, rows))
    plans = agreed_micro_batches(list(lengths), limit=int(lengths.max()) + room)
    assert len({len(plan) for plan in plans}) == 1
    assert all(partition(plan, rows) for plan in plans)


def test_a_rank_of_short_rows_splits_as_often_as_one_of_long_rows():
    long, short = np.array([10, 10, 10, 10]), np.array([1, 1, 1, 1])
    plans = agreed_micro_batches([long, short], limit=10)
    assert [len(plan) for plan in plans] == [4, 4]


def test_rows_of_similar_length_go_together():
    lengths = np.array([30, 2, 29, 3, 28, 2])
    parts = dynamic_micro_batches(lengths, limit=90, count=2)
    assert sorted(part.tolist() for part in parts) == [[0, 2], [1, 3, 4, 5]]


def test_a_row_above_the_limit_is_named():
    with pytest.raises(UsageError, match="DPA856 row 1 has 11 tokens, the limit is 10"):
        fewest_micro_batches(np.array([3, 11]), limit=10)


def test_mini_batches_are_the_same_for_the_same_seed_and_differ_between_epochs():
    options = {"size": 4, "epochs": 2, "shuffle": True}
    first = mini_batch_rows(16, seed=(1, 2), **options)
    again = mini_batch_rows(16, seed=(1, 2), **options)
    other = mini_batch_rows(16, seed=(1, 3), **options)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    assert all(partition(epoch, 16) for epoch in first)


def test_mini_batches_without_shuffle_are_runs():
    (epoch,) = mini_batch_rows(6, size=3, epochs=1, shuffle=False, seed=())
    assert [part.tolist() for part in epoch] == [[0, 1, 2], [3, 4, 5]]


def test_mini_batches_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="DPA854 6 rows"):
        mini_batch_rows(6, size=4, epochs=1, shuffle=True, seed=())


@given(
    st.integers(1, 3), st.integers(2, 16), st.integers(0, 2**16), st.integers(0, 40),
    st.integers(1, 4),
)  # fmt: skip
def test_the_number_of_micro_batches_divides_where_a_pipeline_asks(ranks, rows, seed, room, by):
    lengths = np.random.default_rng(seed).integers(1, 50, (ranks, rows))
    limit = int(lengths.max()) + room
    need = max(len(fewest_micro_batches(own, limit=limit)) for own in lengths)
    count = -(-need // by) * by
    if by > 1 and count > rows:
        with pytest.raises(UsageError, match=f"DPA854 .*multiples of {by}"):
            agreed_micro_batches(list(lengths), limit=limit, divisible_by=by)
        return
    for own, plan in zip(
        lengths, agreed_micro_batches(list(lengths), limit=limit, divisible_by=by), strict=True
    ):
        assert len(plan) == count
        assert partition(plan, rows)
        assert all(own[part].sum() <= limit for part in plan)


def test_counted_micro_batches_are_equal_parts_or_refused():
    parts = counted_micro_batches(7, size=0, divisible_by=2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert len(counted_micro_batches(8, size=2, divisible_by=2)) == 4
    with pytest.raises(UsageError, match=r"DPA854 .*3 micro-batches.*multiples of 2"):
        counted_micro_batches(6, size=2, divisible_by=2)
    with pytest.raises(UsageError, match=r"DPA854 1 rows"):
        counted_micro_batches(1, size=0, divisible_by=2)
