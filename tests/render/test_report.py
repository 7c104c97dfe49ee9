"""The report of a run, from its tables alone."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from dataproto_audit.dump.run_folder import RunFolder, open_run
from dataproto_audit.findings import Finding
from dataproto_audit.render.terminal import render_report


def _report(path: Path) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(render_report(open_run(path)))
    return out.getvalue()


def _step(run: RunFolder, step: int) -> None:
    tables = run.tables
    tables.append("steps", {
        "metric": ["critic/score/mean", "timing_s/rollout", "timing_s/reward", "timing_s/step"],
        "value": [step / 10, 3.0, 1.0, 4.0],
    })  # fmt: skip
    tables.append_rows("outcomes", [
        ("rollout", "after", "masks", "DPA205", "passed", ""),
        ("rollout", "after", "gap", "DPA303", "not_checkable", "no rollout_log_probs \x1b[0m"),
        ("reward", "after", "sum", "DPA406", "failed" if step == 2 else "passed", None),
    ])  # fmt: skip
    if step == 2:
        tables.append_findings([
            Finding("DPA603", "warn", "update_actor", "spike"),
            Finding("DPA406", "fail", "reward", "sum", rows=(1,), actual="0 [red]"),
        ])  # fmt: skip
    tables.append("rows", {
        "row": [0, 1], "row_key": ["k" * 64, "short"], "uid": "u", "prompt_length": 2,
        "response_length": [3, 4], "trained_tokens": [3, 4], "score": [0.0, 1.0],
        "rollout_old_gap_max": [0.001 * step, float("nan")], "flags": "",
    })  # fmt: skip
    tables.append("ranks", {
        "stage": "update_actor", "rank": [0, 1], "rows": 1, "tokens": [30, 10],
        "micro_batches": [2, 2 if step == 1 else 3], "peak_token_sum": 30, "bubble": [0.0, 0.5],
        "cpu_s": 0.1,
    })  # fmt: skip
    tables.flush_step(step)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run of three steps with two findings."""
    with RunFolder.create(tmp_path, config="") as run:
        for step in (1, 2, 3):
            _step(run, step)
        run.finish({})
    return tmp_path


def test_outcomes_come_in_the_order_of_the_loop(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        run.tables.append_rows("outcomes", [
            (stage, "after", "masks", "DPA205", "passed", "")
            for stage in ("sync_weights", "end of step", "update_actor", "prompts", "rollout")
        ])  # fmt: skip
        run.tables.flush_step(1)
        run.finish({})
    text = _report(tmp_path)
    assert [line.split("  ")[0] for line in text.split("\nstage")[1].splitlines()[1:6]] == [
        "prompts", "rollout", "update_actor", "sync_weights", "end of step",
    ]  # fmt: skip


def test_the_report_has_every_section(run_path: Path) -> None:
    text = _report(run_path)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert text.startswith("NOT OK")
    assert "step 3" in text.splitlines()[0]
    assert "Reward (critic/score/mean, means of 3 steps): 0.2 -> 0.2" in lines
    assert any(line.startswith("▁") and line.endswith("█") for line in lines)
    assert "rollout 3 0 3 0" in lines
    assert "reward 2 1 0 0" in lines
    assert "all 5 1 3 0" in lines
    assert "not checkable 3 times: no rollout_log_probs \\x1b[0m" in lines
    assert any(line.startswith("DPA406 fail reward token-level scores") for line in lines)
    assert text.index("DPA406 fail") < text.index("DPA603 warn")
    assert "0 [red]" in text
    assert "rollout 9.0 75 % 3.000 3.000" in lines
    assert not any(line.startswith("step 12") for line in lines)
    assert "3 0 kkkkkkkkkkkk…kkkkkkkkkkk 0.003 3 0" in lines
    assert "Largest old_ref_gap_max" not in text
    assert "update_actor 2 1.5 1.5 25 % 2" in lines
    assert "\x1b" not in text


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config="").close()
    text = _report(tmp_path)
    assert text.startswith("ok")
    assert "the run did not finish" in text
    assert "Findings: none" in text


def test_a_run_that_goes_on_has_a_report(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        _step(run, 1)
        assert "the run is still going" in _report(tmp_path)


def test_ranks_without_tokens_or_times_are_no_division(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config="") as run:
        run.tables.append_rows("ranks", [("dispatch", 0, 0, 0, 0, 0, None, None)])
        run.tables.flush_step(1)
    lines = {" ".join(line.split()) for line in _report(tmp_path).splitlines()}
    assert "dispatch 1 nan nan - 0" in lines
