"""Text that explains a code, a field or a stage from their declarations."""

from __future__ import annotations

import difflib
from typing import Any

from dataproto_audit.codes import CAUSES, CODES, UsageError
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES


def explanation(name: str) -> str:
    """A few lines about ``name``; raises :class:`UsageError` with near names when unknown."""
    if name.upper() in CODES:
        return _code(name.upper())
    if name in FIELDS:
        return _field(name)
    if name in STAGES:
        return _stage(name)
    near = difflib.get_close_matches(name, [*CODES, *FIELDS, *STAGES], 3, 0.5)
    hint = f"Did you mean {', '.join(near)}?" if near else "See dataproto-audit codes and fields."
    raise UsageError("DPA851", f"{name} is no code, field or stage.", hint)


def explained(name: str) -> dict[str, Any]:
    """The same as data: ``kind`` (``code``, ``field``, ``stage``), ``name``, ``text``, and what is
    declared. Raises :class:`UsageError` as :func:`explanation` does."""
    text = explanation(name)
    if name.upper() in CODES:
        code = CODES[name.upper()]
        return {
            "kind": "code", "name": name, "text": text, "code": code.code, "title": code.title,
            "meaning": code.meaning, "example": code.example, "fix": code.fix,
            "causes": [{"cause": cause, "meaning": CAUSES[cause]} for cause in code.causes],
            "reports": [f"https://github.com/{report}" for report in code.reports],
        }  # fmt: skip
    if name in FIELDS:
        field = FIELDS[name]
        readers = [stage.name for stage in STAGES.values() if name in stage.reads]
        return {
            "kind": "field", "name": name, "text": text, "meaning": field.meaning,
            "number": str(field.number), "axes": field.axes.split(), "producer": field.producer,
            "readers": readers,
        }  # fmt: skip
    stage = STAGES[name]
    lists = ("reads", "adds", "may_add", "changes", "drops")
    return {
        "kind": "stage", "name": name, "text": text, "meaning": (stage.__doc__ or "").strip(),
        "rows": str(stage.rows), **{part: list(getattr(stage, part)) for part in lists},
    }  # fmt: skip


def _code(name: str) -> str:
    code = CODES[name]
    lines = [f"{code.code}  {code.title}", "", code.meaning]
    if code.example:
        lines += ["", f"Example: {code.example}"]
    if code.causes:
        lines += ["", "Causes, most frequent first:"]
        lines += [f"  {cause}: {CAUSES[cause]}" for cause in code.causes]
    if code.fix:
        lines += ["", f"What to do: {code.fix}"]
    if code.reports:
        lines += ["", "Met by others:", *(f"  https://github.com/{r}" for r in code.reports)]
    return "\n".join(lines)


def _field(name: str) -> str:
    field = FIELDS[name]
    readers = [s.name for s in STAGES.values() if name in s.reads]
    lines = [f"{name}: {field.meaning}", f"  {field.number} [{field.axes.replace(' ', ', ')}]"]
    lines.append(f"  written by {field.producer}")
    if readers:
        lines.append(f"  read by {', '.join(readers)}")
    return "\n".join(lines)


def _stage(name: str) -> str:
    stage = STAGES[name]
    lines = [f"{name}: {(stage.__doc__ or '').strip()}", f"  rows: {stage.rows}"]
    for title, names in (
        ("reads", stage.reads),
        ("adds", stage.adds),
        ("may add", stage.may_add),
        ("changes", stage.changes),
        ("drops", stage.drops),
    ):
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    return "\n".join(lines)
