import os
import signal
import time

from dataproto_audit.trainer.workers import hang
from dataproto_audit.trainer.workers.hang import Note, late_ranks


def note(rank, count, *, call=4, state="running"):
    return Note(rank, call, "update_actor", count, 1, count, 3, state, time.time())


def test_notes_travel_over_the_store():
    store, port = hang.host_store("127.0.0.1")
    book = hang.Notebook(hang.join_store("127.0.0.1", port), rank=1)
    assert hang.read_notes(store, world_size=2) == [None, None]
    book.begin(7, "old_log_prob")
    book.micro_batch(2, 0, 5)
    deadline = time.monotonic() + 10
    while (found := hang.read_notes(store, world_size=2)[1]) is None or found.count < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (found.rank, found.call, found.stage) == (1, 7, "old_log_prob")
    assert (found.mini_batch, found.micro_batch, found.micro_batches) == (2, 0, 5)
    text = hang.describe([None, found])
    assert "rank 0: no note yet" in text
    assert "rank 1: old_log_prob running, mini-batch 2, micro-batch 1 of 5" in text


def test_a_signal_makes_the_process_say_where_ranks_are(capsys):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        hang.report_on_signal(lambda: [note(0, 2), None])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "rank 0: update_actor running" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_rank_with_the_least_progress_is_late():
    assert late_ranks([note(0, 5), note(1, 3), note(2, 5)], call=4) == [1]


def test_a_rank_that_has_not_begun_the_call_is_late():
    assert late_ranks([note(0, 2), note(1, 9, call=3, state="finished")], call=4) == [1]
    assert late_ranks([note(0, 2), None], call=4) == [1]


def test_a_rank_that_finished_while_others_run_is_late():
    assert late_ranks([note(0, 2), note(1, 9, state="finished")], call=4) == [1]


def test_of_level_ranks_those_that_do_not_wait_are_late():
    assert late_ranks([note(0, 2), note(1, 2)], call=4, waiting=[0]) == [1]
    assert late_ranks([note(0, 2), note(1, 2)], call=4, waiting=[0, 1]) == [0, 1]
