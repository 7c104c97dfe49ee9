import time

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.workers.failures import explain, follows_from_a_peer, is_timeout
from dataproto_audit.trainer.workers.hang import Note

TRACE = 'Traceback\n  File "/x/a.py", line 3, in outer\n  File "/x/loss.py", line 9, in inner\n'


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("execute", TRACE, cause).as_instanceof_cause()


def notes(first: int = 2, second: int = 2):
    return [
        Note(rank, 1, "update_actor", count, 0, count, 3, "running", time.time())
        for rank, count in enumerate((first, second))
    ]


def told(failures, notes_=None):
    error = explain(failures, stage="update_actor", call=1, notes=notes_ or notes(), timeout_s=60.0)
    return type(error), str(error)


# What torch 2.13 says, over gloo and over NCCL.
LOST = [
    "[/b/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:49526",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]: Connection reset "
    "by peer",
    "NCCL error: remote process exited or there was a network error",
    "Broken pipe",
]
LATE = [
    "[/b/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
]


@pytest.mark.parametrize("text", LOST + LATE)
def test_errors_about_peers_are_recognised(text):
    assert follows_from_a_peer(raised(RuntimeError(text)))
    assert is_timeout(raised(RuntimeError(text))) == (text in LATE)


@pytest.mark.parametrize(
    "cause",
    [ValueError("bad row"), KeyError("timeout"), RuntimeError("shape"), ConnectionError("x")],
)
def test_a_rank_s_own_errors_are_not(cause):
    assert not follows_from_a_peer(raised(cause))
    kind, text = told({1: raised(cause)})
    assert kind is RunError
    assert f"DPA863 update_actor: rank 1 raised {type(cause).__name__}" in text
    assert "(in inner, loss.py:9)" in text


def test_a_coded_error_keeps_its_class_and_text():
    kind, text = told({0: raised(UsageError("DPA856", "too long.", "Raise it."))})
    assert (kind, text) == (UsageError, "DPA856 too long. Raise it.")


def test_a_dead_process_comes_before_errors_about_it():
    kind, text = told({0: raised(RuntimeError(LOST[0])), 1: ActorDiedError()})
    assert kind is RunError
    assert text.startswith("DPA864 update_actor: the process of rank 1 died")
    for internal in ("actor_id", "namespace", "ip:", "The actor"):
        assert internal not in text


def test_a_real_error_comes_before_errors_about_it():
    _, text = told({0: raised(RuntimeError(LOST[0])), 1: raised(ValueError("bad row"))})
    assert "rank 1 raised ValueError: bad row" in text


def test_a_time_out_names_the_late_rank_and_all_notes():
    kind, text = told({0: raised(RuntimeError(LATE[0]))}, notes(2, 1))
    assert kind is RunError
    assert text.startswith("DPA866 update_actor: ")
    assert "rank 1 did not come" in text
    assert "rank 0: update_actor running, mini-batch 0, micro-batch 3 of 3" in text


def test_a_lost_peer_that_nobody_accounts_for_is_still_an_error():
    _, text = told({0: raised(RuntimeError(LOST[0]))})
    assert "DPA863" in text
    assert "Connection closed by peer" in text
