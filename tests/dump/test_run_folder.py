"""Who may write into a run folder, and what is left of what was there."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump import run_folder
from dataproto_audit.dump.lock import LOCK_NAME
from dataproto_audit.dump.run_folder import (
    RunFolder,
    compact_run,
    default_run_dir,
    open_run,
    refuse_used,
    run_files,
)
from dataproto_audit.dump.schema import TABLES
from dataproto_audit.dump.tables import TableWriter

Write = Callable[[TableWriter, int], None]


def _finish_one(path: Path, write_step: Write, *, steps: int = 2, **options: object) -> None:
    with RunFolder.create(path, config={"seed": 1}, **options) as run:  # type: ignore[arg-type]
        for step in range(run.tables.last_step + 1, run.tables.last_step + 1 + steps):
            write_step(run.tables, step)
        run.finish({"steps": steps})


def test_a_finished_run_has_all_its_parts(tmp_path: Path, write_step: Write) -> None:
    path = tmp_path / "reports" / "a"
    _finish_one(path, write_step)
    assert sorted(p.name for p in path.iterdir()) == [
        "config.yaml", "environment.json", "summary.json", "tables",
    ]  # fmt: skip
    assert sorted(p.stem for p in (path / "tables").iterdir()) == sorted(TABLES)
    assert yaml.safe_load((path / "config.yaml").read_text()) == {"seed": 1}
    assert json.loads((path / "summary.json").read_text()) == {"steps": 2}


def test_the_environment_has_versions_and_no_names(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config="a: 1\n").close()
    text = (tmp_path / "environment.json").read_text()
    found = json.loads(text)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "numpy", "tensordict", "ray", "transformers", "vllm"} <= set(found["packages"])
    assert found["packages"]["numpy"]
    assert found["cpus"] == os.cpu_count()
    for private in (os.uname().nodename, str(Path.home()), str(tmp_path)):
        assert private not in text


def test_making_the_environment_imports_no_engine() -> None:
    code = (
        "import sys; from dataproto_audit.dump.run_folder import environment; environment();"
        "print(*(set(sys.modules) & {'pandas','pandera','torch','ray','vllm','transformers',"
        "'pyarrow.parquet'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("finish", [True, False])
def test_a_used_folder_is_refused(tmp_path: Path, write_step: Write, finish: bool) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        write_step(run.tables, 1)
        if finish:
            run.finish({})
    what = "holds a finished run" if finish else "did not finish"
    with pytest.raises(UsageError, match=what) as caught:
        RunFolder.create(tmp_path, config="")
    assert caught.value.code == "DPA801"
    assert "--overwrite" in caught.value.remedy
    assert open_run(tmp_path).last_step == 1
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_a_folder_that_is_written_to_is_refused(
    tmp_path: Path, write_step: Write, existing: run_folder.Existing
) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        write_step(run.tables, 1)
        with pytest.raises(UsageError, match=f"process {os.getpid()} writes into it"):
            RunFolder.create(tmp_path, config="", existing=existing)
        write_step(run.tables, 2)
    assert open_run(tmp_path).last_step == 2


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(
    tmp_path: Path, write_step: Write
) -> None:
    _finish_one(tmp_path, write_step, steps=3)
    (tmp_path / "trace" / "step_000001").mkdir(parents=True)
    for other in ("notes.txt", "tables/mine.csv"):
        (tmp_path / other).write_text("keep")
    (tmp_path / "tables" / ".rows.parquet.1.tmp").write_text("left by a kill")
    _finish_one(tmp_path, write_step, steps=1, existing="overwrite")
    assert open_run(tmp_path).table("rows")["step"].unique().tolist() == [1]
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "tables" / "mine.csv").exists()
    assert not (tmp_path / "trace").exists()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_files_of_others_are_never_overwritten(
    tmp_path: Path, existing: run_folder.Existing
) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    (tmp_path / "trace").mkdir()
    with pytest.raises(UsageError, match=r"config.yaml there was not written by a run"):
        RunFolder.create(tmp_path, config="", existing=existing)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"
    assert (tmp_path / "trace").exists()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_with_other_files_can_be_used(tmp_path: Path, write_step: Write) -> None:
    (tmp_path / "log.txt").write_text("x")
    _finish_one(tmp_path, write_step)
    assert open_run(tmp_path).ok


def test_resuming_goes_on_behind_the_checkpoint(tmp_path: Path, write_step: Write) -> None:
    _finish_one(tmp_path, write_step, steps=4)
    run = RunFolder.create(tmp_path, config="", existing="resume", resume_after=2)
    assert run.tables.last_step == 2
    assert not open_run(tmp_path).finished
    run.close()
    _finish_one(tmp_path, write_step, steps=1, existing="resume")
    assert open_run(tmp_path).table("rows")["step"].unique().tolist() == [1, 2, 3]
    assert open_run(tmp_path).finished


def test_a_summary_stays_until_the_run_really_goes_on(tmp_path: Path, write_step: Write) -> None:
    _finish_one(tmp_path, write_step, steps=2)
    with RunFolder.create(tmp_path, config="", existing="resume"):
        pass  # it failed to start
    assert open_run(tmp_path).finished
    assert open_run(tmp_path).summary == {"steps": 2}
    with RunFolder.create(tmp_path, config="", existing="resume") as run:
        run.begin()
        run.begin()
    assert open_run(tmp_path).notes == ["the run did not finish"]


def test_a_summary_of_steps_that_were_cut_goes_with_them(tmp_path: Path, write_step: Write) -> None:
    _finish_one(tmp_path, write_step, steps=3)
    with RunFolder.create(tmp_path, config="", existing="resume", resume_after=3):
        pass
    assert open_run(tmp_path).summary == {"steps": 3}
    with RunFolder.create(tmp_path, config="", existing="resume", resume_after=1):
        pass  # it failed to start, from an older checkpoint
    run = open_run(tmp_path)
    assert (run.last_step, run.summary, run.finished) == (1, {}, False)


_KILLED = """
import os, signal, sys
from dataproto_audit.dump.run_folder import RunFolder
run = RunFolder.create(sys.argv[1], config="")
for step in (1, 2):
    run.tables.append("steps", {"metric": ["m"], "value": [step]})
    run.tables.flush_step(step)
run.tables.append("steps", {"metric": ["m"], "value": [3]})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed in its third step."""
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    return tmp_path


def test_a_killed_run_can_be_read_compacted_and_resumed(killed: Path) -> None:
    run = open_run(killed)
    assert run.notes == ["the run did not finish"]
    assert run.metric("m").to_dict() == {1: 1.0, 2: 2.0}
    with pytest.raises(UsageError, match="is dead: the run was killed"):
        RunFolder.create(killed, config="")
    compact_run(killed)
    compact_run(killed)
    assert open_run(killed).metric("m").to_dict() == {1: 1.0, 2: 2.0}
    with RunFolder.create(killed, config="", existing="resume", resume_after=1) as again:
        assert again.tables.last_step == 1
    assert open_run(killed).metric("m").to_dict() == {1: 1.0}


def test_a_killed_run_can_be_overwritten(killed: Path, write_step: Write) -> None:
    _finish_one(killed, write_step, existing="overwrite")
    assert open_run(killed).last_step == 2


def test_a_running_run_is_not_compacted(tmp_path: Path, write_step: Write) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        write_step(run.tables, 1)
        with pytest.raises(UsageError, match="DPA801"):
            compact_run(tmp_path)


def test_an_exception_closes_the_tables_and_gives_the_lock_back(
    tmp_path: Path, write_step: Write, fill_step: Write
) -> None:
    def run() -> None:
        with RunFolder.create(tmp_path, config="") as folder:
            write_step(folder.tables, 1)
            folder.tables.begin_step(2)
            fill_step(folder.tables, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / LOCK_NAME).exists()
    found = open_run(tmp_path)
    assert found.table("rows")["step"].unique().tolist() == [1, 2]
    assert not found.finished


def test_a_summary_is_written_also_when_the_tables_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_step: Write
) -> None:
    def refuse(_folder: Path) -> None:
        raise RunError("DPA802", "the disk is full.")

    run = RunFolder.create(tmp_path, config="")
    write_step(run.tables, 1)
    monkeypatch.setattr("dataproto_audit.dump.streams.compact", refuse)
    with pytest.raises(RunError, match="the disk is full"):
        run.finish({"steps": 1})
    found = open_run(tmp_path)
    assert "the disk is full" in found.summary["tables_error"]
    assert found.last_step == 1


def test_a_failed_start_gives_the_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RunError("DPA802", "the disk is full.")

    monkeypatch.setattr(run_folder, "atomic_write_bytes", refuse)
    with pytest.raises(RunError):
        RunFolder.create(tmp_path, config="")
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_file_in_the_way_is_dpa801(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="there is a file of that name"):
        RunFolder.create(tmp_path / "x", config="")
    with pytest.raises(RunError, match="DPA802"):
        RunFolder.create(tmp_path / "x" / "y", config="")


def test_default_names_are_safe_and_do_not_collide(tmp_path: Path) -> None:
    first = default_run_dir("my exp/../é", root=tmp_path)
    assert re.fullmatch(r"my-exp-\d{8}-\d{6}", first.name)
    assert first.parent == tmp_path
    first.mkdir()
    assert default_run_dir("my exp/../é", root=tmp_path) != first
    assert default_run_dir("...", root=tmp_path).name.startswith("run-")


def test_what_would_be_refused_can_be_asked_without_changing_anything(
    tmp_path: Path, write_step: Write
) -> None:
    assert refuse_used(tmp_path / "new", "refuse") == []
    assert not (tmp_path / "new").exists()
    _finish_one(tmp_path, write_step)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="holds a finished run"):
        refuse_used(tmp_path, "refuse")
    assert refuse_used(tmp_path, "resume") == run_files(tmp_path)
    assert set(run_files(tmp_path)) == before


def test_a_dead_lock_without_a_run_is_in_nobody_s_way(tmp_path: Path, write_step: Write) -> None:
    code = "import sys; from dataproto_audit.dump.lock import RunLock; RunLock.acquire(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / LOCK_NAME).exists()
    _finish_one(tmp_path, write_step)
    assert open_run(tmp_path).ok
