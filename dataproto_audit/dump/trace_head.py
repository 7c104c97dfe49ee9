"""What a boundary says of itself, checked before any of it is used: names, sizes, references.

Everything here raises ``ValueError`` (or ``KeyError``, ``TypeError`` for what is not there at all),
which the reader turns into one ``DPA820``.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from types import NoneType
from typing import Any

from dataproto_audit.dump.trace_format import STORABLE, Stored, boundary_name

MOST_ROWS = 1 << 40
"""Entries of an axis; none is as long."""
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
    rows = head["rows"]
    if type(rows) is not int or not 0 <= rows < MOST_ROWS:
        raise ValueError(f"rows is {str(rows)[:40]}")
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
    at = head.get("row_keys_at")
    if at is not None and (type(at) is not str or at not in places):
        raise ValueError(f"its row keys lie in {str(at)[:40]!r}, which is missing")
    if _holds_too_large(head.get("settings")):
        raise ValueError("a setting is a number that no float holds")


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
    if not shape or not all(type(size) is int and 0 <= size < MOST_ROWS for size in shape):
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
