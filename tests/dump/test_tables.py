"""Written as given, whole steps only, nothing lost in silence."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import InternalError, UsageError
from dataproto_audit.dump import streams, tables
from dataproto_audit.dump.schema import TABLES
from dataproto_audit.dump.tables import TableWriter

Write = Callable[[TableWriter, int], None]


def _read(folder: Path, name: str) -> pa.Table:
    tail = streams.read_tail(folder) if (folder / streams.COMMITS).exists() else None
    return streams.read_table(folder, TABLES[name], tail)


def _steps(folder: Path, name: str = "rows") -> list[int]:
    return sorted(set(_read(folder, name).column("step").to_pylist()))


@pytest.mark.parametrize("closed", [False, True])
def test_every_table_comes_back_as_written(
    tmp_path: Path, write_step: Write, rows_per_step: dict[str, int], closed: bool
) -> None:
    writer = TableWriter(tmp_path)
    write_step(writer, 1)
    write_step(writer, 2)
    writer.close() if closed else writer.abandon()
    assert {path.suffix for path in tmp_path.iterdir()} == (
        {".parquet"} if closed else {".arrows", ".log"}
    )
    for name, rows in rows_per_step.items():
        table = _read(tmp_path, name)
        assert table.schema.equals(TABLES[name].arrow)
        assert table.column("step").to_pylist() == [1] * rows + [2] * rows
    tokens = _read(tmp_path, "tokens").slice(0, 3).to_pydict()
    assert tokens["row_key"] == ["s1:r1"] * 3
    assert tokens["mask"] == [True, True, False]
    assert tokens["old_log_prob"] == [-0.5, -1.0, 0.0]
    assert tokens["text"] == tokens["ref_log_prob"] == [None] * 3
    assert _read(tmp_path, "steps").slice(0, 2).to_pydict() == {
        "step": [1, 1], "metric": ["critic/score/mean", "lr"], "value": [0.1, 0.001],
    }  # fmt: skip


def test_parts_of_a_step_keep_their_order(tmp_path: Path) -> None:
    with TableWriter(tmp_path) as writer:
        block = writer.block("steps", {"metric": ["b"], "value": [2.0]})
        for step in (1, 2, 3):
            writer.append_rows("steps", [("a", 1.0)])
            writer.append_block(block)
            writer.append_rows("steps", [])
            writer.append("steps", {"metric": ["c"], "value": [float(step)]})
            writer.append_rows("steps", [("d", 4.0)])
            writer.append_rows("steps", [("e", 5.0)])
            writer.flush_step(step)
    written = _read(tmp_path, "steps").to_pydict()
    assert written["metric"] == ["a", "b", "c", "d", "e"] * 3
    assert written["value"] == [v for s in (1.0, 2.0, 3.0) for v in (1.0, 2.0, s, 4.0, 5.0)]


def test_blocks_that_repeat_are_joined_once(tmp_path: Path) -> None:
    with TableWriter(tmp_path) as writer:
        a = writer.block("steps", {"metric": ["a"], "value": [1.0]})
        b = writer.block("steps", {"metric": ["b", "b"], "value": 2.0})
        for step, blocks in enumerate(([a, b], [a, b], [b, a], [a, b], [a], []), 1):
            for block in blocks:
                writer.append_block(block)
            writer.flush_step(step)
    written = _read(tmp_path, "steps").to_pydict()
    assert "".join(written["metric"]) == "abb" + "abb" + "bba" + "abb" + "a"
    assert written["step"] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5]


def test_a_step_may_be_flushed_twice_but_not_backwards(tmp_path: Path, write_step: Write) -> None:
    with TableWriter(tmp_path) as writer:
        write_step(writer, 3)
        write_step(writer, 3)
        assert writer.last_step == 3
        with pytest.raises(InternalError, match="step 2 was flushed after step 3"):
            writer.flush_step(2)
    with pytest.raises(InternalError, match=r"after close\(\)"):
        writer.flush_step(4)
    writer.close()
    assert _read(tmp_path, "groups").column("step").to_pylist() == [3] * 4


def test_a_batch_larger_than_the_buffer(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(1 << 21).hex()
    texts = [noise[i * 1024 : (i + 1) * 1024] for i in range(4096)]
    with TableWriter(tmp_path) as writer:
        writer.append("steps", {"metric": texts, "value": np.arange(4096)})
        writer.flush_step(1)
        writer.append("steps", {"metric": texts[::-1], "value": 0.0})
        writer.flush_step(2)
    assert _read(tmp_path, "steps").column("metric").to_pylist() == texts + texts[::-1]


def test_many_steps_become_few_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(streams, "ROW_GROUP", 10)
    with TableWriter(tmp_path) as writer:
        for step in range(1, 9):
            write_step(writer, step)
    assert pq.read_metadata(tmp_path / "rows.parquet").num_row_groups == 3
    assert _read(tmp_path, "rows").num_rows == 32


@pytest.mark.parametrize("compress_from", [1, 1 << 30])
def test_compressed_and_plain_batches_read_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_step: Write,
    rows_per_step: dict[str, int],
    compress_from: int,
) -> None:
    writer = TableWriter(tmp_path)
    write_step(writer, 1)
    monkeypatch.setattr(tables, "COMPRESS_FROM", compress_from)
    write_step(writer, 2)
    writer.abandon()
    for name, rows in rows_per_step.items():
        table = _read(tmp_path, name)
        assert table.num_rows == 2 * rows
        left = table.slice(0, rows).drop_columns(["step"])
        if name == "outcomes":
            assert left.equals(table.slice(rows).drop_columns(["step"]))


def test_rows_without_a_flush_are_an_error(tmp_path: Path, fill_step: Write) -> None:
    writer = TableWriter(tmp_path)
    fill_step(writer, 1)
    with pytest.raises(InternalError, match="appended but never flushed"):
        writer.close()
    assert _read(tmp_path, "rows").num_rows == 0


@pytest.mark.parametrize(("begin", "expected"), [(None, 2), (7, 7)])
def test_an_exception_keeps_what_explains_it(
    tmp_path: Path, write_step: Write, fill_step: Write, begin: int | None, expected: int
) -> None:
    def run() -> None:
        with TableWriter(tmp_path) as writer:
            write_step(writer, 1)
            if begin is not None:
                writer.begin_step(begin)
            fill_step(writer, 7)
            raise KeyError("the run itself")

    with pytest.raises(KeyError, match="the run itself"):
        run()
    assert _steps(tmp_path, "findings") == [1, expected]


def test_a_folder_with_tables_is_refused(tmp_path: Path, write_step: Write) -> None:
    with TableWriter(tmp_path) as writer:
        write_step(writer, 1)
    with pytest.raises(UsageError, match=r"DPA801.*tables of another run"):
        TableWriter(tmp_path)
    assert _steps(tmp_path) == [1]


# -- resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("after", "kept"), [(None, 5), (3, 3), (0, 0), (9, 5)])
def test_resuming_drops_later_steps(
    tmp_path: Path, write_step: Write, closed: bool, after: int | None, kept: int
) -> None:
    writer = TableWriter(tmp_path)
    for step in range(1, 6):
        write_step(writer, step)
    writer.close() if closed else writer.abandon()
    with TableWriter(tmp_path, resume=True, resume_after=after) as writer:
        assert writer.last_step == kept
        assert _steps(tmp_path) == list(range(1, kept + 1))
        write_step(writer, kept + 1)
        assert _steps(tmp_path) == list(range(1, kept + 2))
    for name in TABLES:
        assert _steps(tmp_path, name) == list(range(1, kept + 2))


def test_resuming_without_tables_starts_them(tmp_path: Path, write_step: Write) -> None:
    with TableWriter(tmp_path, resume=True, resume_after=4) as writer:
        write_step(writer, 5)
    assert _steps(tmp_path) == [5]


@given(st.lists(st.sampled_from(["append", "rows", "block", "flush", "flush"]), max_size=30))
def test_any_order_of_calls_writes_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    waiting: list[float] = []
    expected: list[tuple[int, float]] = []
    step = 0
    with TableWriter(folder) as writer:
        block = writer.block("steps", {"metric": ["m", "m"], "value": [-1.0, -2.0]})
        for number, call in enumerate([*calls, "flush"]):
            if call == "append":
                writer.append("steps", {"metric": ["m"] * 3, "value": np.full(3, number)})
                waiting += [float(number)] * 3
            elif call == "rows":
                writer.append_rows("steps", [("m", float(number))])
                waiting.append(float(number))
            elif call == "block":
                writer.append_block(block)
                waiting += [-1.0, -2.0]
            else:
                step += 1
                writer.flush_step(step)
                expected += [(step, value) for value in waiting]
                waiting = []
    written = _read(folder, "steps").to_pydict()
    assert list(zip(written["step"], written["value"], strict=True)) == expected
