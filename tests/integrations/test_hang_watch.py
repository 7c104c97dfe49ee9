import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dataproto_audit.integrations.hang_watch import HangWatch
from dataproto_audit.integrations.worker_files import Asked, Exchange
from dataproto_audit.progress import UNKNOWN, Note


def hanging(tmp_path: Path) -> Exchange:
    """Rank 0 waits in its fourth micro-batch for rank 1, which is in its third."""
    exchange = Exchange(tmp_path / "ranks")
    exchange.ask(Asked("update_actor", 3, True))
    for rank, count in enumerate((4, 3)):
        at = time.time() - 60
        exchange.note(Note(rank, 3, "update_actor", count, 0, count - 1, UNKNOWN, "running", at), 2)
    return exchange


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 20
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


UNEVEN = "rank 1 is in update_actor micro-batch 3, rank 0 in 4: the others wait for rank 1"


def test_after_the_time_out_the_uneven_rank_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = HangWatch(hanging(tmp_path), timeout_s=0.2)
    watch.begin(3, "update_actor")
    wait_for(UNEVEN, caplog)
    assert "nothing moved for" in caplog.text
    watch.finish()
    assert caplog.text.count(UNEVEN) == 1
    assert not [t for t in threading.enumerate() if t.name == "dataproto-audit-hang"]


def test_a_signal_asks_and_is_given_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watch = HangWatch(hanging(tmp_path), timeout_s=0)
    watch.on_signal()
    watch.begin(3, "update_actor")
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(UNEVEN, caplog)
    watch.finish()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_ranks_that_move_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = HangWatch(hanging(tmp_path), timeout_s=3600)
    watch.begin(3, "update_actor")
    watch.end()
    watch.finish()
    assert caplog.text == ""


def test_without_a_note_it_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = HangWatch(Exchange(tmp_path), timeout_s=0)
    watch.report("asked")
    assert "no rank has written a note" in caplog.text
