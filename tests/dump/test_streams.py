"""What a kill, a power cut or a damaged disk leaves behind."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.dump import streams
from dataproto_audit.dump.schema import SCHEMA_VERSION, TABLES, VERSION_KEY
from dataproto_audit.dump.tables import TableWriter

Write = Callable[[TableWriter, int], None]
STEPS = 3


@pytest.fixture
def killed(tmp_path: Path, write_step: Write) -> Path:
    """Tables of three steps whose writer went away without closing them."""
    folder = tmp_path / "tables"
    writer = TableWriter(folder)
    for step in range(1, STEPS + 1):
        write_step(writer, step)
    writer.abandon()
    return folder


def _steps(folder: Path, name: str) -> list[int]:
    log = folder / streams.COMMITS
    tail = streams.read_tail(folder) if log.exists() else None
    column = streams.read_table(folder, TABLES[name], tail).column("step")
    return sorted(set(column.to_pylist()))


def _same_whole_steps(folder: Path) -> int:
    """The number of steps, after checking that all tables hold the same, from 1 on."""
    found = {name: _steps(folder, name) for name in TABLES}
    steps = found["rows"]
    assert steps == list(range(1, len(steps) + 1))
    assert all(other == steps for other in found.values()), found
    return len(steps)


def _cuts(size: int, marks: list[int]) -> Iterator[int]:
    """Lengths to cut a file to: around each mark, and some between."""
    around = {mark + shift for mark in marks for shift in (-9, -8, -1, 0, 1, 4, 8, 9)}
    yield from sorted(cut for cut in {*around, *range(0, size, 997)} if 0 <= cut <= size)


def test_a_log_cut_at_any_byte_gives_whole_steps(killed: Path) -> None:
    log = killed / streams.COMMITS
    content = log.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content) + 1):
        log.write_bytes(content[:cut])
        assert _same_whole_steps(killed) == content[first:cut].count(b"\n")


def test_a_log_without_its_first_line_is_dpa803(killed: Path) -> None:
    log = killed / streams.COMMITS
    content = log.read_bytes()
    for cut in (0, 1, 10):
        log.write_bytes(content[:cut])
        with pytest.raises(UsageError, match="DPA803"):
            streams.read_tail(killed)


@pytest.mark.parametrize("name", ["rows", "findings", "loss"])
def test_a_stream_cut_at_any_kind_of_byte_gives_whole_steps(killed: Path, name: str) -> None:
    """A power cut may keep the log and lose the end of a stream."""
    path = streams.stream_path(killed, name)
    content = path.read_bytes()
    at = list(TABLES).index(name)
    lines = (killed / streams.COMMITS).read_bytes().splitlines()[1:]
    ends = [int(line.split()[1 + at]) for line in lines]
    for cut in _cuts(len(content), [0, len(TABLES[name].schema_message), *ends]):
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert _same_whole_steps(killed) == whole
        assert streams.read_tail(killed).dropped == STEPS - whole


@pytest.mark.parametrize("junk", [b"\0", b"\0" * 4096, b"\xff\xff\xff\xff", os.urandom(999)])
def test_a_torn_tail_is_not_looked_at(killed: Path, junk: bytes) -> None:
    for name in TABLES:
        with open(streams.stream_path(killed, name), "ab") as file:
            file.write(junk)
    with open(killed / streams.COMMITS, "ab") as file:
        file.write(b"4 12")
    assert _same_whole_steps(killed) == STEPS


@pytest.mark.parametrize(
    ("tail", "fragment"),
    [(b"nonsense\n4 1 2\n", "damaged after step 3"), (b"4 1 2\n", "names 2 tables")],
)
def test_a_log_damaged_in_the_middle_is_dpa803(killed: Path, tail: bytes, fragment: str) -> None:
    with open(killed / streams.COMMITS, "ab") as file:
        file.write(tail)
    with pytest.raises(UsageError, match=fragment):
        streams.read_tail(killed)


@pytest.mark.parametrize(
    ("first_line", "fragment"),
    [
        (b'{"schema": 2, "tables": []}', "reads up to 1"),
        (b'{"schema": "x", "tables": []}', "no schema version"),
        (b'{"tables": []}', "no schema version"),
        (b"[]", "does not name the tables"),
        (b"{", "damaged"),
        (b"", "empty"),
    ],
)
def test_the_first_line_of_the_log_is_checked(
    killed: Path, first_line: bytes, fragment: str
) -> None:
    log = killed / streams.COMMITS
    log.write_bytes(first_line + b"\n" + log.read_bytes().partition(b"\n")[2])
    with pytest.raises(UsageError, match=fragment) as caught:
        streams.read_tail(killed)
    assert caught.value.code == "DPA803"


# -- other schemas ---------------------------------------------------------------------------------


def _rewrite(folder: Path, name: str, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, streams.parquet_path(folder, name))


@pytest.fixture
def rows(killed: Path) -> pa.Table:
    """The rows table of the killed run."""
    return streams.read_table(killed, TABLES["rows"], streams.read_tail(killed))


def test_a_newer_schema_is_refused_with_the_remedy(killed: Path, rows: pa.Table) -> None:
    newer = str(SCHEMA_VERSION + 1)
    _rewrite(killed, "rows", rows.replace_schema_metadata({VERSION_KEY: newer}))
    with pytest.raises(UsageError, match=f"schema {newer}") as caught:
        _steps(killed, "rows")
    assert caught.value.code == "DPA803"
    assert "Upgrade" in caught.value.remedy


def test_an_older_writer_lacks_nullable_columns(killed: Path, rows: pa.Table) -> None:
    _rewrite(killed, "rows", rows.drop_columns(["finish_reason"]))
    column = streams.read_table(killed, TABLES["rows"], None).column("finish_reason")
    assert column.null_count == len(column) == rows.num_rows


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda t: t.drop_columns(["row_key"]), "the column row_key is missing"),
        (lambda t: t.set_column(1, "row", t["row"].cast(pa.int64())), "has the type int64"),
        (lambda t: t.replace_schema_metadata(None), "no schema version"),
    ],
)
def test_a_foreign_table_is_dpa803(
    killed: Path, rows: pa.Table, change: Callable[[pa.Table], pa.Table], fragment: str
) -> None:
    _rewrite(killed, "rows", change(rows))
    with pytest.raises(UsageError, match=fragment) as caught:
        _steps(killed, "rows")
    assert caught.value.code == "DPA803"


def test_a_missing_table_is_named(killed: Path) -> None:
    streams.compact(killed)
    streams.parquet_path(killed, "rows").unlink()
    with pytest.raises(UsageError, match="the table rows is missing"):
        _steps(killed, "rows")


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
@given(data=st.data())
def test_flipped_bytes_give_an_error_or_a_table_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, compacted: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    with TableWriter(folder) as writer:
        for step in (1, 2):
            writer.append("steps", {"metric": [f"m{i}" for i in range(200)], "value": 0.0})
            writer.append("loss", {"mini_batch": 0, "term": ["pg"], "value": 0.5})
            writer.flush_step(step)
        if not compacted:
            writer.abandon()
    name = data.draw(st.sampled_from(["steps", "loss"]))
    path = (streams.parquet_path if compacted else streams.stream_path)(folder, name)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(UsageError):
        tail = None if compacted else streams.read_tail(folder)
        streams.read_table(folder, TABLES[name], tail).to_pydict()
    shutil.rmtree(folder)


def test_an_end_mark_inside_a_stream_is_damage(killed: Path) -> None:
    path = streams.stream_path(killed, "rows")
    start = len(TABLES["rows"].schema_message)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff\xff\xff\xff\0\0\0\0")
    with pytest.raises(UsageError, match="the stream ends before byte"):
        _steps(killed, "rows")


# -- compaction and reopening, cut short -----------------------------------------------------------


class _Cut(BaseException):
    """The process ends here."""


def _cut_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Raise at the ``call``-th change of the file system."""
    left = [call]

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise _Cut
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))


@pytest.mark.parametrize("call", range(45))
def test_a_compaction_cut_anywhere_loses_nothing(
    killed: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    with monkeypatch.context() as patch:
        _cut_at(patch, call)
        with contextlib.suppress(_Cut):
            streams.compact(killed)
    assert _same_whole_steps(killed) == STEPS
    streams.compact(killed)
    assert _same_whole_steps(killed) == STEPS
    assert {path.suffix for path in killed.iterdir() if path.suffix != ".tmp"} == {".parquet"}


@pytest.mark.parametrize("call", range(0, 85, 2))
def test_a_resume_cut_anywhere_keeps_the_steps_that_it_keeps(
    killed: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write, call: int
) -> None:
    with monkeypatch.context() as patch:
        _cut_at(patch, call)
        with contextlib.suppress(_Cut):
            streams.reopen(killed, after_step=2)
    for name in TABLES:
        assert _steps(killed, name)[:2] == [1, 2]
    with TableWriter(killed, resume=True, resume_after=2) as writer:
        write_step(writer, 3)
    assert _same_whole_steps(killed) == 3


def test_a_writer_killed_at_its_start_can_begin_again(killed: Path) -> None:
    fresh = killed.parent / "fresh"
    TableWriter(fresh).abandon()
    (fresh / streams.COMMITS).unlink()
    streams.stream_path(fresh, "rows").write_bytes(b"")
    TableWriter(fresh, resume=True).close()
    assert _same_whole_steps(fresh) == 0


def test_a_lost_log_is_not_taken_for_an_empty_run(killed: Path) -> None:
    (killed / streams.COMMITS).unlink()
    with pytest.raises(CodedError, match="the file is missing, and the streams hold rows"):
        TableWriter(killed, resume=True)
    assert streams.stream_path(killed, "rows").stat().st_size > 1000
