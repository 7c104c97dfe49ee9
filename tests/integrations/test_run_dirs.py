"""A second run into one folder is audited beside it, and what was there stays as it was."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from dataproto_audit import attach, open_run
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.lock import RunLock
from dataproto_audit.dump.run_folder import RunFolder
from dataproto_audit.integrations import run_dirs
from dataproto_audit.integrations.run_dirs import fresh_folder

from .conftest import make


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_restarted_job_is_audited_beside_the_run_before_it(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with attach(make(verl, steps=2), run_dir="runs/one") as first:
        first.runs[0].trainer.fit()
    kept = contents(Path("runs/one"))
    assert "run-2" not in caplog.text
    capsys.readouterr()
    for number in (2, 3):
        with attach(make(verl), run_dir="runs/one", workers=True) as attached:
            attached.runs[0].trainer.fit()
        run = open_run(f"runs/one-{number}")
        assert run.summary["run_dir"] == f"runs/one-{number}"
        assert run.summary["observed"]["advantage.after"] == 1
        assert (run.path / "trace").is_dir()
    assert contents(Path("runs/one")) == kept
    assert not list(Path("runs").glob("*/ranks*"))
    [told] = [r.getMessage() for r in caplog.records if "runs/one-2." in r.getMessage()]
    assert "holds a finished run" in told
    assert "is written into runs/one-2" in told
    assert capsys.readouterr().err.count("tables in runs/one-2") == 2  # when it began and ended


def test_a_run_that_was_killed_keeps_its_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", config={}).close()
    folder, why = fresh_folder(tmp_path / "run", config={})
    assert folder.path == tmp_path / "run-2"
    assert "did not finish" in why
    folder.close()


def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock.acquire(tmp_path / "run")
    folder, why = fresh_folder(tmp_path / "run", config={})
    assert folder.path == tmp_path / "run-2"
    assert f"process {os.getpid()} writes into it" in why
    folder.close()
    lock.release()


def test_a_free_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("not ours")
    monkeypatch.chdir(tmp_path / "mine")
    folder, why = fresh_folder(Path(), config={})
    assert (folder.path, why) == (tmp_path / "mine", "")
    folder.close()


def test_it_gives_up_with_what_an_attached_user_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dirs, "MOST", 1)
    RunFolder.create(tmp_path / "run", config={}).close()
    with pytest.raises(UsageError, match="DPA801") as refused:
        fresh_folder(tmp_path / "run", config={})
    assert "DATAPROTO_AUDIT_RUN_DIR" in str(refused.value)
    assert "trainer." not in str(refused.value)


def test_that_nothing_is_written_is_said_with_the_variable_that_helps(
    verl: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RunError("DPA802", "run: the folder is not writable.", "Change trainer.run_dir.")

    monkeypatch.setattr(RunFolder, "create", refuse)
    with attach(make(verl), run_dir="run") as attached:
        attached.runs[0].trainer.fit()
    assert attached.observed["advantage.after"] == 1
    assert "DPA802 run: the folder is not writable. NOTHING of this run is written" in caplog.text
    assert "DATAPROTO_AUDIT_RUN_DIR" in caplog.text
    assert "trainer.run_dir" not in caplog.text
    said = capsys.readouterr().err
    assert "NOTHING is written" in said
    assert "nothing was written" in said


def test_a_name_that_no_folder_can_have_costs_the_tables_only(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(verl)
    with attach(trainer, run_dir="\0bad"):
        trainer.fit()
    assert "DPA802" in caplog.text
    assert "NOTHING of this run is written" in caplog.text
    assert len(trainer.trained) == 1
    assert "nothing was written" in capsys.readouterr().err


def test_tables_that_are_gone_are_not_claimed(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataproto_audit.dump.layout import TABLES_DIR
    from dataproto_audit.integrations import session

    asked: list[Path] = []

    def none(folder: Path) -> bool:
        asked.append(folder)
        return False

    monkeypatch.setattr(session, "has_tables", none)
    trainer = make(verl)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert asked == [Path("run") / TABLES_DIR]
    assert capsys.readouterr().err.splitlines()[-1].endswith("NO tables are in run")


def test_ranks_tell_where_the_name_is_that_of_a_file(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    Path("taken").write_text("a file")
    with attach(make(verl), run_dir="taken", workers=True) as attached:
        attached.runs[0].trainer.fit()
    run = open_run("taken-2")
    assert run.summary["switched_off"] == {}
    assert "DPA904" not in caplog.text
    assert Path("taken").read_text() == "a file"
    assert sorted(path.name for path in Path().iterdir()) == ["taken", "taken-2"]
