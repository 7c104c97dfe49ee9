"""Row relations: what a stage may do to the rows, and what it did.

All comparisons are between two :class:`~dataproto_audit.contracts.rows.RowState`. A difference is
traced to one field where one field explains it, and to single cells where the old values are still
there.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from dataproto_audit.contracts.check import Violation
from dataproto_audit.contracts.dims import expected_rows, factor_story
from dataproto_audit.contracts.rows import Index, RowState, alike, differing
from dataproto_audit.contracts.stages import Stage
from dataproto_audit.fingerprint import KEY_FIELDS, Hashes, object_hash


@dataclass(frozen=True)
class RowViolation(Violation):
    """A violation with the rows (positions after the stage) and columns it is about."""

    rows: tuple[int, ...] = ()
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def compare_rows(
    stage: type[Stage],
    before: RowState,
    after: RowState,
    *,
    sizes: Mapping[str, int],
    free: Collection[str] | None = None,
) -> list[RowViolation]:
    """Violations of the stage's row relation and of what it keeps.

    ``free`` are the fields that may change or go (default: as declared); ``sizes`` holds the
    factors of ``expand``, without which the number of rows is not checked.
    """
    free = {*stage.changes, *stage.drops} if free is None else free
    if stage.fresh and stage.rows.relation == "same":
        return []
    want = expected_rows(stage.rows, before.rows, sizes)
    if want is not None and want != after.rows:
        return [_wrong_count(f"{stage.rows} of {before.rows}", want, after.rows, sizes)]
    if stage.fresh or after.same.issuperset(before.view.names):
        return []
    return [*_dropped(stage.name, before, after, free), *_moved(stage, before, after, free)]


def compare_unchanged(
    place: str, before: RowState, after: RowState, *, may_drop: Collection[str] | None = ()
) -> list[RowViolation]:
    """Violations of "nothing happened here"; ``may_drop=None`` allows a selection of the fields."""
    if before.rows != after.rows:
        return [_wrong_count("as many as before", before.rows, after.rows, {})]
    if after.same.issuperset(before.view.names):
        return []
    gone = [] if may_drop is None else _dropped(place, before, after, may_drop)
    return [*gone, *_in_place(place, before, after, _shared(before, after, ()))]


def compare_expanded(origin: RowState, after: RowState, factor: int) -> list[RowViolation]:
    """Prompt-side fields after the repeat against ``origin``: row i must be prompt i // factor."""
    if not origin.rows or after.rows != origin.rows * factor:
        return []
    repeated = _picked(np.arange(after.rows) // factor)
    wrong: dict[str, list[int]] = {}
    for name, old in origin.objects.items():
        if name in after.objects and after.whole(name) and origin.whole(name):
            rows = list(differing(repeated(old), after.objects[name]))
            if rows:
                wrong[name] = rows
    if not wrong:
        return []
    name = "uid" if "uid" in wrong else next(iter(wrong))
    rows, old = wrong[name], origin.objects[name]
    tiled = _picked(np.arange(after.rows) % origin.rows)(old)
    evidence: dict[str, object] = {"also": ", ".join(sorted(set(wrong) - {name})) or "none"}
    if alike(tiled, after.objects[name]):
        causes: tuple[str, ...] = ("tiled_groups", "row_permutation")
        evidence["un-tiled"] = f"rows wrong: {len(rows)} -> 0"
    else:
        new = object_hash(after.objects[name])
        causes = _why_other_prompts(name, object_hash(old), new, factor)
    return [
        RowViolation(
            "DPA404" if name == "uid" else "DPA105",
            name,
            f"row i belongs to prompt i // {factor}",
            f"{len(rows)} of {after.rows} rows belong to another prompt",
            evidence,
            causes,
            tuple(rows),
        )
    ]


def _why_other_prompts(name: str, old: Hashes, new: Hashes, factor: int) -> tuple[str, ...]:
    """Causes from the values themselves: unknown ones are new, known ones were moved or copied."""
    if name != "uid" or np.array_equal(np.sort(old.repeat(factor)), np.sort(new)):
        return ("row_permutation",)
    known, counts = np.isin(new, old), np.unique(new, return_counts=True)[1]
    if not known.any() and (counts == 1).all():
        return ("uid_after_repeat", "split_group")
    return ("split_group", "uid_reused")


def permutation(before: RowState, after: RowState, names: Sequence[str]) -> Index | None:
    """``index`` with row i after = row index[i] before, over the fields ``names``; None if none is.

    Rows that are alike in all these fields may be exchanged.
    """
    old, new = _total(before, names), _total(after, names)
    old_order, new_order = old.argsort(kind="stable"), new.argsort(kind="stable")
    if len(old) != len(new) or not np.array_equal(old[old_order], new[new_order]):
        return None
    index = np.empty(len(old), np.int64)
    index[new_order] = old_order
    return index


def _wrong_count(relation: str, want: int, got: int, sizes: Mapping[str, int]) -> RowViolation:
    story = factor_story(got, want, sizes)
    return RowViolation(
        "DPA104",
        "",
        f"{want} rows ({relation})",
        f"{got} rows",
        {"factor": story} if story else {},
        ("not_repeated",) if story else ("rows_lost",),
    )


def _shared(before: RowState, after: RowState, free: Collection[str]) -> list[str]:
    """Kept fields that can be compared; a wrong row count or kind is left to DPA102, 103, 109."""
    return [
        name
        for name in before.view.names
        if name in after.view
        and name not in free
        and (name in before.objects) == (name in after.objects)
        and before.whole(name)
        and after.whole(name)
    ]


def _dropped(
    place: str, before: RowState, after: RowState, free: Collection[str]
) -> Iterable[RowViolation]:
    for name in before.view.names:
        if name not in after.view and name not in free:
            yield RowViolation("DPA107", name, f"kept by {place}", "gone", {}, ("field_forgotten",))


def _moved(
    stage: type[Stage], before: RowState, after: RowState, free: Collection[str]
) -> Iterable[RowViolation]:
    names = _shared(before, after, free)
    if stage.rows.relation == "same":
        yield from _in_place(stage.name, before, after, names)
    elif stage.rows.relation == "permute" and not after.same.issuperset(names):
        yield from _permuted(stage.name, before, after, names)


# -- the same rows in the same order ---------------------------------------------------------------


def _in_place(
    place: str, before: RowState, after: RowState, names: Sequence[str]
) -> Iterable[RowViolation]:
    changed = [name for name in names if name not in after.same]
    if len(changed) > 1:
        index = permutation(before, after, names)
        if index is not None:
            rows = np.flatnonzero(index != np.arange(len(index)))
            yield RowViolation(
                "DPA105",
                "",
                f"the rows in the order in which they entered {place}",
                f"{len(rows)} of {after.rows} rows elsewhere, in all fields alike",
                {"fields": ", ".join(changed)},
                ("row_permutation",),
                tuple(rows.tolist()),
            )
            return
        if _only_lost(before, after, names):
            yield _lost_rows(place, _total(before, names), _total(after, names))
            return
    for name in changed:
        yield _changed(place, before, after, name)


def _changed(place: str, before: RowState, after: RowState, name: str) -> RowViolation:
    old, new = before.hashes(name), after.hashes(name)
    rows = np.flatnonzero(old != new)
    moved = np.array_equal(np.sort(old), np.sort(new))
    return RowViolation(
        "DPA106",
        name,
        f"kept by {place}",
        f"{len(rows)} of {after.rows} rows changed",
        {},
        ("row_permutation", "field_overwritten") if moved else ("field_overwritten",),
        tuple(rows.tolist()),
        _changed_columns(before, after, name, rows),
    )


def _changed_columns(
    before: RowState, after: RowState, name: str, rows: Index, index: Index | None = None
) -> dict[int, tuple[int, ...]]:
    """Columns that differ; empty when the old values were overwritten in place.

    With an ``index`` row i is compared with row ``index[i]`` before.
    """
    old, new = before.view.numpy(name), after.view.numpy(name)
    if name in after.objects or old.shape != new.shape or new.ndim != 2:
        return {}
    if np.may_share_memory(old, new):
        return {}
    old, new = old[rows if index is None else index[rows]], new[rows]
    differs = (old != new) & ~((old != old) & (new != new))
    return {
        int(row): tuple(np.flatnonzero(cells).tolist())
        for row, cells in zip(rows, differs, strict=True)
    }


# -- the same rows in another order ----------------------------------------------------------------


def _permuted(
    place: str, before: RowState, after: RowState, names: Sequence[str]
) -> Iterable[RowViolation]:
    anchors = [n for n in names if n not in after.objects or n == "uid"] or names
    index = permutation(before, after, anchors)
    if index is None:
        yield from _torn(place, before, after, names)
        return
    reordered = _picked(index)
    for name in names:
        if name not in after.objects or name in anchors:
            continue
        if not alike(reordered(before.objects[name]), after.objects[name]):
            yield from _apart(before, after, anchors, [name])


def _torn(
    place: str, before: RowState, after: RowState, names: Sequence[str]
) -> Iterable[RowViolation]:
    """No one permutation fits all fields: find the fields that did not move with the others."""
    if _only_lost(before, after, names):
        yield _lost_rows(place, _total(before, names), _total(after, names))
        return
    for left_out in _suspects(after, names):
        anchors = [n for n in names if n not in left_out]
        if anchors and permutation(before, after, anchors) is not None:
            yield from _apart(before, after, anchors, left_out)
            return
    keys = [n for n in names if n in (*KEY_FIELDS, "uid")]
    if keys and permutation(before, after, keys) is not None:
        yield from _apart(before, after, keys, [n for n in names if n not in keys])
        return
    yield _lost_rows(place, _total(before, keys or names), _total(after, keys or names))


def _only_lost(before: RowState, after: RowState, names: Sequence[str]) -> bool:
    """True where every row is, in all fields, one of those before: some twice, others not."""
    old, new = _total(before, names), _total(after, names)
    return bool(np.isin(new, old).all())


def _suspects(after: RowState, names: Sequence[str]) -> Iterable[list[str]]:
    """Each field alone, then all non-tensor fields, then all tensors."""
    yield from ([name] for name in names)
    yield [name for name in names if name in after.objects]
    yield [name for name in names if name not in after.objects]


def _apart(
    before: RowState, after: RowState, anchors: Sequence[str], names: Sequence[str]
) -> Iterable[RowViolation]:
    """One violation for the fields ``names`` that carry other rows' values; uid goes first."""
    old_key, new_key = _total(before, anchors), _total(after, anchors)
    wrong = {}
    for name in sorted(names, key=lambda n: n != "uid"):
        rows = _not_among(old_key, before.hashes(name), new_key, after.hashes(name))
        if rows:
            wrong[name] = rows
    if not wrong:
        return
    name, rows = next(iter(wrong.items()))
    moved = np.array_equal(np.sort(before.hashes(name)), np.sort(after.hashes(name)))
    index = permutation(before, after, anchors)
    yield RowViolation(
        "DPA106",
        name,
        "moved together with its row",
        f"{len(rows)} of {after.rows} rows carry another value",
        {"also": ", ".join(list(wrong)[1:])} if len(wrong) > 1 else {},
        ("row_permutation",) if moved else ("field_overwritten", "row_permutation"),
        tuple(rows),
        {} if index is None else _changed_columns(before, after, name, np.array(rows), index),
    )


def _picked(index: Index) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the entries ``index`` of a list."""
    order = index.tolist()
    if len(order) < 2:  # itemgetter makes a tuple of several entries only
        return lambda values: [values[at] for at in order]
    return itemgetter(*order)


def _total(state: RowState, names: Sequence[str]) -> Hashes:
    """One fingerprint per row over all the named fields."""
    total = np.zeros(state.rows, np.uint64)
    for place, name in enumerate(names):
        total += state.hashes(name) * np.uint64(2 * place + 1)
    return total


def _lost_rows(place: str, old: Hashes, new: Hashes) -> RowViolation:
    extra = _not_among(old, old, new, new)
    missing = len(_not_among(new, new, old, old))
    return RowViolation(
        "DPA105",
        "",
        f"the rows that entered {place}, in any order",
        f"{len(extra)} rows did not enter, {missing} are missing",
        {},
        ("rows_lost", "row_permutation"),
        tuple(extra),
    )


def _not_among(old_key: Hashes, old: Hashes, new_key: Hashes, new: Hashes) -> list[int]:
    """Rows whose value is not, or not any more, among those that their key had before."""
    have: dict[tuple[Any, Any], int] = {}
    for pair in zip(old_key.tolist(), old.tolist(), strict=True):
        have[pair] = have.get(pair, 0) + 1
    rows = []
    for row, pair in enumerate(zip(new_key.tolist(), new.tolist(), strict=True)):
        have[pair] = have.get(pair, 0) - 1
        if have[pair] < 0:
            rows.append(row)
    return rows
