"""The sampling settings that the engine reports (DPA111)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing import faults
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Change, Truth, audit, check_case, each

ALL_ROWS = tuple(range(16))


def _reports(name: str, value: float) -> Change:
    def change(b: Boundary) -> Truth:
        b.batch.meta_info["sampling"][name] = value
        return Truth(f"sampling.{name}", ALL_ROWS)

    change.__name__ = f"{name}_{value}"
    return change


CASES = [
    Case("sampling_settings", "DPA111", "rollout", _reports("temperature", 0.7),
         "temperature_mismatch", "0.7 (reported by the engine)"),
    Case("sampling_settings", "DPA111", "rollout", _reports("top_p", 0.9),
         "engine_setting", "1 (configured)"),
    Case("sampling_settings", "DPA111", "rollout", _reports("top_k", 50),
         "engine_setting", "-1 (configured)"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_no_limit_has_two_spellings() -> None:
    ran = audit(change={"rollout": _reports("top_k", 0)}, until="rollout")
    assert ran.outcome("sampling_settings", "rollout").kind == "passed"


def test_the_fault_that_is_seeded_in_a_run() -> None:
    colder = faults.FAULTS["other_temperature"].apply
    ran = audit(until="rollout", sampling=colder)
    [finding] = ran.findings("sampling_settings", "rollout")
    assert (finding.field, finding.rows) == ("sampling.temperature", ALL_ROWS)


@pytest.mark.parametrize("setting", ["top_p", "top_k"])
def test_what_is_not_configured_is_not_compared(setting: str) -> None:
    change = {"rollout": _reports(setting, 0.5)}
    ran = audit(change=change, until="rollout", settings={setting: None})
    assert ran.outcome("sampling_settings", "rollout").kind == "passed"


def test_an_engine_that_reports_nothing() -> None:
    def silent(b: Boundary) -> Any:
        del b.batch.meta_info["sampling"]
        return Truth("")

    outcome = audit(Options(), {"rollout": silent}, until="rollout").outcome(
        "sampling_settings", "rollout"
    )
    assert (outcome.kind, outcome.reason) == ("not_checkable", "not recorded: sampling")
