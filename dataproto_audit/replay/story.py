"""The verdict of a bisect as a few lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataproto_audit.checker.files import UNTOLD
from dataproto_audit.findings import listed
from dataproto_audit.replay.recompute_values import UNTOLD_FACTORS

if TYPE_CHECKING:
    from dataproto_audit.replay.bisect import Verdict
    from dataproto_audit.replay.suspects import Fault

OTHERS = {
    "quiet": "checked and quiet, not recomputed",
    "not_judged": "not judged (--step N)",
}
FEW = 4
"""Rows that the line of stages names; more are counted."""


def story(verdict: Verdict) -> str:
    """The stages in one line, then each fault with rows, tokens and cause, then what is missing."""
    wrong = {fault.stage: fault for fault in verdict.faults}
    line = " · ".join(
        f"{stage} {state}{_briefly(wrong[stage]) if stage in wrong else ''}"
        for stage, state, _ in verdict.stages
    )
    heads = {
        "healthy": f"step {verdict.step} is healthy",
        "undecided": f"step {verdict.step}: undecided, nothing wrong in what was recorded",
        "faulty": f"step {verdict.step} went wrong at {verdict.stage}",
    }
    lines = [heads[verdict.verdict], line, ""]
    unbelieved = [one["says"] for one in verdict.not_believed]
    lines += [f"  other model  {text}" for text in unbelieved]
    untold = [text for text in verdict.missing if UNTOLD in text or UNTOLD_FACTORS in text]
    lines += [f"  NOT CHECKED  {text}" for text in untold]
    for number, fault in enumerate(verdict.faults):
        lines += _fault(fault, "first" if not number else "then, by itself")
    for item in verdict.cleared:
        lines.append(f"  cleared   {item['stage']}: {item['by']}")
    for info in verdict.infos:
        at = f", rows {listed(info['rows'])} at {info['boundary']}" if info["rows"] else ""
        lines.append(f"  info      {info['code']} {info['stage']}: {info['says']}{at}")
    if verdict.against is not None:
        lines.append(f"  against   {verdict.against.text}")
        if not verdict.faults and verdict.rows:
            lines.append(f"    rows      {listed(verdict.rows)} at {verdict.against.boundary}")
    if verdict.meeting is not None:
        rows = listed(verdict.meeting["rows"]) or verdict.meeting["says"]
        lines.append(f"  together  {rows} ({verdict.meeting['calls']} runs of the predicate)")
    if verdict.recomputations:
        lines.append(f"  model     {verdict.recomputations} passes over the batch")
    lines += [
        f"  missing   {text}" for text in verdict.missing if text not in (*unbelieved, *untold)
    ]
    for what, says in OTHERS.items():
        if verdict.others.get(what):
            lines.append(f"  other steps  {says}: {listed(verdict.others[what])}")
    return "\n".join(lines)


def _briefly(fault: Fault) -> str:
    """``: rows 4, 7 (shift)``."""
    from dataproto_audit.replay.told import told

    said: dict[str, Any] = told(fault)
    rows = said["rows"]
    named = f"rows {', '.join(map(str, rows))}" if len(rows) <= FEW else f"{len(rows)} rows"
    parts = [named] if rows else []
    parts += [f"({said['cause']})"] if said["cause"] else []
    return f": {' '.join(parts)}" if parts else ""


def _fault(fault: Fault, order: str) -> list[str]:
    from dataproto_audit.replay.told import told

    said: dict[str, Any] = told(fault)
    lines = [f"  {order}: {said['stage']}, field {said['field'] or '(rows)'}"]
    lines += [f"    {text}" for text in _says(fault)]
    if said["rows"] and said["boundary"]:
        lines.append(f"    boundary  {said['boundary']}, where rows are counted")
    if said["rows"]:
        lines.append(f"    rows      {listed(said['rows'])}")
    if said["tokens"]:
        lines.append(f"    tokens    {listed([tuple(cell) for cell in said['tokens']])}")
    if said["cause"]:
        lines.append(f"    cause     {said['cause']}")
    if said["evidence"]["explains"]:
        lines.append(f"    explains  {listed(said['evidence']['explains'])}")
    return [*lines, ""]


def _says(fault: Fault) -> list[str]:
    """What the checks said of the field, and how far it is from its recomputation."""
    lead = fault.lead
    checks = [s for s in fault.all if s.code and s.field == lead.field]
    lines = [f"{one.text} ({one.code})" for one in checks[:1]]
    gap = lead.evidence.get("max |difference|")
    if lead.check == "recomputed" and gap is not None:
        of = lead.evidence.get("against", "its inputs, computed again")
        lines.append(f"against {of}: max |difference| {gap:.3g}")
    return lines or [f"{lead.text} ({lead.code or lead.check})"]
