"""One writer at a time, and a killed one is told from a living one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.dump import lock
from dataproto_audit.dump.lock import LOCK_NAME, RunLock, holder_of, refuse_held

_HOLD = """
import sys
from dataproto_audit.dump.lock import RunLock
RunLock.acquire(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def _hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.fixture
def living(tmp_path: Path) -> Iterator[int]:
    """The id of a process that holds the lock of ``tmp_path``."""
    with _hold(tmp_path) as process:
        yield process.pid


@pytest.fixture
def dead(tmp_path: Path) -> int:
    """The id of a process that was killed while it held the lock."""
    with _hold(tmp_path) as process:
        process.kill()
    return process.pid


def test_a_folder_that_another_process_writes_into_is_refused_unchanged(
    tmp_path: Path, living: int
) -> None:
    before = (tmp_path / LOCK_NAME).read_bytes()
    with pytest.raises(UsageError, match=f"DPA801.*process {living} writes into it"):
        refuse_held(tmp_path)
    assert (tmp_path / LOCK_NAME).read_bytes() == before


def test_a_lock_of_one_s_own_or_of_the_dead_is_not_held(tmp_path: Path, dead: int) -> None:
    assert holder_of(tmp_path) is not None
    refuse_held(tmp_path)
    RunLock.acquire(tmp_path, take_over=True)
    refuse_held(tmp_path)
    refuse_held(tmp_path / "nowhere")


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    first = RunLock.acquire(tmp_path)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid()
    assert holder.alive
    first.release()
    first.release()
    assert holder_of(tmp_path) is None
    RunLock.acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("take_over", [False, True])
def test_a_living_holder_is_named_and_never_robbed(
    tmp_path: Path, living: int, take_over: bool
) -> None:
    with pytest.raises(UsageError, match=f"process {living} writes into it since") as caught:
        RunLock.acquire(tmp_path, take_over=take_over)
    assert caught.value.code == "DPA801"
    assert "trainer.run_dir" in caught.value.remedy


def test_a_dead_holder_is_said_to_be_dead(tmp_path: Path, dead: int) -> None:
    with pytest.raises(
        UsageError, match=f"process {dead} .* is dead: the run was killed"
    ) as caught:
        RunLock.acquire(tmp_path)
    assert caught.value.code == "DPA801"
    for way_on in ("resume_mode", "--overwrite", "run_dir"):
        assert way_on in caught.value.remedy


def test_the_lock_of_a_dead_holder_can_be_taken_over(tmp_path: Path, dead: int) -> None:
    RunLock.acquire(tmp_path, take_over=True)
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid() != dead


def test_only_one_of_many_takes_it_over(tmp_path: Path, dead: int) -> None:
    taken: list[RunLock] = []
    refused: list[UsageError] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        try:
            taken.append(RunLock.acquire(tmp_path, take_over=True))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)


def _replace_holder(folder: Path, **changes: object) -> None:
    RunLock.acquire(folder)
    path = folder / LOCK_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("take_over", [False, True])
def test_a_holder_elsewhere_is_not_judged(tmp_path: Path, take_over: bool) -> None:
    _replace_holder(tmp_path, machine="another boot")
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.alive is None
    with pytest.raises(UsageError, match="another machine, container or boot") as caught:
        RunLock.acquire(tmp_path, take_over=take_over)
    assert "delete" in caught.value.remedy


def test_a_process_id_that_was_given_out_again_is_another_process(tmp_path: Path) -> None:
    _replace_holder(tmp_path, started="1")
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.alive is False


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "null"])
def test_an_unreadable_lock_is_left_to_the_user(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    assert holder_of(tmp_path) is None
    with pytest.raises(UsageError, match="names no holder") as caught:
        RunLock.acquire(tmp_path, take_over=True)
    assert LOCK_NAME in caught.value.remedy


def test_a_lock_of_somebody_else_is_not_released(tmp_path: Path) -> None:
    ours = RunLock.acquire(tmp_path)
    (tmp_path / LOCK_NAME).write_text("theirs")
    ours.release()
    assert (tmp_path / LOCK_NAME).read_text() == "theirs"


def test_no_host_name_is_recorded(tmp_path: Path) -> None:
    RunLock.acquire(tmp_path)
    assert os.uname().nodename not in (tmp_path / LOCK_NAME).read_text()
    assert lock._machine().strip()
