"""How verdicts of the checks become outcomes and findings."""

from __future__ import annotations

from functools import lru_cache

from dataproto_audit.contracts.check import Violation
from dataproto_audit.contracts.relations import RowViolation
from dataproto_audit.findings import Finding, Outcome, OutcomeKind


@lru_cache(maxsize=4096)
def outcome_of(check: str, code: str, kind: OutcomeKind, reason: str = "") -> Outcome:
    """Outcomes are few and immutable: one object each."""
    return Outcome(check, code, kind, reason)


def finding_of(stage: str, check: str, violation: Violation) -> Finding:
    """A broken declaration as a finding."""
    rows = violation.rows if isinstance(violation, RowViolation) else ()
    columns = violation.columns if isinstance(violation, RowViolation) else {}
    return Finding(
        code=violation.code,
        severity="fail",
        stage=stage,
        check=check,
        field=violation.field,
        rows=tuple(rows),
        columns=columns,
        expected=violation.expected,
        actual=violation.actual,
        evidence=violation.evidence,
        causes=violation.causes,
    )


def own_fault(code: str, name: str, step: int | None, error: Exception) -> Finding:
    """An error inside this package as a finding."""
    return Finding(
        code=code,
        severity="warn",
        stage="",
        check=name,
        step=step,
        expected="no error inside this package",
        actual=f"{type(error).__name__}: {error}",
        hint="training goes on without this check",
    )
