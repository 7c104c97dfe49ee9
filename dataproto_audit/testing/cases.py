"""Scoring the checker on a file of public bug reports, each a tiny batch with its truth beside it.

One JSON object a line: ``id``, ``repro`` (how the input is built, see :mod:`.recipes`) and
``expect`` (what a checker should say). An answer is right when severity, stage and field are, and
rows and columns where the case names them. Cases about arithmetic of a function have no batch and
count neither way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataproto_audit.checker import check, check_concat, check_union
from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding, Report, Severity
from dataproto_audit.testing.recipes import cook

FORMAT = "A case file has one JSON object a line; docs/checking.md shows its keys."
ORDER: tuple[Severity, ...] = ("info", "warn", "fail")
Cells = set[tuple[int, int]]


@dataclass(frozen=True)
class Score:
    """What the checker said about one case; ``reason`` is '' where it was right."""

    id: str
    expected: str
    got: str
    reason: str = ""
    false_alarm: bool = False


@dataclass
class CaseResult:
    """All scores of a file."""

    scores: list[Score] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Score]:
        """Cases that were not answered as expected."""
        return [score for score in self.scores if score.reason]

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "cases": len(self.scores),
            "right": len(self.scores) - len(self.wrong),
            "wrong": [
                {"id": s.id, "expected": s.expected, "got": s.got, "reason": s.reason}
                for s in self.wrong
            ],
            "false_alarms": sum(score.false_alarm for score in self.scores),
            "not_counted": self.skipped,
        }


def run_cases(path: str | Path) -> CaseResult:
    """Check every case of ``path``. Raises :class:`UsageError` for a file that is none of cases."""
    result = CaseResult()
    for number, case in _read(Path(path)):
        try:
            report = report_of(case["repro"], case["expect"]["kind"])
            if report is None:
                result.skipped.append(str(case["id"]))
            else:
                result.scores.append(score(str(case["id"]), case["expect"], report))
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                "DPA857",
                f"{path}, line {number}: not a case ({type(error).__name__}: {error}).",
                "Each line needs id, repro and expect.",
            ) from error
    return result


def _read(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("DPA857", f"{path}: cannot be read ({error}).", FORMAT) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                "DPA857", f"{path}, line {number}: not JSON ({error}).", FORMAT
            ) from error
        if not isinstance(case, dict):
            raise UsageError("DPA857", f"{path}, line {number}: not a JSON object.", FORMAT)
        yield number, case


def report_of(repro: Mapping[str, Any], kind: str) -> Report | None:
    """What the checker says about the input of a case; None where it has no batch."""
    form, base = repro["form"], repro.get("base", "T")
    if kind == "function":
        return None
    if form == "single":
        return check(cook(base, repro["ops"]))
    if form == "pair":
        return check(cook(base, repro["after"]), before=cook(base, repro["before"]))
    if form == "history":
        return check(None, history=repro["steps"])
    if form == "union":
        return check_union(cook(base, repro["left"]), cook(base, repro["right"]))
    if form == "concat":
        return check_concat([cook(base, part) for part in repro["parts"]])
    raise UsageError("DPA857", f"unknown form {form!r} of a case.", "Known: single, pair, history, "
                     "union, concat.")  # fmt: skip


def score(name: str, expect: Mapping[str, Any], report: Report) -> Score:
    """Compare a report with what is expected of it."""
    levels = set(expect.get("levels", [expect["level"]]))
    counted = {"fail", "warn"} | (set(expect.get("levels", ())) - {"pass"})
    told = [f for f in report.findings if f.severity in counted]
    expected = f"{expect['level']} {'|'.join(expect['stages'])} {'|'.join(expect['fields'])}"
    got = "; ".join(f"{f.severity} {f.stage} {f.field} {f.code}" for f in told[:4]) or "nothing"
    if expect["level"] in ("pass", "info"):  # to say nothing about an explanation is right, too
        return Score(name, expected, got, "false alarm" if told else "", bool(told))
    if not told:
        honest = expect["not_checkable_ok"] and _said_why(report, expect["fields"])
        return Score(name, expected, got, "" if honest else "not detected")
    return Score(name, expected, got, ", ".join(_misses(expect, levels, told)))


def _said_why(report: Report, fields: Sequence[str]) -> bool:
    return any(f in f"{o.check} {o.reason}" for o in report.not_checkable for f in fields)


def _misses(expect: Mapping[str, Any], levels: set[str], told: Sequence[Finding]) -> Iterator[str]:
    hits = [f for f in told if _field(f) in expect["fields"]]
    good = [f for f in hits if f.stage in expect["stages"]]
    side_effects = {tuple(pair) for pair in expect.get("also", [])}
    rest = [f for f in told if f in hits or (f.stage, _field(f)) not in side_effects]
    worst = max((good or hits or told), key=lambda f: ORDER.index(f.severity))
    if worst.severity not in levels:
        yield f"severity {worst.severity}"
    if not rest or rest[0].stage not in expect["stages"]:
        yield f"stage {rest[0].stage if rest else 'none'}"
    if not hits:
        yield "field"
    targets = [expect, *expect.get("alt", [])]
    if expect["rows"] is not None and not _match(hits, targets, _rows, _wanted_rows):
        yield "rows"
    if expect["columns"] is not None and not _match(hits, targets, _cells, _wanted_cells):
        yield "columns"


def _match(
    hits: Sequence[Finding], targets: Iterable[Mapping[str, Any]], of: Any, wanted: Any
) -> bool:
    """One finding, or all findings about one field together, name exactly one of the targets."""
    groups = [[f] for f in hits]
    groups += [[f for f in hits if _field(f) == name] for name in {_field(f) for f in hits}]
    for target in targets:
        want = wanted(target)
        for group in groups:
            fits = target.get("field") in (None, _field(group[0]))
            if want is not None and fits and set().union(*map(of, group)) == want:
                return True
    return False


def _field(finding: Finding) -> str:
    return finding.field.rpartition(".")[2]


def _rows(finding: Finding) -> set[int]:
    return set(finding.rows)


def _cells(finding: Finding) -> Cells:
    return {(row, column) for row, columns in finding.columns.items() for column in columns}


def _wanted_rows(target: Mapping[str, Any]) -> set[int] | None:
    return None if target["rows"] is None else {int(row) for row in target["rows"]}


def _wanted_cells(target: Mapping[str, Any]) -> Cells | None:
    if target["columns"] is None:
        return None
    return {(int(row), int(c)) for row, columns in target["columns"].items() for c in columns}
