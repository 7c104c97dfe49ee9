"""The command line: exit codes, JSON on stdout alone, errors as one paragraph without traceback."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dataproto_audit import __version__, cli
from dataproto_audit.codes import CODES
from dataproto_audit.testing.faults import FAULTS
from dataproto_audit.trainer.config import load_config


@pytest.fixture
def call(monkeypatch, capsys):
    """``call(*args, check=CODE)`` runs the command line in this process."""

    def run(*args, check):
        monkeypatch.setattr(sys, "argv", ["dataproto-audit", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code or 0
        out, err = capsys.readouterr()
        assert code == check, err
        assert "Traceback" not in err
        return SimpleNamespace(stdout=out, stderr=err)

    return run


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


def test_an_unknown_fault_lists_the_faults(call):
    done = call("train", "quickstart", "audit.inject=nothing@2", check=2)
    assert all(name in done.stderr for name in FAULTS)


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
