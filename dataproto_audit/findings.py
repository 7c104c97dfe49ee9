"""What a check reports: findings, outcomes and reports.

An object first, text second: every field of a :class:`Finding` is data that a program can use, and
``str(finding)`` is the paragraph for a person. Findings, reports and :class:`AuditError` survive
pickling, because workers return them through Ray.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dc_field
from typing import TYPE_CHECKING, Any, Literal

from dataproto_audit.codes import CODES, CodedError
from dataproto_audit.reasons import SettingUnknown

if TYPE_CHECKING:
    import pandas as pd

Severity = Literal["fail", "warn", "info"]
OutcomeKind = Literal["passed", "failed", "not_checkable", "not_applicable"]
When = Literal["before", "after"]

SEVERITIES: tuple[Severity, ...] = ("fail", "warn", "info")
OUTCOME_KINDS: tuple[OutcomeKind, ...] = ("passed", "failed", "not_checkable", "not_applicable")
MAX_REASONS = 5
"""Reasons for what was not checkable that the text of a report tells, most frequent first."""
MAX_LISTED = 8
"""Rows, and columns of a row, that the text of a finding lists; the object holds all of them."""


def plain(value: Any) -> Any:
    """``value`` as something ``json`` can write: arrays become lists, scalars Python numbers."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def listed(items: Sequence[Any]) -> str:
    """The first :data:`MAX_LISTED` items, and how many there are if that is more."""
    shown = ", ".join(str(item) for item in items[:MAX_LISTED])
    return shown + (f", ... ({len(items)} in all)" if len(items) > MAX_LISTED else "")


@dataclass(frozen=True)
class Finding:
    """One failed check: where it is, what was expected, and what would explain it.

    ``rows`` are positions in the batch of the boundary, ``row_keys`` their identities through the
    step. ``columns`` maps a row to positions on the field's own last axis. ``causes`` is ranked,
    most likely first, in the vocabulary of :data:`dataproto_audit.codes.CAUSES`.
    """

    code: str
    severity: Severity
    stage: str
    check: str
    field: str = ""
    step: int | None = None
    when: When = "after"
    rows: tuple[int, ...] = ()
    row_keys: tuple[str, ...] = ()
    columns: Mapping[int, tuple[int, ...]] = dc_field(default_factory=dict)
    expected: str = ""
    actual: str = ""
    evidence: Mapping[str, Any] = dc_field(default_factory=dict)
    causes: tuple[str, ...] = ()
    hint: str = ""

    @property
    def title(self) -> str:
        """The one-line meaning of the code."""
        known = CODES.get(self.code)
        return known.title if known else self.check

    @property
    def docs(self) -> str:
        """Where the code is explained; ``dataproto-audit explain CODE`` prints the same."""
        return f"docs/codes.md#{self.code.lower()}"

    @property
    def cells(self) -> int:
        """Number of (row, column) cells named."""
        return sum(len(columns) for columns in self.columns.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys, ready for ``json.dumps``."""
        return {
            "code": self.code,
            "severity": self.severity,
            "step": self.step,
            "stage": self.stage,
            "when": self.when,
            "check": self.check,
            "field": self.field,
            "rows": list(self.rows),
            "row_keys": list(self.row_keys),
            "columns": {str(row): list(cols) for row, cols in self.columns.items()},
            "expected": self.expected,
            "actual": self.actual,
            "evidence": plain(self.evidence),
            "causes": list(self.causes),
            "hint": self.hint,
            "docs": self.docs,
        }

    def __str__(self) -> str:
        where = place_of(self.step, self.when, self.stage)
        title = f"{self.code} {self.severity}: {self.title}" + (f" ({where})" if where else "")
        details = (f"  {name:9} {text}" for name, text in finding_lines(self.to_dict()))
        return "\n".join((title, *details))


def place_of(step: int | None, when: str, stage: str) -> str:
    """``step 3, after reward``; a finding about no stage, as of a fault of our own, names none."""
    at = [] if step is None else [f"step {step}"]
    return ", ".join([*at, f"{when} {stage}"] if stage else at)


def finding_lines(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a finding says below its title, as (name, text); ``data`` is :meth:`Finding.to_dict`.

    Long lists are cut to :data:`MAX_LISTED` entries and columns to three rows.
    """
    if data.get("field"):
        yield "field", str(data["field"])
    if data.get("rows"):
        yield "rows", listed(data["rows"])
    columns = data.get("columns") or {}
    for row in list(columns)[:3]:
        yield "columns", f"row {row}: {listed(columns[row])}"
    if len(columns) > 3:
        yield "", f"and {len(columns) - 3} more rows"
    for name in ("expected", "actual"):
        if data.get(name):
            yield name, str(data[name])
    for name, value in (data.get("evidence") or {}).items():
        yield "evidence", f"{name}: {_evidence(value)}"
    if data.get("causes"):
        yield "causes", " > ".join(map(str, data["causes"]))
    if data.get("hint"):
        yield "hint", str(data["hint"])
    if str(data["code"]).startswith("DPA"):  # the catalogue has no codes of a user's own probes
        yield "more", f"dataproto-audit explain {data['code']}"


def _evidence(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_evidence(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return listed([_evidence(item) for item in value])
    return str(value)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check did at one boundary. ``reason`` says why it could not or need not run; where
    telling or recording something would have let it, it is of a kind in :mod:`.reasons`.
    """

    check: str
    code: str
    kind: OutcomeKind
    reason: str = ""


@dataclass
class Report:
    """Everything the checks said about one batch or one run."""

    findings: list[Finding] = dc_field(default_factory=list)
    outcomes: list[Outcome] = dc_field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when no finding has severity ``fail``."""
        return not any(finding.severity == "fail" for finding in self.findings)

    @property
    def not_checkable(self) -> list[Outcome]:
        """What could not be checked, each with what it lacks."""
        return [outcome for outcome in self.outcomes if outcome.kind == "not_checkable"]

    def counts(self) -> dict[str, int]:
        """Number of outcomes of each kind; the values add up to ``len(outcomes)``."""
        counts = dict.fromkeys(OUTCOME_KINDS, 0)
        for outcome in self.outcomes:
            counts[outcome.kind] += 1
        return {str(kind): number for kind, number in counts.items()}

    def severities(self) -> dict[str, int]:
        """Number of findings of each severity."""
        return {s: sum(finding.severity == s for finding in self.findings) for s in SEVERITIES}

    def extend(self, other: Report) -> None:
        """Append the findings and outcomes of ``other``."""
        self.findings.extend(other.findings)
        self.outcomes.extend(other.outcomes)

    def to_pandas(self) -> pd.DataFrame:
        """The findings as a table, one row each."""
        import pandas as pd

        return pd.DataFrame([finding.to_dict() for finding in self.findings])

    def to_json(self) -> str:
        """One JSON document: ``ok``, ``outcomes``, ``findings``, ``not_checkable``."""
        return json.dumps(
            {
                "ok": self.ok,
                "outcomes": self.counts(),
                "findings": [finding.to_dict() for finding in self.findings],
                "not_checkable": [
                    {"check": o.check, "reason": o.reason} for o in self.not_checkable
                ],
            }
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        counts = self.counts()
        said = "NOT OK" if not self.ok else "ok" if counts["passed"] else "nothing checked"
        if self.ok and self.findings:
            said += " with " + ", ".join(f"{n} {s}" for s, n in self.severities().items() if n)
        head = f"{said}: {counted(counts, ok=self.ok)}"
        reasons = Counter(outcome.reason for outcome in self.not_checkable).most_common()
        reasons.sort(key=lambda each: not isinstance(each[0], SettingUnknown))  # these can be told
        lacking = [f"  not checkable {many:3} x  {why}" for why, many in reasons[:MAX_REASONS]]
        if len(reasons) > MAX_REASONS:
            lacking.append(f"  and {len(reasons) - MAX_REASONS} more reasons (--json lists all)")
        return "\n\n".join(["\n".join([head, *lacking]), *map(str, self.findings)])


def counted(counts: Mapping[str, int], *, ok: bool) -> str:
    """``40 passed, 1 with a finding, ...``: where all is ok, no check is said to have failed."""
    names = {"failed": "with a finding" if ok else "failed"}
    return ", ".join(f"{number} {names.get(kind, kind)}" for kind, number in counts.items())


class AuditError(CodedError):
    """Raised where ``audit.on_fail=raise`` meets a finding of severity ``fail``."""

    exit_code = 1

    def __init__(self, findings: Iterable[Finding], run_dir: str | os.PathLike[str] = "") -> None:
        self.findings = tuple(findings)
        self.run_dir = os.fspath(run_dir)
        first = self.findings[0]
        self.code, self.remedy = first.code, first.hint
        where = f"\n  run       {self.run_dir}" if self.run_dir else ""
        more = [f"{finding.code} {finding.field}".rstrip() for finding in self.findings[1:]]
        tail = f"\n  also at this boundary: {listed(more)}" if more else ""
        ValueError.__init__(self, f"{first}{tail}{where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.findings, self.run_dir)


def at_boundary(
    finding: Finding, *, step: int | None, when: When, row_keys: Sequence[str] | None
) -> Finding:
    """``finding`` placed at a boundary, with the keys of its rows filled in."""
    keys: tuple[str, ...] = ()
    if row_keys is not None:
        keys = tuple(row_keys[row] for row in finding.rows if 0 <= row < len(row_keys))
    return replace(finding, step=step, when=when, row_keys=keys)
