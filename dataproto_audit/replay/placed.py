"""A suspect: something wrong at a boundary, and the field and the boundary that it accuses.

A check runs where all that it compares is there, and names one of it by convention. A suspect goes
back to where its values were first seen (:mod:`.origins`), under the field that is wrong of two
(:mod:`.witnesses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dc_field
from typing import Any

from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.findings import SEVERITIES, Finding
from dataproto_audit.replay.compared import Compared
from dataproto_audit.replay.origins import Origin, is_partial, made_at, odd_one, origin_of
from dataproto_audit.replay.replay import Replayed
from dataproto_audit.replay.witnesses import STAGES_OF, odd_ones

ORDER = {name: place for place, name in enumerate(STAGES)}
Keys = frozenset[str] | None


@dataclass(frozen=True)
class Suspect:
    """Something wrong at a boundary. ``keys`` are the rows by key, None for all or unknown."""

    boundary: int
    stage: str
    field: str
    rows: tuple[int, ...]
    tokens: Mapping[int, tuple[int, ...]]
    keys: Keys
    code: str = ""
    check: str = ""
    severity: str = "fail"
    causes: tuple[str, ...] = ()
    text: str = ""
    evidence: Mapping[str, Any] = dc_field(default_factory=dict)
    model: bool = False
    row_keys: tuple[str, ...] = ()
    place_name: str = ""
    """Name of the boundary where it was seen; its rows are positions there."""
    doubt: str = ""
    """What else may be wrong instead, and what would tell."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Order of the loop, then of the boundaries, then severity."""
        return (ORDER.get(self.stage, len(ORDER)), self.boundary,
                SEVERITIES.index(self.severity))  # fmt: skip


def of_compared(step: Replayed, compared: Compared) -> Suspect:
    """A field that differs from its recomputation."""
    keys = step.seen[compared.boundary].boundary.row_keys
    tokens: dict[int, tuple[int, ...]] = {}
    if compared.cells is not None and compared.cells.shape[1] > 1:
        tokens = {row: tuple(compared.cells[row].nonzero()[0].tolist()) for row in compared.rows}
    return Suspect(
        compared.boundary, compared.stage, compared.field, compared.rows, tokens,
        _keys(compared.rows, keys), check="recomputed", evidence=compared.evidence,
        text=f"{compared.field} differs from its recomputation", model=compared.model,
        row_keys=_named(compared.rows, keys),
        place_name=step.seen[compared.boundary].boundary.name,
    )  # fmt: skip


def of_finding(step: Replayed, number: int, finding: Finding) -> Suspect:
    """A failed check at boundary ``number``; the one behind the last is the end of the step."""
    last = min(number, len(step.seen) - 1)
    keys = step.seen[last].boundary.row_keys
    return Suspect(
        number, finding.stage, finding.field.split(".")[-1] or finding.field, finding.rows,
        dict(finding.columns), _keys(finding.rows, keys), finding.code, finding.check,
        finding.severity, finding.causes, f"{finding.title}: {finding.actual}",
        finding.evidence, row_keys=_named(finding.rows, keys),
        place_name=step.seen[number].boundary.name if number == last else "end",
    )  # fmt: skip


def traced(step: Replayed, suspect: Suspect) -> Suspect:
    """The suspect where its values were first seen; its keys stay those of where it was found."""
    where = step, suspect.boundary, suspect.check
    name = odd_one(*where, suspect.field, suspect.rows)
    if name != suspect.field:
        suspect = _renamed(suspect, name)
    origin = origin_of(*where, name, suspect.rows)
    if origin is None:
        return suspect
    return _at(
        step, suspect, origin,
        f"{suspect.text}, as {suspect.place_name} shows, the first that could be checked",
    )  # fmt: skip


def _renamed(suspect: Suspect, name: str) -> Suspect:
    """The suspect with another field accused."""
    told = f"{suspect.text}; by a third one {name} is the wrong one"
    return replace(suspect, field=name, text=told)


def _at(step: Replayed, suspect: Suspect, origin: Origin, text: str) -> Suspect:
    """The suspect at another boundary, with its rows there; its keys stay."""
    at = origin.rows
    return replace(
        suspect, boundary=origin.boundary, stage=origin.stage, text=text,
        rows=tuple(sorted(at[row] for row in suspect.rows)),
        tokens={at[row]: columns for row, columns in suspect.tokens.items() if row in at},
        place_name=step.seen[origin.boundary].boundary.name,
    )  # fmt: skip


def by_a_third(step: Replayed, suspect: Suspect, explained: frozenset[str]) -> list[Suspect]:
    """A comparison of two log-probs, with the rows of each under the one that is wrong there.

    Rows whose keys are ``explained`` by earlier faults are left out: passes that ran on something
    wrong agree with each other. Files of a converted step were traced before:
    :func:`.origins.odd_one`.
    """
    if suspect.boundary >= len(step.seen) or is_partial(step.seen[suspect.boundary]):
        return [suspect]
    keys = step.seen[suspect.boundary].boundary.row_keys
    rows = [row for row in suspect.rows if not (_keys([row], keys) or frozenset()) & explained]
    tokens = {row: suspect.tokens[row] for row in rows if row in suspect.tokens}
    odd = odd_ones(step, suspect.boundary, suspect.check, suspect.field, tokens)
    if odd is None or not rows:
        return [suspect]
    # Rows that nothing decides stay with the field that the check names, if any row does.
    usual = suspect.field if suspect.field in odd.fields.values() or not odd.fields else next(
        iter(odd.fields.values())
    )  # fmt: skip
    of_row = {row: odd.fields.get(row, usual) for row in rows}
    return [
        _under(step, replace(suspect, doubt=odd.doubt), name,
               [row for row in rows if of_row[row] == name], decided=bool(odd.fields))
        for name in dict.fromkeys(of_row.values())
    ]  # fmt: skip


def _under(
    step: Replayed, suspect: Suspect, name: str, rows: Sequence[int], *, decided: bool
) -> Suspect:
    """The part of a suspect in ``rows``; with ``name`` as what is wrong where that was made, if a
    third one decided so."""
    keys = step.seen[suspect.boundary].boundary.row_keys
    part = replace(
        suspect, rows=tuple(rows), keys=_keys(rows, keys), row_keys=_named(rows, keys),
        tokens={row: suspect.tokens[row] for row in rows if row in suspect.tokens},
    )  # fmt: skip
    if not decided or (name, suspect.stage) == (suspect.field, STAGES_OF[name]):
        return part
    part = _renamed(part, name)
    origin = made_at(step, suspect.boundary, name, rows)
    if origin is None:
        return replace(part, stage=STAGES_OF[name])
    return _at(step, part, origin, part.text)


def _keys(rows: Sequence[int], keys: Sequence[str]) -> Keys:
    if not rows or not keys or max(rows) >= len(keys):
        return None
    return frozenset(identity(keys[row]) for row in rows)


def _named(rows: Sequence[int], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(keys[row] for row in rows if 0 <= row < len(keys))


def identity(key: str) -> str:
    """The part of a row key that tells prompt and response: a batch may not carry its uid yet."""
    parts = key.rsplit("/", 2)
    return parts[-2] if len(parts) == 3 else key
