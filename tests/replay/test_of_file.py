"""What is wrong with a file itself is said again of the trace that it was converted to."""

import json
from pathlib import Path

import pytest

from dataproto_audit.checker.files import check_file
from dataproto_audit.codes import UsageError
from dataproto_audit.policy import Policy
from dataproto_audit.replay.convert import convert
from dataproto_audit.replay.replay import replay

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
TWICE = SAMPLES / "areal/fault_task_written_twice/rollout/3"


def said(reports):
    return [(f.code, f.severity, f.check, f.rows, f.evidence, f.hint) for report in reports
            for f in report.findings if f.check.startswith("dump.")]  # fmt: skip


def replayed(folder, **options):
    return [step.report for step in replay(folder, **options)]


@pytest.fixture
def trace(tmp_path):
    convert(TWICE, tmp_path / "t")
    return tmp_path / "t"


def test_a_sample_that_is_in_a_file_twice_is_so_in_its_trace(trace):
    of_file = said(checked.report for checked in check_file(TWICE))
    assert [code for code, *_ in of_file] == ["DPA105"]
    assert said(replayed(trace)) == of_file


def test_the_policy_holds_for_it(trace):
    [told] = said(replayed(trace, policy=Policy(severities={"DPA105": "warn"})))
    assert told[:2] == ("DPA105", "warn")
    assert said(replayed(trace, policy=Policy(ignore=("DPA105",)))) == []


def test_of_a_healthy_file_the_outcomes_are_the_same(tmp_path):
    convert(SAMPLES / "areal/healthy/rollout/3", tmp_path / "t")
    sides = [(checked.report for checked in check_file(SAMPLES / "areal/healthy/rollout/3")),
             replayed(tmp_path / "t")]  # fmt: skip
    outcomes, again = (
        [(o.check, o.kind) for report in side for o in report.outcomes if o.check[:5] == "dump."]
        for side in sides
    )
    assert outcomes == again != []


@pytest.mark.parametrize("change", [{"code": "DPA000"}, {"rows": ["x"]}, {"severity": 3}])
def test_a_finding_that_is_none_is_refused(trace, change):
    for path in trace.rglob("boundary.json"):
        head = json.loads(path.read_text())
        head["findings"] = [{**told, **change} for told in head["findings"]]
        path.write_text(json.dumps(head))
    with pytest.raises(UsageError, match="DPA820"):
        replayed(trace)
