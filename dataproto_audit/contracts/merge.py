"""Merges before they happen: what a union or a concatenation of batches would break or lose.

A union puts the fields of two batches side by side, row by row; a concatenation joins the rows of
batches with the same fields. Not covered: whether row i of both sides of a union is the same
sample, where no field is on both sides.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.check import describe
from dataproto_audit.contracts.relations import RowViolation
from dataproto_audit.contracts.rows import differing
from dataproto_audit.fingerprint import frozen

FREE = ("timing", "metrics")
"""Meta entries that measure: each worker has values of its own."""


def union_violations(
    left: BatchView, right: BatchView, *, factors: Mapping[str, int]
) -> list[RowViolation]:
    """Other row counts (DPA114), or other values under one name (DPA115)."""
    if left.names and right.names and left.rows != right.rows:
        return [_rows_differ(left, right, factors)]
    found = []
    for name in left.names:
        if name in right.names:
            found += _values_differ(name, left, right)
    return found + _meta_differs([left, right])


def concat_violations(parts: Sequence[BatchView]) -> list[RowViolation]:
    """Entries that not all parts have (DPA116), other widths (DPA103), other meta (DPA115)."""
    filled = [part for part in parts if part.names]
    found: list[RowViolation] = []
    wide: list[tuple[str, list[BatchView]]] = []
    for name in dict.fromkeys(name for part in filled for name in part.names):
        having = [part for part in filled if name in part]
        if len(having) < len(filled):
            at = next(i for i, part in enumerate(parts) if part.names and name not in part)
            found.append(_lost(name, "in every part", f"missing in part {at}"))
            continue
        if len({_width(part, name) for part in having}) > 1:
            wide.append((name, having))
    found += _other_widths(wide)
    for key in dict.fromkeys(key for part in parts for key in part.meta):
        places = [i for i, part in enumerate(parts) if key in part.meta]
        if len(places) < len(parts) and key not in FREE:
            at_parts = ", ".join(map(str, places))
            found.append(_lost(f"meta_info.{key}", "in every part", f"only in part {at_parts}"))
    return found + _meta_differs(parts)


def _other_widths(fields: Sequence[tuple[str, list[BatchView]]]) -> list[RowViolation]:
    """One violation for each axis, prompt or response, whose width differs, and for each field of
    other widths; the other fields of an axis are its evidence."""
    alike: dict[object, list[tuple[str, list[BatchView]]]] = {}
    for name, parts in fields:
        alike.setdefault(_axis(name, parts), []).append((name, parts))
    both = alike.get("prompt+response")
    axis = next((a for a in ("response", "prompt") if a in alike), None)
    if both and axis:
        alike[axis] += alike.pop("prompt+response")
    out = []
    for same in alike.values():
        name, parts = same[0]
        shapes = ", ".join(describe(part, name) for part in parts)
        others = {"also": ", ".join(other for other, _ in same[1:])} if same[1:] else {}
        out.append(RowViolation("DPA103", name, "one width in all parts", shapes, others,
                                ("wrong_width",)))  # fmt: skip
    return out


def _axis(name: str, parts: Sequence[BatchView]) -> object:
    """The axis that the last one of the field is in every part; its own name for another one."""
    widths = [_width(part, name) or (0,) for part in parts]
    for axis in ("response", "prompt", "prompt+response"):
        sizes = [[getattr(part, one) for one in axis.split("+")] for part in parts]
        if any(None in size for size in sizes):
            continue
        if [w[-1:] for w in widths] == [(sum(size),) for size in sizes]:
            return axis
    return ("field", name)


def _width(part: BatchView, name: str) -> tuple[int, ...] | None:
    tensor = part.tensors.get(name)
    return None if tensor is None or tensor.is_nested else tuple(tensor.shape[1:])


def _lost(name: str, expected: str, actual: str) -> RowViolation:
    return RowViolation("DPA116", name, expected, actual, {}, ("meta_lost",) if "meta" in name
                        else ("field_forgotten",))  # fmt: skip


def _rows_differ(left: BatchView, right: BatchView, factors: Mapping[str, int]) -> RowViolation:
    """Row counts that differ, explained by a known factor where the quotient is one."""
    small, large = sorted((left, right), key=lambda side: side.rows)
    quotient = large.rows / small.rows if small.rows else 0.0
    name = next((name for name, value in factors.items() if value == quotient), "")
    story, causes = "", ["rows_lost"]
    if name == "n":
        twice = _grouped_by(small, factors["n"])
        story = f"{large.rows} = n·{small.rows}, n={factors['n']}: " + (
            f"the {_side(large is left)} side was repeated twice"
            if twice
            else f"the {_side(small is left)} side was not repeated"
        )
        causes = ["repeated_twice", "not_repeated"] if twice else ["not_repeated", "repeated_twice"]
    elif name:
        story = f"{large.rows} = {name}·{small.rows}: gathered over {name} twice, or not cut"
        causes = ["gathered_twice", "rows_lost"]
    return RowViolation(
        "DPA114",
        "batch_size",
        "as many rows on both sides",
        f"left {left.rows}, right {right.rows}",
        {"quotient": quotient} | ({"explained": story} if story else {}),
        tuple(causes),
    )


def _side(is_left: bool) -> str:
    return "left" if is_left else "right"


def _grouped_by(view: BatchView, n: int) -> bool:
    """True when the rows already come in groups of ``n`` by uid."""
    if "uid" not in view.arrays or not view.rows:
        return False
    counts = Counter(map(str, view.arrays["uid"].tolist()))
    return all(count % n == 0 for count in counts.values())


def _values_differ(name: str, left: BatchView, right: BatchView) -> list[RowViolation]:
    if name in left.tensors and name in right.tensors:
        one, other = left.numpy(name), right.numpy(name)
        if one.shape != other.shape:
            return [_other(name, describe(left, name), describe(right, name))]
        wrong = (one != other) & ~((one != one) & (other != other))
        if not wrong.any():
            return []
        wide = wrong.reshape(len(wrong), -1)
        rows = np.flatnonzero(wide.any(1))
        columns = {int(r): tuple(np.flatnonzero(wide[r]).tolist()) for r in rows}
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        return [_other(name, f"{one[first]:g} at {list(first)} of the left side",
                       f"{other[first]:g} on the right", tuple(rows.tolist()),
                       columns if wrong.ndim == 2 else {})]  # fmt: skip
    old, new = (_entries(side, name) for side in (left, right))
    if len(old) != len(new):
        return [_other(name, f"{len(old)} entries", f"{len(new)} entries")]
    listed = tuple(differing(old, new))
    if not listed:
        return []
    row = listed[0]
    return [_other(name, f"{_short(old[row])} in row {row} of the left side",
                   f"{_short(new[row])} on the right", listed)]  # fmt: skip


def _entries(view: BatchView, name: str) -> list[Any]:
    return list(view.arrays[name] if name in view.arrays else view.numpy(name))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _other(
    name: str,
    expected: str,
    actual: str,
    rows: tuple[int, ...] = (),
    columns: Mapping[int, tuple[int, ...]] | None = None,
) -> RowViolation:
    return RowViolation("DPA115", name, expected, actual, {}, ("row_permutation",
                        "field_overwritten"), rows, columns or {})  # fmt: skip


def _meta_differs(parts: Sequence[BatchView]) -> list[RowViolation]:
    found = []
    for key in dict.fromkeys(key for part in parts for key in part.meta):
        if key in FREE:
            continue
        values = [part.meta[key] for part in parts if key in part.meta]
        if any(not _same(values[0], value) for value in values[1:]):
            other = next(value for value in values[1:] if not _same(values[0], value))
            found.append(RowViolation("DPA115", f"meta_info.{key}", _short(values[0]),
                                      _short(other), {}, ("meta_conflict",)))  # fmt: skip
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return isclose(one, other, rel_tol=1e-6) or (one != one and other != other)
    return bool(frozen(one) == frozen(other))
