"""Findings, reports and the error that carries them: data first, text second."""

import json
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dataproto_audit.findings import (
    MAX_LISTED,
    MAX_REASONS,
    AuditError,
    Finding,
    Outcome,
    Report,
    at_boundary,
    plain,
)


def finding(**other: Any) -> Finding:
    given: dict[str, Any] = {
        "code": "DPA205",
        "severity": "fail",
        "stage": "rollout",
        "check": "mask_on_padding",
        "field": "response_mask",
        "step": 3,
        "rows": (1, 4),
        "columns": {1: (7,), 4: (6, 7)},
        "expected": "0 on padding",
        "actual": "1 on 3 slots",
        "evidence": {"on padding": 3, "share": 0.12345678, "parts": {"a": 0.5}},
        "causes": ("mask_on_padding", "mask_from_prompt"),
        "hint": "multiply by the attention",
    }
    return Finding(**given | other)


def test_the_text_names_code_place_field_cells_and_causes() -> None:
    text = str(finding())
    for fragment in (
        "DPA205 fail: the response mask covers padding (step 3, after rollout)",
        "field     response_mask",
        "rows      1, 4",
        "columns   row 4: 6, 7",
        "expected  0 on padding",
        "actual    1 on 3 slots",
        "evidence  share: 0.123457",
        "evidence  parts: a=0.5",
        "causes    mask_on_padding > mask_from_prompt",
        "hint      multiply by the attention",
        "explain DPA205",
    ):
        assert fragment in text


def test_a_finding_about_no_stage_names_none() -> None:
    own = {"stage": "", "code": "DPA901"}
    assert str(finding(**own)).splitlines()[0].endswith(" (step 3)")
    assert not str(finding(**own, step=None)).splitlines()[0].endswith(")")
    assert "(after rollout)" in str(finding(step=None))


def test_long_lists_are_cut_in_the_text_only() -> None:
    many = finding(rows=tuple(range(40)), columns={row: tuple(range(20)) for row in range(40)})
    text = str(many)
    assert "(40 in all)" in text
    assert "(20 in all)" in text
    assert "and 37 more rows" in text
    assert text.count("columns ") == 3
    assert len(many.to_dict()["rows"]) == 40
    assert many.cells == 800
    assert MAX_LISTED < 20


def test_without_a_step_and_without_a_field() -> None:
    bare = Finding(code="X1", severity="warn", stage="reward", check="mine")
    assert str(bare).splitlines()[0] == "X1 warn: mine (after reward)"
    assert "field" not in str(bare)


def test_plain_data_for_json() -> None:
    odd = finding(evidence={"array": np.arange(2), "np": np.float32(0.5), "set": {1}, 3: object()})
    data = json.loads(json.dumps(odd.to_dict()))
    assert data["columns"] == {"1": [7], "4": [6, 7]}
    assert data["evidence"]["array"] == [0, 1]
    assert data["evidence"]["np"] == 0.5
    assert data["docs"].endswith("#dpa205")
    assert set(data) >= {"code", "severity", "step", "stage", "field", "rows", "columns",
                         "expected", "actual", "evidence", "causes", "hint"}  # fmt: skip


@pytest.mark.parametrize("value", [None, True, 3, "x", [1, (2,)], {"a": {"b": np.array([1.5])}}])
def test_plain_leaves_plain_things(value: Any) -> None:
    json.dumps(plain(value))


def test_a_code_of_ones_own_is_not_sent_to_the_catalogue() -> None:
    assert "dataproto-audit explain DPA205" in str(finding())
    assert "explain" not in str(finding(code="ACME1"))


def test_reasons_that_are_not_shown_are_counted() -> None:
    outcomes = [Outcome("c", "DPA205", "not_checkable", f"no {n}") for n in range(MAX_REASONS)]
    assert "more reasons" not in str(Report([], outcomes))
    outcomes += [Outcome("c", "DPA205", "not_checkable", f"more {n}") for n in "ab"]
    assert "and 2 more reasons (--json lists all)" in str(Report([], outcomes))


def test_findings_reports_and_errors_travel() -> None:
    report = Report([finding()], [Outcome("mask_on_padding", "DPA205", "failed")])
    assert pickle.loads(pickle.dumps(report)) == report
    error = pickle.loads(pickle.dumps(AuditError([finding(), finding()], "runs/x")))
    assert error.findings == (finding(), finding())
    assert (error.code, error.run_dir, error.exit_code) == ("DPA205", "runs/x", 1)
    assert "also at this boundary: DPA205 response_mask" in str(error)
    assert "run       runs/x" in str(error)


def test_a_report_counts_and_adds_up() -> None:
    report = Report()
    assert report.ok
    report.extend(Report([finding(severity="warn")], [Outcome("a", "DPA205", "failed")]))
    not_recorded = Outcome("c", "DPA2", "not_checkable", "not recorded")
    report.extend(Report([], [Outcome("b", "DPA1", "passed"), not_recorded]))
    assert report.ok
    assert report.counts() == {"passed": 1, "failed": 1, "not_checkable": 1, "not_applicable": 0}
    assert report.severities() == {"fail": 0, "warn": 1, "info": 0}
    report.findings.append(finding())
    assert not report.ok
    assert "NOT OK" in str(report)
    assert [f.severity for f in report] == ["warn", "fail"]
    data = json.loads(report.to_json())
    assert data["not_checkable"] == [{"check": "c", "reason": "not recorded"}]
    assert (data["ok"], len(data["findings"])) == (False, 2)
    assert report.to_pandas().code.tolist() == ["DPA205", "DPA205"]


def test_a_finding_is_placed_at_its_boundary() -> None:
    keys = [f"key{row}" for row in range(5)]
    placed = at_boundary(finding(), step=9, when="before", row_keys=keys)
    assert (placed.step, placed.when, placed.row_keys) == (9, "before", ("key1", "key4"))
    beyond = at_boundary(finding(rows=(1, 77)), step=9, when="after", row_keys=keys)
    assert beyond.row_keys == ("key1",)
    assert at_boundary(finding(), step=1, when="after", row_keys=None).row_keys == ()


def test_columns_are_a_mapping_of_rows() -> None:
    assert isinstance(finding().columns, Mapping)
    assert finding().cells == 3
