"""What of a fault is told: its rows and tokens, by the suspect that names them most exactly."""

from __future__ import annotations

from typing import Any

from dataproto_audit.probes import PROBES
from dataproto_audit.replay.placed import Suspect
from dataproto_audit.replay.replay import Replayed
from dataproto_audit.replay.suspects import (
    IDS_AND_MASKS,
    OF_LOG_PROBS,
    SOMEWHERE,
    WITNESSED,
    Fault,
)

MAX_NAMED = 100_000


def rows_of(fault: Fault) -> list[int]:
    """Rows of a fault, at the boundary that :func:`shown` names."""
    return sorted({row for one in _together(fault) for row in one.rows})


def tokens_of(fault: Fault) -> list[tuple[int, int]]:
    """(row, column) cells of a fault."""
    cells = {(r, c) for one in _together(fault) for r, cs in one.tokens.items() for c in cs}
    return sorted(cells)[:MAX_NAMED]


def shown(fault: Fault) -> Suspect:
    """What names the rows: the lead, or what says the same of more of its field's cells.

    That is what compares each cell with a witness, at the stage or, of a field that was wrong
    already, at a later one; and of ids and masks, the check that names all that the lead does.
    """
    lead = fault.lead
    if lead.check == "recomputed" or lead.code in WITNESSED:
        return lead
    if lead.field in IDS_AND_MASKS:
        same = (s for s in fault.others if s.boundary == lead.boundary
                and s.field in IDS_AND_MASKS and s.code[:4] == lead.code[:4])  # fmt: skip
        return next((s for s in same if _more(s, lead)), lead)
    if lead.code not in OF_LOG_PROBS:
        return lead
    exact = (s for s in fault.all if s.code in WITNESSED and s.field == lead.field and s.rows)
    later = (s for s in fault.follow if s.code in WITNESSED and s.check in PROBES
             and lead.field in PROBES[s.check].fields and _keys_too(s, lead))  # fmt: skip
    return next(exact, None) or next(later, None) or _exact(fault)


def _more(one: Suspect, lead: Suspect) -> bool:
    """True where ``one`` names every cell of the lead, and more."""
    return len(one.rows) > len(lead.rows) and all(
        set(columns) <= set(one.tokens.get(row, ())) for row, columns in lead.tokens.items()
    )


def _keys_too(one: Suspect, lead: Suspect) -> bool:
    """The same in another order of rows: the lead's rows by key, and more tokens."""
    if one.keys is None or lead.keys is None or not lead.keys <= one.keys:
        return False
    return sum(map(len, one.tokens.values())) > sum(map(len, lead.tokens.values()))


def _exact(fault: Fault) -> Suspect:
    """The lead, unless it only says that one of several cells is wrong and another says which."""
    lead = fault.lead
    same = (s for s in fault.all if (s.boundary, s.field) == (lead.boundary, lead.field))
    return next((s for s in same if s.code not in SOMEWHERE), lead)


def _together(fault: Fault) -> list[Suspect]:
    """What names the rows, with all that says the same of its field at the same boundary."""
    best = shown(fault)
    if best.check == "recomputed" or best.code in WITNESSED:
        return [best]
    same = [s for s in fault.all if (s.boundary, s.field) == (best.boundary, best.field)]
    return [s for s in same if s is best or s.code not in SOMEWHERE]


def told(fault: Fault) -> dict[str, Any]:
    """A fault as plain data."""
    lead = fault.lead
    causes = [cause for one in fault.all for cause in one.causes]
    rows = rows_of(fault)
    keys = sorted({key for one in _together(fault) for key in one.row_keys})
    return {
        "stage": fault.stage,
        "field": lead.field,
        "rows": rows,
        "tokens": [list(cell) for cell in tokens_of(fault)],
        "cause": causes[0] if causes else None,
        "row_keys": keys,
        "boundary": shown(fault).place_name,
        "evidence": {
            "found by": lead.code or lead.check,
            "says": lead.text,
            **dict(lead.evidence),
            "also": [f"{one.code or one.check} {one.field}" for one in fault.others],
            "explains": [f"{one.code} {one.stage}.{one.field}" for one in fault.follow],
        },
    }


def infos_of(step: Replayed) -> list[dict[str, Any]]:
    """Notes of the checks, each once: where it was said first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number, one in step.sighted():
        if one.severity == "info":
            at = step.seen[number].boundary.name if number < len(step.seen) else "end"
            told = {
                "code": one.code, "stage": one.stage, "field": one.field, "rows": list(one.rows),
                "boundary": at, "says": f"{one.title}: {one.actual}",
            }  # fmt: skip
            found.setdefault((one.code, one.field), told)
    return list(found.values())
