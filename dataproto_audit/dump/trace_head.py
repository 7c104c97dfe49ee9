"""What a boundary says of itself, checked before any of it is used: names, sizes, references.

Everything here raises ``ValueError`` (or ``KeyError``, ``TypeError`` for what is not there at all),
which the reader turns into one ``DPA820``.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from types import NoneType
from typing import Any

from dataproto_audit.dump.trace_format import STORABLE, Stored, boundary_name

MOST_ROWS = 1 << 40
"""Entries of an axis; none is as long."""
ENDINGS = ("finished", "broken_off", "kept")
"""How a whole step may have ended; see ``StepWriter.finish``."""
HEAD_KINDS: dict[str, type] = {
    "settings": dict, "sums": dict, "meta": dict, "evidence": dict, "row_keys": list,
    "outcomes": list, "findings": list, "fields": list,
}  # fmt: skip
"""Entries of a boundary and what they are in JSON, where they are told."""


def too_large(value: Any) -> bool:
    """True for a whole number that no float holds."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def refuse_head(head: Mapping[str, Any], name: str, places: Container[str]) -> None:
    """Raise where an entry of the boundary ``name`` is of another kind than is written.

    ``places`` are the boundaries of the step, which a reference may name.
    """
    for key in ("rows", "prompt", "response"):
        if not (_is_size(head[key]) or (head[key] is None and key != "rows")):
            raise ValueError(f"{key} is {str(head[key])[:40]}")
    for key, kind in HEAD_KINDS.items():
        if not isinstance(head.get(key), (kind, NoneType)):
            raise ValueError(f"{key} is of another kind")
    if not all(isinstance(head[key], str) for key in ("stage", "when")):
        raise ValueError("stage or when is no text")
    if head["when"] not in ("before", "after"):
        raise ValueError(f"when is {head['when'][:40]!r}")
    part = str(head.get("part") or "")
    # The folder's name is made of these; a step that is begun again goes on with its numbers.
    if boundary_name(0, head["stage"], head["when"], part)[2:] != name.lstrip("0123456789"):
        raise ValueError(f"its stage {head['stage'][:40]!r} is not that of its folder")
    if head.get("row_keys") and len(head["row_keys"]) != head["rows"]:
        raise ValueError(f"{len(head['row_keys'])} row keys for {head['rows']} rows")
    at = head.get("row_keys_at")
    if at is not None and (type(at) is not str or at not in places):
        raise ValueError(f"its row keys lie in {str(at)[:40]!r}, which is missing")
    if _holds_too_large(head.get("settings")):
        raise ValueError("a setting is a number that no float holds")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_ROWS


def refuse_rows(head: Mapping[str, Any], fields: Iterable[Stored]) -> None:
    """Raise where no field has as many rows as the boundary says; what was not kept may have."""
    told = {stored.shape[0] for stored in fields}
    if told and head["rows"] not in told and not head.get("opaque"):
        raise ValueError(f"it says {head['rows']} rows, its fields have {max(told)}")


def refuse_step(said: Mapping[str, Any], number: int) -> None:
    """Raise where what declares a step whole is of another step, or does not say how it ended."""
    if said.get("step") != number:
        raise ValueError(f"it is of step {str(said.get('step'))[:40]}")
    if said.get("ended") not in ENDINGS:
        raise ValueError(f"it says that it ended {str(said.get('ended'))[:40]!r}")


def _holds_too_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_too_large, value.values()))
    if isinstance(value, list):
        return any(map(_holds_too_large, value))
    return too_large(value)


def stored_field(places: Container[str], entry: Mapping[str, Any]) -> Stored:
    """One entry of the field table. Its shape is compared with the data where that is read."""
    shape, orders = tuple(entry["shape"]), tuple(entry["orders"])
    texts = [entry[key] for key in ("name", "kind", "dtype", "fingerprint", "at", "key")]
    if not all(isinstance(text, str) for text in (*texts, *orders)):
        raise ValueError("a name in the table of fields is no text")
    name, kind, dtype, mark, at, key = texts
    if not shape or not all(map(_is_size, shape)):
        raise ValueError(f"{name[:40]!r} has the shape {str(entry['shape'])[:60]}")
    if kind not in ("tensor", "jagged", "objects"):
        raise ValueError(f"a field of kind {kind[:40]!r}")
    if kind != "objects" and dtype not in STORABLE:
        raise ValueError(f"a kind of number {dtype[:40]!r}")
    missing = [place for place in (at, *orders) if place not in places]
    if missing:
        raise ValueError(f"{name[:40]!r} lies in {missing[0][:40]!r}, which is missing")
    if len(set(orders)) < len(orders):
        raise ValueError(f"an order of the rows of {name[:40]!r} is applied twice")
    return Stored(name, kind, dtype, shape, mark, at, key, orders)
