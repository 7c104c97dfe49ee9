import time

from dataproto_audit.progress import UNKNOWN, Note, describe, late_ranks, uneven


def note(rank, count, *, call=4, state="running", of=5, stage="update_actor"):
    return Note(rank, call, stage, count, 0, max(0, count - 1), of, state, time.time())


def test_the_rank_with_fewer_micro_batches_is_named_first():
    told = uneven([note(0, 4), note(1, 3)], call=4)
    assert told == (
        "rank 1 is in update_actor micro-batch 3, rank 0 in 4: the others wait for rank 1"
    )


def test_a_rank_that_ran_fewer_has_finished():
    told = uneven([note(0, 5), note(1, 5, state="finished", of=0)], call=4)
    assert "rank 1 has finished update_actor after 4 micro-batches, rank 0 in 5" in told
    assert told.endswith("wait for rank 1")


def test_ranks_that_have_not_begun():
    told = uneven([note(0, 1), note(1, 7, call=3, stage="ref_log_prob"), None], call=4)
    assert "rank 1 has not begun (last seen in ref_log_prob), rank 2 has not begun" in told
    assert told.endswith("wait for rank 1, 2")


def test_level_ranks_are_level():
    assert uneven([note(0, 2), note(1, 2)], call=4).endswith("the ranks are level")
    assert uneven([], call=4) == ""
    told = uneven([note(0, 0, of=0)], call=4)
    assert "rank 0 is in update_actor before its first micro-batch" in told


def test_a_number_that_nobody_knows_is_left_out():
    text = describe([note(0, 3, of=UNKNOWN), None])
    assert "rank 0: update_actor running, mini-batch 0, micro-batch 3, 0 s ago" in text
    assert "rank 1: no note yet" in text


def test_late_ranks_of_level_notes_are_those_that_do_not_wait():
    assert late_ranks([note(0, 2), note(1, 2)], call=4, waiting=[0]) == [1]
