"""The checker on public bug reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding, Outcome, Report
from dataproto_audit.testing.cases import report_of, run_cases, score

CASES = Path(__file__).parents[1] / "data" / "cases" / "cases.jsonl"
MISSED = {
    # Two rows of one prompt repeat each other, in a batch of six rows with responses of five
    # tokens: such a response is likely enough to be sampled twice in good health.
    "B055", "B056",
    # Pads at the end of a full row, with log-probs of the engine: a weak policy samples such.
    "B019",
    # Rollout log-probs renormalised after top-p, while nothing tells top-p: a filter that was
    # configured raises them just so, and is healthy.
    "B085",
}  # fmt: skip


def test_public_bug_reports() -> None:
    result = run_cases(CASES)
    wrong = {s.id: f"{s.reason}; expected {s.expected}, got {s.got}" for s in result.wrong}
    assert set(wrong) <= MISSED, json.dumps(wrong, indent=1)
    said = result.to_dict()
    assert (said["cases"], said["false_alarms"]) == (84, 0)
    assert said["right"] >= 80
    assert len(said["not_counted"]) == 27
    assert not set(said["not_counted"]) & {s.id for s in result.scores}
    assert set(said) == {"cases", "right", "wrong", "false_alarms", "not_counted"}
    assert all(set(case) == {"id", "expected", "got", "reason"} for case in said["wrong"])


def _finding(severity: Any = "fail", **more: Any) -> Finding:
    known: dict[str, Any] = {"stage": "reward", "check": "x", "field": "responses", "rows": (1,),
                             "columns": {1: (2,)}}  # fmt: skip
    return Finding("DPA405", severity, **(known | more))


def _expect(**more: Any) -> dict[str, Any]:
    known = {"level": "fail", "stages": ["reward"], "fields": ["responses"], "rows": [1],
             "columns": {"1": [2]}, "not_checkable_ok": False}  # fmt: skip
    return known | more


@pytest.mark.parametrize(
    ("findings", "expect", "reason"),
    [
        ([_finding()], {}, ""),
        ([], {}, "not detected"),
        ([_finding("info")], {}, "not detected"),
        ([_finding("warn")], {}, "severity warn"),
        ([_finding("warn")], {"levels": ["warn", "fail"]}, ""),
        ([_finding(stage="rollout")], {}, "stage rollout"),
        ([_finding(field="prompts")], {}, "field, rows, columns"),
        ([_finding(field="meta_info.responses")], {}, ""),
        ([_finding(rows=(2,))], {}, "rows"),
        ([_finding(rows=(2,))], {"rows": None}, ""),
        ([_finding(columns={1: (2, 3)})], {}, "columns"),
        ([_finding(columns={1: (2, 3)})], {"columns": None}, ""),
        ([_finding(rows=(4,))], {"alt": [{"rows": [4], "columns": {"1": [2]}}]}, ""),
        ([_finding(rows=(4,))],
         {"alt": [{"field": "prompts", "rows": [4], "columns": None}]}, "rows"),
        ([_finding(rows=(1,), columns={}), _finding(rows=(2,), columns={})],
         {"rows": [1, 2], "columns": None}, ""),
        ([_finding(stage="union", field="uid"), _finding()], {}, "stage union"),
        ([_finding(stage="union", field="uid"), _finding()], {"also": [["union", "uid"]]}, ""),
        ([], {"level": "pass"}, ""),
        ([_finding("info")], {"level": "pass"}, ""),
        ([_finding("warn")], {"level": "pass"}, "false alarm"),
        ([_finding("warn")], {"level": "info"}, "false alarm"),
    ],
)  # fmt: skip
def test_what_counts_as_right(findings: list[Finding], expect: dict[str, Any], reason: str) -> None:
    found = score("case", _expect(**expect), Report(findings))
    assert found.reason == reason
    assert found.false_alarm == (reason == "false alarm")


def test_an_honest_not_checkable_is_right_where_the_case_says_so() -> None:
    lacking = Outcome("x", "DPA405", "not_checkable", "field not in the batch: responses")
    report = Report([], [lacking])
    assert score("case", _expect(not_checkable_ok=True), report).reason == ""
    assert score("case", _expect(), report).reason == "not detected"
    other = Report([], [Outcome("x", "DPA405", "not_checkable", "setting unknown: n")])
    assert score("case", _expect(not_checkable_ok=True), other).reason == "not detected"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "line 1: not a JSON object"),
        ("\n\n{", "line 3: not JSON"),
        ('{"id": "B1"}', "line 1: not a case"),
        ('{"id": "B1", "repro": {"form": "triple"}, "expect": {"kind": "batch"}}',
         "unknown form 'triple'"),
        ('{"id": "B1", "repro": {"form": "single", "ops": [{"op": "melt"}]},'
         ' "expect": {"kind": "batch"}}', "unknown operation 'melt'"),
        ('{"id": "B1", "repro": {"form": "single", "base": "Z", "ops": []},'
         ' "expect": {"kind": "batch"}}', "unknown base batch 'Z'"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_cases(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="DPA857") as caught:
        run_cases(path)
    assert said in str(caught.value)


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name in ("nowhere.jsonl", "binary"):
        with pytest.raises(UsageError, match="cannot be read"):
            run_cases(tmp_path / name)


def test_a_case_about_a_function_has_no_batch() -> None:
    assert report_of({"form": "explicit"}, "function") is None
