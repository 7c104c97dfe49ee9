"""Reading: at the end, while it runs, and what is said when it cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from dataproto_audit import Finding
from dataproto_audit.codes import UsageError
from dataproto_audit.dump import streams
from dataproto_audit.dump.run_folder import RunFolder, open_run
from dataproto_audit.dump.schema import TABLES, VERSION_KEY
from dataproto_audit.dump.tables import TableWriter

Write = Callable[[TableWriter, int], None]


@pytest.fixture
def finished(tmp_path: Path, write_step: Write) -> Path:
    """A finished run of two steps."""
    path = tmp_path / "run"
    with RunFolder.create(path, config={"trainer": {"seed": 2}}) as run:
        write_step(run.tables, 1)
        write_step(run.tables, 2)
        run.finish({"steps": 2, "reward_last": float("nan")})
    return path


def test_everything_of_a_finished_run(finished: Path, rows_per_step: dict[str, int]) -> None:
    run = open_run(finished)
    assert set(run.tables) == set(TABLES)
    assert len(run.tables) == len(TABLES)
    for name, frame in run.tables.items():
        assert list(frame.columns) == [column.name for column in TABLES[name].columns]
        assert len(frame) == 2 * rows_per_step[name]
    assert run.summary == {"steps": 2, "reward_last": "nan"}
    assert run.config == {"trainer": {"seed": 2}}
    assert run.environment["schema"] == 1
    assert (run.ok, run.finished, run.last_step, run.notes) == (True, True, 2, [])
    assert run.metric("critic/score/mean").to_dict() == {1: 0.1, 2: 0.2}
    assert len(run.metric("none")) == 0
    assert "step 2" in repr(run)


def test_empty_cells_and_nan_are_told_apart(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config="") as folder:
        values = {"value": [np.nan, 1.0], "normaliser": [None, np.nan]}
        folder.tables.append("loss", {"mini_batch": [0, 1], "term": "pg", **values})
        folder.tables.flush_step(1)
    run = open_run(tmp_path)
    assert run.arrow("loss").column("normaliser").null_count == 1
    assert run.arrow("loss").column("value").null_count == 0
    assert run.table("loss")["value"].isna().tolist() == [True, False]


def test_integers_with_gaps_stay_integers(finished: Path) -> None:
    fields = open_run(finished).table("fields")
    assert fields["nan"].dtype == pd.Int64Dtype()
    assert fields["nan"].isna().tolist() == [False, True] * 2
    assert fields["rows"].dtype == pd.Int32Dtype()


def test_findings_come_back_as_objects(tmp_path: Path) -> None:
    finding = Finding(
        "DPA303", "fail", "old_log_prob", "gap", field="old_log_probs", step=7, when="before",
        rows=(1, 4), row_keys=("a", "b"), columns={1: (0, 2), 4: (3,)}, expected="x", actual="y",
        evidence={"max": 0.5, "bands": [1, 2], "nested": {"p": "q"}}, causes=("shift", "precision"),
        hint="h",
    )  # fmt: skip
    with RunFolder.create(tmp_path, config="") as folder:
        folder.tables.append_findings([finding, Finding("DPA101", "info", "s", "c", step=1)])
        folder.tables.flush_step(7)
    run = open_run(tmp_path)
    assert run.findings()[0] == finding
    assert run.findings()[1].step == 7
    assert not run.ok


def test_a_running_run_can_be_read_again_and_again(tmp_path: Path, write_step: Write) -> None:
    with RunFolder.create(tmp_path, config="") as folder:
        assert open_run(tmp_path).last_step == 0
        assert len(open_run(tmp_path).table("rows")) == 0
        for step in (1, 2, 3):
            write_step(folder.tables, step)
            run = open_run(tmp_path)
            assert run.last_step == step
            assert run.table("rows")["step"].max() == step
            assert run.notes == ["the run is still going"]
    # The one opened last still reads, though its streams have become Parquet since.
    assert len(run.table("tokens")) == 9


def test_a_run_opened_early_does_not_see_later_steps(tmp_path: Path, write_step: Write) -> None:
    with RunFolder.create(tmp_path, config="") as folder:
        write_step(folder.tables, 1)
        early = open_run(tmp_path)
        write_step(folder.tables, 2)
        assert early.table("rows")["step"].unique().tolist() == [1]


def test_steps_lost_to_a_power_cut_are_noted(tmp_path: Path, write_step: Write) -> None:
    folder = RunFolder.create(tmp_path, config="")
    for step in (1, 2, 3):
        write_step(folder.tables, step)
    folder.tables.abandon()
    rows = streams.stream_path(tmp_path / "tables", "rows")
    rows.write_bytes(rows.read_bytes()[:-1])
    run = open_run(tmp_path)
    assert run.last_step == 2
    assert "the last 1 steps are not wholly on disk" in run.notes


def _read_all(path: Path) -> None:
    run = open_run(path)
    for name in TABLES:
        run.table(name)
    assert run.summary is not None
    assert run.config is not None


def _refused(path: Path, fragment: str) -> UsageError:
    with pytest.raises(UsageError, match=fragment) as caught:
        _read_all(path)
    assert caught.value.code == "DPA803"
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return caught.value


def test_missing_empty_and_foreign_folders(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "there is no such folder")
    _refused(tmp_path, "the folder is empty")
    (tmp_path / "x.txt").write_text("")
    _refused(tmp_path, "no run in this folder")
    _refused(tmp_path / "x.txt", "a file, not a run folder")


def test_the_folder_above_names_its_runs(finished: Path) -> None:
    assert "Name one of the 1 runs in it: run." in _refused(finished.parent, "holds runs").remedy


@pytest.mark.parametrize("content", [b"", b"PAR1", b"junk" * 100])
def test_a_damaged_table_is_named(finished: Path, content: bytes) -> None:
    (finished / "tables" / "groups.parquet").write_bytes(content)
    _refused(finished, "groups.parquet: damaged")


def test_a_missing_table_is_named(finished: Path) -> None:
    (finished / "tables" / "groups.parquet").unlink()
    _refused(finished, "the table groups is missing")


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("summary.json", "{", "damaged"),
        ("summary.json", "[]", "a mapping is expected"),
        ("config.yaml", "a: [", "not YAML"),
        ("config.yaml", "7", "a mapping is expected"),
        ("environment.json", '{"schema": 2}', "reads up to 1"),
        ("environment.json", '{"schema": "x"}', "reads up to 1"),
    ],
)
def test_damaged_documents_are_named(
    finished: Path, name: str, content: str, fragment: str
) -> None:
    (finished / name).write_text(content)
    _refused(finished, f"{name}: .*{fragment}")


def test_a_newer_table_is_refused(finished: Path) -> None:
    path = finished / "tables" / "ranks.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({VERSION_KEY: "99"}), path)
    assert "Upgrade" in _refused(finished, "table schema 99").remedy


@pytest.mark.parametrize(
    ("table", "column", "value", "fragment"),
    [
        ("outcomes", "kind", "skipped", "column kind breaks the rule"),
        ("findings", "severity", "bad", "column severity breaks the rule"),
        ("rows", "prompt_length", -1, "column prompt_length breaks the rule"),
        ("fields", "nan", -1, "column nan breaks the rule"),
    ],
)
def test_pandera_refuses_values_outside_the_schema(
    finished: Path, table: str, column: str, value: object, fragment: str
) -> None:
    path = finished / "tables" / f"{table}.parquet"
    data = pq.read_table(path).to_pydict()
    data[column][0] = value
    pq.write_table(TABLES[table].arrow.empty_table().from_pydict(data, TABLES[table].arrow), path)
    run = open_run(finished)
    with pytest.raises(UsageError, match=fragment):
        run.table(table)
    assert len(run.table(table, validate=False)) == len(data[column])


def test_unknown_tables(finished: Path) -> None:
    run = open_run(finished)
    with pytest.raises(UsageError, match="no table 'row'") as caught:
        run.table("row")
    assert "rows" in caught.value.remedy
    with pytest.raises(KeyError):
        run.tables["row"]


def test_evidence_is_strict_json(finished: Path) -> None:
    for text in open_run(finished).table("findings")["evidence"]:
        assert json.loads(text) == {"cells": 2}
