"""Judgements about a file itself: by the checker, under the policy, with the step of the file."""

import ast
from pathlib import Path

import dataproto_audit.dump.readers as readers
from dataproto_audit.checker.own_file import report_of
from dataproto_audit.dump.readers.saved import Hint, Saved, parts
from dataproto_audit.policy import Policy

TWICE = {"uid": list("aab"), "sample_idx": [0, 0, 1]}


def saved(columns, *, framework="areal", **meta):
    made = Saved(Path("x"), "", "jsonl", parts({}, {}, meta), Hint(step=3), framework=framework)
    return made.with_columns(columns)


def test_a_repeated_sample_names_its_rows_and_the_step():
    [finding] = report_of(saved(TWICE)).findings
    assert (finding.code, finding.severity, finding.step, finding.rows) == (
        "DPA105", "fail", 3, (1,))  # fmt: skip
    assert finding.evidence == {"first repeated": "a, 0"}
    assert "appends" in finding.hint


def test_the_policy_holds_for_what_is_said_of_a_file():
    assert report_of(saved(TWICE), policy=Policy(severities={"DPA105": "warn"})).ok
    assert not report_of(saved(TWICE), policy=Policy(ignore=("DPA105",))).findings


def test_groups_that_cannot_be_told_apart_are_not_passed():
    columns = {"advantage": [1.0, -1.0], "right": [1.0, 0.0]}
    [outcome] = report_of(saved(columns, framework="trl")).outcomes
    assert (outcome.check, outcome.kind) == ("dump.advantage", "not_checkable")
    grouped = report_of(saved({**columns, "uid": ["a", "a"]}, framework="trl"))
    assert [outcome.kind for outcome in grouped.outcomes] == ["passed"]


def test_no_reader_makes_a_finding():
    for path in Path(readers.__file__).parent.glob("*.py"):
        names = [node.module for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.ImportFrom)]  # fmt: skip
        assert "dataproto_audit.findings" not in names, path.name
