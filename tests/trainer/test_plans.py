import numpy as np
import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.plans import MicroBatching, plan_forward, plan_update

LENGTHS = np.array([9, 3, 4, 8, 2, 7, 6, 5])
TRAINED = np.array([4, 1, 2, 3, 0, 3, 2, 1])


def update(micro=MicroBatching(), **options):  # noqa: B008 - frozen
    options = {"ranks": 2, "mini_batch_size": 4, "width": 5} | options
    return plan_update(LENGTHS, TRAINED, micro=micro, **options)


def test_mini_batches_cover_each_rank_s_rows_once_an_epoch():
    plan = update(epochs=2, seed=(3,))
    for rank in plan.ranks:
        assert [mini.index for mini in rank] == [0, 1, 2, 3]
        assert [mini.epoch for mini in rank] == [0, 0, 1, 1]
        for epoch in (0, 1):
            rows = np.concatenate([mini.rows for mini in rank if mini.epoch == epoch])
            assert sorted(rows.tolist()) == [0, 1, 2, 3]


def test_counts_are_those_of_all_ranks():
    plan = update(seed=(1,))
    for mini in range(2):
        rows = [plan.ranks[0][mini].rows, plan.ranks[1][mini].rows + 4]
        trained = TRAINED[np.concatenate(rows)]
        for rank in plan.ranks:
            assert rank[mini].counts.tokens == trained.sum()
            assert rank[mini].counts.sequences == (trained > 0).sum()
            assert rank[mini].counts.width == 5


@pytest.mark.parametrize("micro", [MicroBatching(), MicroBatching(rows=1), MicroBatching(0, 10)])
def test_micro_batches_cut_the_mini_batch_and_ranks_run_equally_many(micro):
    plan = update(micro)
    for mine, other in zip(*plan.ranks, strict=True):
        assert len(mine.micro_batches) == len(other.micro_batches)
        for mini in (mine, other):
            rows = np.concatenate(mini.micro_batches)
            assert sorted(rows.tolist()) == mini.rows.tolist()


def test_a_token_limit_holds_in_every_micro_batch():
    plan = update(MicroBatching(max_tokens=10))
    for rank, minis in enumerate(plan.ranks):
        for mini in minis:
            for rows in mini.micro_batches:
                assert LENGTHS[rows + 4 * rank].sum() <= 10


def test_a_forward_plan_covers_each_rank_s_rows():
    plan = plan_forward(LENGTHS, ranks=2, micro=MicroBatching(max_tokens=12))
    assert len(plan.ranks[0]) == len(plan.ranks[1])
    for parts in plan.ranks:
        assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3]


def test_the_row_of_the_batch_is_named_when_it_is_above_the_limit():
    with pytest.raises(UsageError, match="DPA856 row 0 has 9 tokens"):
        update(MicroBatching(max_tokens=8))
    with pytest.raises(UsageError, match="DPA856 row 0 has 9 tokens"):
        plan_forward(LENGTHS, ranks=2, micro=MicroBatching(max_tokens=8))


@pytest.mark.parametrize("options", [{"mini_batch_size": 3}, {"ranks": 3, "mini_batch_size": 6}])
def test_sizes_that_do_not_divide_are_refused(options):
    with pytest.raises(UsageError, match="DPA854"):
        update(**options)
