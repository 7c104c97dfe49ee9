"""The command line: exit codes, JSON on stdout alone, errors as one paragraph without traceback."""

import json
import subprocess
import sys

import pytest
import torch

from dataproto_audit import __version__, cli
from dataproto_audit.codes import CODES, RunError
from dataproto_audit.dump import run_folder
from dataproto_audit.dump.run_folder import RunFolder
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.faults import FAULTS
from dataproto_audit.testing.recipes import cook
from dataproto_audit.trainer.config import load_config


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "dataproto_audit.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == __version__


def test_version_help_and_an_unknown_command(call):
    assert call("--version", check=0).stdout.strip()
    assert "train" in call("--help", check=0).stdout
    assert "No such command" in call("trian", check=2).stderr


@pytest.mark.parametrize("name", ["DPA303", "dpa205", "old_log_probs", "update_actor"])
def test_explain_takes_codes_fields_and_stages(name, capsys):
    cli.app(["explain", name], standalone_mode=False)
    assert name.lower() in capsys.readouterr().out.lower()


def test_explain_suggests_near_names(call):
    assert "old_log_probs" in call("explain", "old_log_prbs", check=2).stderr


def test_every_code_can_be_explained(capsys):
    for code in CODES:
        cli.app(["explain", code], standalone_mode=False)
    printed = capsys.readouterr().out
    assert all(code in printed for code in CODES)


def test_fields_prints_a_table_and_json(capsys):
    cli.app(["fields"], standalone_mode=False)
    assert "ref_log_prob" in capsys.readouterr().out
    cli.app(["fields", "--json"], standalone_mode=False)
    table = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in table["stages"]][:3] == ["prompts", "rollout", "union"]
    assert {row["field"] for row in table["fields"]} >= {"responses", "advantages"}


def test_a_usage_error_is_one_paragraph_and_exit_2(call):
    done = call("train", "quickstart", "trainer.total_steps=3", check=2)
    assert done.stderr.strip().count("\n") == 0
    assert "DPA850" in done.stderr
    assert done.stdout == ""


def test_dry_run_checks_and_prints_the_plan(call):
    done = call("train", "quickstart", "--dry-run", "--json", check=0)
    plan = json.loads(done.stdout)
    assert plan["rows_per_step"] == 512
    assert plan["mini_batches_per_step"] == 2
    assert plan["data"]["first_prompt"].endswith("=")


def test_dry_run_finds_an_overlong_prompt(call):
    done = call(
        "train", "quickstart", "--dry-run", "data.max_prompt_length=3",
        "actor_rollout_ref.rollout.max_model_len=32", check=2,
    )  # fmt: skip
    assert "DPA853" in done.stderr
    assert "filter_overlong_prompts" in done.stderr


def test_dry_run_finds_a_model_folder_without_tokenizer(call, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    override = f"actor_rollout_ref.model.path={tmp_path}"
    done = call("train", "quickstart", override, "--dry-run", check=2)
    assert "DPA852" in done.stderr
    assert "tokenizer" in done.stderr


def test_report_refuses_what_is_no_run_folder(call, tmp_path):
    done = call("report", str(tmp_path), check=2)
    assert "DPA803" in done.stderr


def test_report_reads_a_run_that_is_going_on(call, tmp_path):
    with RunFolder.create(tmp_path, config="") as run:
        run.tables.append("steps", {"metric": ["m"], "value": [1.0]})
        run.tables.flush_step(1)
        done = call("report", str(tmp_path), check=0)
    assert "the tables are read as they lie there" in done.stderr
    assert "writes into it" in done.stderr
    assert "the run is still going" in " ".join(done.stdout.split())


def test_report_reads_tables_that_a_full_disk_kept_from_closing(call, tmp_path, monkeypatch):
    with RunFolder.create(tmp_path, config="") as run:
        run.tables.append("steps", {"metric": ["m"], "value": [1.0]})
        run.tables.flush_step(1)
        run.tables.abandon()

    def full(*_):
        raise RunError("DPA802", "steps.parquet: the disk is full.", "Make room.")

    monkeypatch.setattr(run_folder, "compact", full)
    done = call("report", str(tmp_path), "--json", check=0)
    assert "the disk is full" in done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_an_unknown_fault_lists_the_faults(call):
    done = call("train", "quickstart", "audit.inject=nothing@2", check=2)
    assert all(name in done.stderr for name in FAULTS)


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("audit.inject=foo@3", "audit.inject=foo@3"),
        ("audit.inject=log_prob_shift@999", "ends after step 90"),
        ("audit.policy=/nonexistent", "/nonexistent"),
        ("actor_rollout_ref.rollout.temperature=nan", "temperature is nan"),
        ("trainer.resume_mode=auto", "trainer.run_dir"),
        ("a=[", "a=["),
    ],
)
def test_train_dry_run_refuses_what_the_run_would(call, override, fragment):
    for option in (["--dry-run"], []):
        done = call("train", "quickstart", override, *option, check=2)
        assert "DPA851" in done.stderr
        assert fragment in done.stderr
        assert done.stdout == ""


def test_train_dry_run_changes_nothing_and_sees_a_run_that_is_there(call, tmp_path):
    folder = tmp_path / "run"
    override = f"trainer.run_dir={folder}"
    call("train", "quickstart", override, "--dry-run", check=0)
    assert not folder.exists()
    folder.mkdir()
    (folder / "environment.json").write_text("{}")
    done = call("train", "quickstart", override, "--dry-run", check=2)
    assert "DPA801" in done.stderr
    call("train", "quickstart", override, "--dry-run", "--overwrite", check=0)
    assert [path.name for path in folder.iterdir()] == ["environment.json"]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_becomes_a_callback_that_acts_at_its_step_only(name):
    config = load_config("quickstart", [f"audit.inject={name}@3"])
    callbacks = cli._injected(config.audit.inject)
    hooks = [*callbacks.after_stage, *callbacks.sampling, *callbacks.before_sync]
    assert len(hooks) == 1
    if callbacks.sampling:
        used = {"temperature": 1.0}
        assert callbacks.sampling[0](2, used) == used
        assert callbacks.sampling[0](3, used)["temperature"] == pytest.approx(0.7)
    if callbacks.before_sync:
        sent = [callbacks.before_sync[0](step, f"weights {step}") for step in (1, 2, 3, 4)]
        assert sent == ["weights 1", "weights 2", "weights 2", "weights 4"]


@pytest.mark.parametrize(("returned", "said"), [(1, ""), (130, "interrupted")])
def test_what_a_command_returns_is_the_exit_code(call, monkeypatch, returned, said):
    monkeypatch.setattr(cli, "app", lambda standalone_mode: returned)
    assert call("report", "x", check=returned).stderr.strip() == said


def test_ctrl_c_is_130(call, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("dataproto_audit.render.explain.explanation", interrupted)
    assert call("explain", "DPA101", check=130).stderr.strip() == "interrupted"


# -- check -----------------------------------------------------------------------------------------

EARLY = {"op": "shift", "f": "token_level_scores", "by": -1}


@pytest.fixture
def saved(tmp_path):
    """``saved(name, *operations)`` writes a tiny batch as verl saves it."""

    def save(name, *operations):
        batch = cook("T", list(operations))
        tensors = {n: torch.from_numpy(array) for n, array in batch["batch"].items()}
        made = DataProto.from_dict(tensors, batch["non_tensor_batch"], meta_info=batch["meta_info"])
        made.save_to_disk(tmp_path / name)
        return str(tmp_path / name)

    return save


def test_check_prints_findings_and_exits_1(call, saved):
    assert "ok: " in call("check", saved("good.pkl"), check=0).stdout
    done = call("check", saved("early.pkl", EARLY), check=1)
    assert done.stdout.startswith(str(saved("early.pkl", EARLY)))
    for fragment in ("NOT OK", "DPA405", "token_level_scores", "reward_shifted"):
        assert fragment in done.stdout


def test_check_prints_one_json_document_a_batch(call, saved):
    good, early = saved("good.pkl"), saved("early.pkl", EARLY)
    lines = call("check", good, early, "--json", check=1).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [(a["path"], a["ok"]) for a in answers] == [(good, True), (early, False)]
    assert set(answers[1]) >= {
        "path", "ok", "outcomes", "findings", "not_checkable", "evidence_level",
    }  # fmt: skip
    assert set(answers[1]["findings"][0]) >= {
        "code", "severity", "step", "stage", "field", "rows", "columns", "expected", "actual",
        "evidence", "causes", "hint",
    }  # fmt: skip
    assert set(answers[0]["outcomes"]) == {"passed", "failed", "not_checkable", "not_applicable"}
    assert set(answers[0]["not_checkable"][0]) == {"check", "reason"}


def test_check_prints_no_control_characters_of_a_name(call, saved, tmp_path):
    good = saved("go\x1b[31mod.pkl")
    assert "go?[31mod.pkl\n" in call("check", good, check=0).stdout
    (tmp_path / "b\x1bad.pkl").write_bytes(b"junk")
    assert "b?ad.pkl" in call("check", str(tmp_path / "b\x1bad.pkl"), check=2).stderr


def test_check_answers_for_the_sound_files_of_a_folder(call, saved, tmp_path):
    good = saved("good.pkl")
    (tmp_path / "late.pkl").write_bytes(b"junk")
    done = call("check", str(tmp_path), "--json", check=2)
    assert json.loads(done.stdout)["path"] == good
    assert "late.pkl" in done.stderr


def test_check_may_fail_on_warnings(call, saved, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("severities: {DPA405: warn}\n")
    early = saved("early.pkl", EARLY)
    call("check", early, "--policy", str(policy), check=0)
    call("check", early, "--policy", str(policy), "--fail-on", "warn", check=1)
    done = call("check", early, "--fail-on", "info", check=2)
    assert "DPA851" in done.stderr


def test_check_compares_with_the_batch_before(call, saved):
    moved = {"op": "take", "f": "old_log_probs", "idx": [1, 0, 2, 3, 4, 5]}
    before, after = saved("before.pkl"), saved("after.pkl", moved)
    answer = json.loads(call("check", after, "--before", before, "--json", check=1).stdout)
    assert answer["evidence_level"] == "boundary"
    assert "DPA113" in {f["code"] for f in answer["findings"]}


def test_check_reads_a_history_with_or_without_a_batch(call, saved, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "trained_tokens": 9}\n{"step": 2, "trained_tokens": 0}\n')
    answer = json.loads(call("check", "--history", str(path), "--json", check=1).stdout)
    assert (answer["path"], answer["evidence_level"]) == (str(path), "history")
    assert [(f["code"], f["step"]) for f in answer["findings"]] == [("DPA608", 2)]
    both = call("check", saved("a.pkl"), "--history", str(path), "--json", check=1).stdout
    assert json.loads(both)["evidence_level"] == "history"


def test_check_takes_a_stage_and_a_configuration(call, saved, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("actor_rollout_ref: {rollout: {n: 2}}\n")
    early = saved("early.pkl", EARLY)
    out = call("check", early, "--config", str(config), check=1).stdout
    assert "DPA401" in out
    scaled = saved("scaled.pkl", {"op": "mul", "f": "advantages", "at": [1], "v": 3.0})
    call("check", scaled, "--stage", "reward", check=0)
    assert "DPA408" in call("check", scaled, "--stage", "advantage", check=1).stdout


def test_check_scores_a_file_of_cases(call, tmp_path):
    case = {
        "id": "B1", "repro": {"form": "single", "base": "T", "ops": [EARLY]},
        "expect": {"kind": "batch", "level": "fail", "stages": ["reward"],
                   "fields": ["token_level_scores"], "rows": None, "columns": None,
                   "not_checkable_ok": False},
    }  # fmt: skip
    missed = case | {"id": "B2", "expect": case["expect"] | {"fields": ["prompts"]}}
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(case))
    assert json.loads(call("check", "--cases", str(path), "--json", check=0).stdout) == {
        "cases": 1, "right": 1, "wrong": [], "false_alarms": 0, "not_counted": [],
    }  # fmt: skip
    path.write_text(f"{json.dumps(case)}\n{json.dumps(missed)}")
    out = call("check", "--cases", str(path), check=1).stdout
    assert out.startswith("1 of 2 cases right\nB2: field; expected fail reward prompts")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "there is nothing to check"),
        (["nowhere.pkl"], "nowhere.pkl"),
        (["--cases", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--history", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_check_names_what_is_missing(call, args, said):
    done = call("check", *args, check=2)
    assert said in done.stderr
    assert done.stdout == ""


def test_check_refuses_a_configuration_or_stage_that_is_none(call, saved, tmp_path):
    path, config = saved("a.pkl"), tmp_path / "config.yaml"
    assert "cannot be read" in call("check", path, "--config", str(config), check=2).stderr
    config.write_text("n: three\n")
    done = call("check", path, "--config", str(config), check=2)
    assert "the configuration says n='three', which is no whole number." in done.stderr
    assert "advantage" in call("check", path, "--stage", "advantages", check=2).stderr


def test_selftest_of_one_fault(call):
    answer = json.loads(call("selftest", "--fault", "population_std", "--json", check=0).stdout)
    assert answer["faults"] == answer["detected"] == answer["stage_right"] == 1
    assert answer["healthy_batches"] == 0


def test_selftest_of_one_fault_shows_what_is_found(call):
    said = call("selftest", "--fault", "log_prob_shift", check=0).stdout
    found, _, table = said.partition("\ndet: detected")
    assert found.startswith("log_prob_shift on ")
    assert "DPA304 fail: log-probs are shifted by columns" in found
    assert "field     old_log_probs" in found
    assert "log_prob_shift" in table
    assert "healthy" not in table  # none was run


def test_selftest_of_a_fault_that_there_is_not(call):
    assert "population_std" in call("selftest", "--fault", "population_std_", check=2).stderr
