"""What is printed at the end, and for a finding."""

import io
from typing import Any

import pytest
from rich.console import Console

from dataproto_audit.atomic import json_text
from dataproto_audit.findings import Finding
from dataproto_audit.render.summary import final_summary, render_finding, stderr_console

SUMMARY: dict[str, Any] = {
    "run_dir": "reports/quickstart-1", "steps": 120, "reward_first": 0.3125, "reward_last": 0.9,
    "boundaries": 2880, "outcomes": {"passed": 9000, "failed": 1, "not_checkable": 12,
                                     "not_applicable": 0},
    "findings": {"fail": 0, "warn": 1, "info": 2}, "audit_cpu_share": 0.0213,
    "stages": ["rollout", "reward", "update_actor"], "backend": "fsdp2", "world_size": 2,
}  # fmt: skip

FINDING = Finding(
    "DPA303", "fail", "old_log_prob", "gap", field="old_log_probs", step=3, rows=tuple(range(20)),
    columns={row: (1, 2) for row in range(20)}, expected="gap <= 1e-5", actual="gap 4.1",
    evidence={"max": 4.123456, "shift": {"+1": 3e-6}, "bands": [0.5, 1]},
    causes=("shift", "precision"), hint="Slice logits [-R-1:-1].",
)  # fmt: skip


def _printed(thing: Any = None, *, summary: dict[str, Any] | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    if summary is None:
        console.print(thing)
    else:
        final_summary(summary, console=console)
    return out.getvalue()


def test_the_summary_says_over_how_many_steps_the_cpu_time_and_the_goal() -> None:
    text = _printed(summary={**SUMMARY, "reward_mean_over": 3, "cpu_s": 131.4})
    for fragment in (
        "0.9, means of the first and last 3 steps", "131 s of all processes", "goal: 3 %",
    ):  # fmt: skip
        assert fragment in text
    plain = _printed(summary={**SUMMARY, "reward_mean_over": 1})
    assert "means of" not in plain
    assert "all processes" not in plain


def test_a_finding_about_no_stage_names_none() -> None:
    data = {
        "code": "DPA901", "severity": "warn", "check": "own", "stage": "", "when": "after",
        "step": 3, "field": "", "rows": [], "row_keys": [], "columns": {}, "expected": "",
        "actual": "", "evidence": {}, "causes": [], "hint": "",
    }  # fmt: skip
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_finding(data))
    assert "step 3, check own" in console.export_text()
    console.print(render_finding({**data, "stage": "reward"}))
    assert "step 3, after reward, check own" in console.export_text()
    console.print(render_finding({**data, "step": None}))
    assert "where" in (text := console.export_text())
    assert "  check own" in text


def test_the_summary_says_what_the_run_did() -> None:
    text = _printed(summary=SUMMARY)
    for fragment in (
        "run finished: ok", "0.3125 -> 0.9", "120 (fsdp2 on 2 ranks)", "2880",
        "9000 passed, 1 failed, 12 not_checkable", "1 warn, 2 info",
        "2.13 % of CPU time, writing the tables included", "rollout, reward, update_actor",
        "reports/quickstart-1",
    ):  # fmt: skip
        assert fragment in text


def test_optional_keys_are_shown_when_present() -> None:
    text = _printed(summary={
        **SUMMARY, "stage_wall_s": {"reward": 1.0, "rollout": 30.0}, "wall_s": 75, "tables": "x/t",
        "resumed_after": 40,
        "every": {"sync_log_probs": 20, "masks": 1}, "audit_cpu_ms_per_step": 6.5,
        "findings": {"fail": 2, "warn": 0, "info": 0},
    })  # fmt: skip
    for fragment in (
        "2 fail", "120 in 1:15 with start-up (fsdp2 on 2 ranks)", "sync_log_probs every 20 steps",
        "x/t", "after step 40",
        "6.5 ms a step", "30.0 s  97 %  rollout",
    ):  # fmt: skip
        assert fragment in text
    assert "masks every" not in text
    assert text.index("rollout") < text.index("reward", text.index("rollout"))


@pytest.mark.parametrize("missing", [*SUMMARY, None])
def test_what_is_missing_is_left_out(missing: str | None) -> None:
    left = {} if missing is None else {k: v for k, v in SUMMARY.items() if k != missing}
    assert "run finished" in _printed(summary=left)


def test_tables_that_could_not_be_closed_are_said() -> None:
    assert "the disk is full" in _printed(summary={**SUMMARY, "tables_error": "the disk is full"})


def test_a_finding_shows_all_its_parts() -> None:
    text = _printed(render_finding(FINDING))
    for fragment in (
        "DPA303 fail:", "step 3, after old_log_prob, check gap", "old_log_probs",
        "0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)", "row 0: 1, 2", "and 17 more rows",
        "gap <= 1e-5", "gap 4.1", "max: 4.123", "shift: +1=3e-06", "bands: 0.5, 1",
        "shift > precision", "Slice logits [-R-1:-1].", "dataproto-audit explain DPA303",
    ):  # fmt: skip
        assert fragment in text


def test_a_finding_a_mapping_and_a_table_row_look_alike() -> None:
    data = FINDING.to_dict()
    row = {key: v if isinstance(v, (str, int)) else json_text(v) for key, v in data.items()}
    assert _printed(render_finding(data)) == _printed(render_finding(FINDING))
    assert _printed(render_finding(row)) == _printed(render_finding(FINDING))


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    hostile = "[bold]x[/] [/wrong] \x1b[2J\x1b]0;t\x07"
    finding = Finding("DPA101", "warn", hostile, hostile, field=hostile, actual=hostile,
                      evidence={hostile: hostile}, hint=hostile)  # fmt: skip
    text = _printed(render_finding(finding))
    assert "\x1b" not in text
    assert text.count("[bold]x[/] [/wrong]") >= 4
    text = _printed(summary={**SUMMARY, "run_dir": hostile, "stages": [hostile]})
    assert "[bold]x[/]" in text
    assert "\x1b" not in text


def test_the_summary_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert stderr_console().stderr
    final_summary(SUMMARY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "0.3125 -> 0.9" in captured.err
