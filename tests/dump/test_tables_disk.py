"""A disk that refuses, and a process that is killed: whole steps stay, and nothing is silent."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataproto_audit.codes import RunError
from dataproto_audit.dump import streams, tables
from dataproto_audit.dump.schema import TABLES
from dataproto_audit.dump.tables import TableWriter

Write = Callable[[TableWriter, int], None]


def _read(folder: Path, name: str) -> pa.Table:
    tail = streams.read_tail(folder) if (folder / streams.COMMITS).exists() else None
    return streams.read_table(folder, TABLES[name], tail)


def _steps(folder: Path, name: str = "rows") -> list[int]:
    return sorted(set(_read(folder, name).column("step").to_pylist()))


class _FullDisk:
    """``os.pwrite`` that takes ``room`` more bytes and then raises ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 60
        self._pwrite = os.pwrite
        monkeypatch.setattr(tables.os, "pwrite", self)

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        part = memoryview(data)[: self.room]
        if not len(part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(part)
        return self._pwrite(fd, part, offset)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.8, 1.0])
def test_a_full_disk_keeps_whole_steps_and_the_rest_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write, share: float
) -> None:
    disk = _FullDisk(monkeypatch)
    writer = TableWriter(tmp_path)
    write_step(writer, 1)
    ends = streams.read_tail(tmp_path).ends
    of_a_step = sum(ends.values()) - sum(len(table.schema_message) for table in TABLES.values())
    disk.room = int(share * of_a_step)  # at 1.0 all tables fit, and the commit does not
    with pytest.raises(RunError, match="the disk is full") as caught:
        write_step(writer, 2)
    assert caught.value.code == "DPA802"
    assert "Free space" in caught.value.remedy
    assert _steps(tmp_path) == [1]
    sizes = {n: streams.stream_path(tmp_path, n).stat().st_size for n in TABLES}
    assert sizes == ends  # what the failed step left was cut off again
    disk.room = 0
    with pytest.raises(RunError):
        write_step(writer, 3)
    disk.room = 1 << 60  # somebody freed space
    write_step(writer, 4)
    writer.close()
    assert writer.lost_steps == 0
    for name in TABLES:
        assert _steps(tmp_path, name) == [1, 2, 3, 4]


def test_close_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    disk = _FullDisk(monkeypatch)
    writer = TableWriter(tmp_path)
    disk.room = 10
    with pytest.raises(RunError):
        write_step(writer, 1)
    disk.room = 1 << 60
    writer.close()
    assert _steps(tmp_path) == [1]


def test_what_is_given_up_is_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    monkeypatch.setattr(tables, "MAX_WAITING_BYTES", 20_000)
    disk = _FullDisk(monkeypatch)
    writer = TableWriter(tmp_path)
    write_step(writer, 1)
    disk.room = 0
    messages = []
    for step in range(2, 6):
        with pytest.raises(RunError) as caught:
            write_step(writer, step)
        messages.append(caught.value.message)
    assert any("steps are lost" in message for message in messages)
    disk.room = 1 << 60
    write_step(writer, 6)
    lost = writer.lost_steps
    assert 0 < lost < 5
    with pytest.raises(RunError, match=f"tables of {lost} steps are lost"):
        writer.close()
    assert _steps(tmp_path) == [1, *range(2 + lost, 7)]


def test_a_failed_compaction_leaves_readable_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    writer = TableWriter(tmp_path)
    write_step(writer, 1)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match="DPA802"):
            writer.close()
    assert not list(tmp_path.glob("*.parquet"))
    assert _steps(tmp_path) == [1]
    streams.compact(tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == len(TABLES)
    assert _steps(tmp_path) == [1]


def test_an_error_of_the_tables_does_not_hide_the_one_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    disk = _FullDisk(monkeypatch)

    def run() -> None:
        with TableWriter(tmp_path) as writer:
            disk.room = 0
            with pytest.raises(RunError):
                write_step(writer, 1)
            raise KeyError("the run itself")

    with pytest.raises(KeyError) as caught:
        run()
    assert any("the disk is full" in note for note in caught.value.__notes__)


def test_a_folder_that_cannot_be_made_is_dpa802(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="DPA802"):
        TableWriter(tmp_path / "file" / "tables")


_WRITER = """
import sys
import numpy as np
from dataproto_audit.dump.tables import TableWriter
writer = TableWriter(sys.argv[1])
for step in range(1, 100_000):
    writer.append("rows", {"row": np.arange(50), "row_key": [f"{step}:{i}" for i in range(50)],
                           "uid": "u", "prompt_length": 1, "response_length": 1,
                           "trained_tokens": 1, "flags": ""})
    writer.append("steps", {"metric": ["m"], "value": [step]})
    try:
        writer.flush_step(step)
    except Exception as error:
        print(type(error).__name__, error.code, step, flush=True)
        break
    print(step, flush=True)
"""


def _start_writer(folder: Path, *, prefix: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", prefix + _WRITER, str(folder)], stdout=subprocess.PIPE, text=True
    )


def test_a_killed_process_leaves_every_finished_step(tmp_path: Path) -> None:
    process = _start_writer(tmp_path)
    assert process.stdout is not None
    finished = 0
    while finished < 50:
        finished = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    finished = max([finished, *map(int, process.stdout.read().split()[:-1])])
    process.wait()
    process.stdout.close()
    steps = _steps(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= finished
    assert _steps(tmp_path, "steps") == steps
    assert _read(tmp_path, "rows").num_rows == 50 * len(steps)


def test_a_real_size_limit_is_dpa802_and_the_steps_before_it_stay(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    process = _start_writer(tmp_path, prefix=limit)
    lines = process.communicate(timeout=60)[0].splitlines()
    kind, code, failed = lines[-1].split()
    assert (kind, code) == ("RunError", "DPA802")
    assert _steps(tmp_path) == list(range(1, int(failed)))
    assert _steps(tmp_path, "steps") == list(range(1, int(failed)))
