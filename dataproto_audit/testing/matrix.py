"""The result of the bench as text."""

from __future__ import annotations

from collections.abc import Iterator

from dataproto_audit.findings import Finding
from dataproto_audit.testing.bench import BenchResult, FaultRun, clopper_pearson, counts_line
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.scoring import MEASURES

HEADS = ("det", "stage", "field", "rows", "cols", "top1", "top3")
LEGEND = """\
det: detected; stage, field, rows, cols: named rightly; top1, top3: its cause is the first, or among
the first three. A dot is right on every batch; d not detected, x wrong on some. t: the probes were
tuned on this fault."""
RARE = 30
"""Probes executed less often than this on healthy data say little about false alarms."""


def matrix(result: BenchResult, *, only_misses: bool = False) -> str:
    """One line a fault, the totals, and the probes on healthy data where there was some."""
    lines = [LEGEND, "", f"{'fault':44}{'t':2}" + "".join(f"{head:>6}" for head in HEADS)]
    for name, runs in result.by_fault().items():
        marks = ["." if all(getattr(run.score, m) for run in runs) else _mark(runs)
                 for m in MEASURES]  # fmt: skip
        if only_misses and set(marks) == {"."}:
            continue
        tuned = "t" if CATALOGUE[name].tuned else ""
        lines.append(f"{name:44}{tuned:2}" + "".join(f"{mark:>6}" for mark in marks))
    healthy = ["", *_healthy(result)] if result.healthy.batches else []
    return "\n".join([*lines, "", *_totals(result), *healthy])


def shown(result: BenchResult) -> Iterator[str]:
    """What each fault was found as: on its first batch whole, on others in a line."""
    for name, runs in result.by_fault().items():
        for number, run in enumerate(runs):
            found = run.score.hit or run.score.first
            yield f"{name} on {run.base}:" + ("" if number == 0 else f" {_brief(found)}")
            if number == 0:
                yield f"{found or 'nothing was found'}\n"


def _mark(runs: list[FaultRun]) -> str:
    return "x" if all(run.score.detected for run in runs) else "d"


def _totals(result: BenchResult) -> Iterator[str]:
    counts = result.to_dict()
    yield f"all faults ({counts['faults']}): {counts_line(counts)}"
    yield f"untouched ({counts['untouched']['faults']}): {counts_line(counts['untouched'])}"


def _healthy(result: BenchResult) -> Iterator[str]:
    healthy = result.healthy
    yield (f"healthy: {healthy.batches} batches, {healthy.checks} checks executed, "
           f"{healthy.count('fail')} false fail, {healthy.count('warn')} false warn")  # fmt: skip
    for severity, of, total in (("fail", "batches", healthy.batches),
                                ("warn", "checks", healthy.checks)):  # fmt: skip
        hits = min(healthy.count(severity), total)
        low, high = clopper_pearson(hits, total)
        yield (f"false {severity}: {hits} of {total} {of}, rate within {low:.4%} and {high:.4%} "
               "(95 %, Clopper-Pearson)")  # fmt: skip
    yield f"{'probe on healthy data':34}{'runs':>8}{'alarms':>8}{'rate below (95 %)':>20}"
    for name, runs, alarms, bound in sorted(result.probes(), key=lambda row: row[1]):
        note = "  rarely executed" if runs < RARE else ""
        yield f"{name:34}{runs:>8}{alarms:>8}{bound:>20.2%}{note}"


def misses(result: BenchResult) -> Iterator[str]:
    """What was reported instead, for every run in which something is not right."""
    for run in result.runs:
        wrong = run.score.misses()
        if wrong:
            fault, rows = run.fault, run.score.rows
            yield f"{fault.name} on {run.base}: {', '.join(wrong)}"
            yield (f"    wanted {'|'.join(fault.stages)} {'|'.join(fault.fields)} "
                   f"{'|'.join(fault.causes)} rows {_some(rows)}")  # fmt: skip
            yield f"    first  {_brief(run.score.first)}"
            if run.score.hit is not run.score.first:
                yield f"    hit    {_brief(run.score.hit)}"
            if run.crash:
                yield f"    later stages: {run.crash[:120]}"
    for name, finding in result.healthy.alarms:
        yield f"false alarm on {name}: {_brief(finding)}"


def _some(rows: tuple[int, ...]) -> str:
    return f"{list(rows[:6])} of {len(rows)}"


def _brief(finding: Finding | None) -> str:
    if finding is None:
        return "nothing"
    return (f"{finding.code} {finding.severity} {finding.when} {finding.stage} [{finding.field}] "
            f"rows {_some(finding.rows)} causes {' > '.join(finding.causes)}: "
            f"{finding.actual[:100]}")  # fmt: skip
