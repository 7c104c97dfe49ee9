"""What was found about the file that a boundary was converted from, said again by a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dataproto_audit.codes import CODES
from dataproto_audit.dump.trace import Boundary
from dataproto_audit.dump.trace_read import broken
from dataproto_audit.findings import OUTCOME_KINDS, SEVERITIES, Finding, Outcome, Report
from dataproto_audit.policy import Policy

OF_FILES = "dump."
"""How the names of checks of a file itself begin."""
_NAMES = frozenset(f.name for f in fields(Finding))
_PLAIN = (str, int, float, bool, type(None))


def said_of_file(boundary: Boundary, policy: Policy) -> Report:
    """Findings and outcomes about the file, as ``convert`` recorded them; empty for other traces.

    ``policy`` may leave out a code, or give it another severity.

    Raises :class:`UsageError` (``DPA820``) where they are none.
    """
    report = Report()
    try:
        for told in boundary.findings:
            if str(told.get("check", "")).startswith(OF_FILES):
                report.findings.append(_finding(told))
        for check, code, kind, reason in boundary.outcomes:
            if check.startswith(OF_FILES) and kind in OUTCOME_KINDS and code in CODES:
                report.outcomes.append(Outcome(check, code, kind, reason))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken(
            boundary.step.folder / boundary.name, f"its findings cannot be read ({error})"
        ) from error
    policy.apply(report)
    return report


def _finding(told: Mapping[str, Any]) -> Finding:
    if told["code"] not in CODES or told["severity"] not in SEVERITIES:
        raise ValueError(f"{told['code']} {told['severity']}")
    made = {name: value for name, value in told.items() if name in _NAMES}
    made["rows"] = tuple(map(int, told.get("rows") or ()))
    made["row_keys"] = tuple(map(str, told.get("row_keys") or ()))
    made["columns"] = {
        int(row): tuple(map(int, columns)) for row, columns in (told.get("columns") or {}).items()
    }
    made["causes"] = tuple(map(str, told.get("causes") or ()))
    made["evidence"] = {
        str(name): value for name, value in (told.get("evidence") or {}).items()
        if isinstance(value, _PLAIN)
    }  # fmt: skip
    return Finding(**made)
