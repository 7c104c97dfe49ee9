"""A recorded step against one of a healthy run: the first difference that can be trusted.

Rows are paired by what they say (prompt and response), because uids and order are a run's own. A
field that differs proves something only where everything its stage read is equal: for advantages
that is the whole group, or the batch where values are whitened. Other differences follow from
earlier ones, or from other samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dc_field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.trace import Boundary, Trace
from dataproto_audit.dump.trace_delta import row_marks
from dataproto_audit.fingerprint import frozen
from dataproto_audit.probes import Settings
from dataproto_audit.probes.noise import noise_between
from dataproto_audit.replay.replay import Replayed
from dataproto_audit.replay.suspects import LOG_PROBS

OWN = frozenset({"uid", "index", "extra_info"})
"""Fields that differ between runs by nature."""
READS: Mapping[str, tuple[str, ...]] = {
    "advantage": ("token_level_scores", "token_level_rewards", "values", "response_mask"),
    "update_actor": ("old_log_probs", "advantages", "ref_log_prob"),
}
"""What else a stage depends on, beside the fields that it declares to read."""
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
MAX_CELLS = 10_000


@dataclass
class Against:
    """The comparison. ``stage`` is None where no difference can be trusted."""

    text: str
    stage: str | None = None
    field: str | None = None
    rows: list[int] = dc_field(default_factory=list)
    tokens: list[tuple[int, int]] = dc_field(default_factory=list)
    paired: int = 0
    boundary: str = ""
    other: list[str] = dc_field(default_factory=list)
    """Differences before it that prove nothing, as ``stage.field``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {**self.__dict__, "tokens": [list(cell) for cell in self.tokens]}


def first_difference(bad: Replayed, good: Trace) -> Against:
    """Compare ``bad`` with the same step of ``good``, or with its only one.

    Raises :class:`UsageError` when the healthy trace has neither.
    """
    number = bad.step.number
    if number not in good.steps:
        if len(good.steps) != 1:
            raise UsageError(
                "DPA820", f"{good.folder} has no step {number} to compare with.",
                f"It holds {', '.join(map(str, good.steps)) or 'none'}; record that step.",
            )  # fmt: skip
        number = good.steps[0]
    theirs = {(b.stage, b.when): b for b in good.step(number).boundaries if not b.part}
    made = Against("no difference that can be trusted")
    differ: dict[str, set[str]] = {}
    for one in bad.seen:
        boundary = one.boundary
        other = theirs.get((boundary.stage, boundary.when))
        if boundary.part or other is None or boundary.stage not in STAGES:
            continue
        if _compared(bad, boundary, one.view, other, differ, made):
            return made
    if not made.paired:
        made.text = (
            "no row of the two steps has the same prompt and response: record both runs with the "
            "same data, seed and weights"
        )
    return made


def _compared(
    bad: Replayed,
    boundary: Boundary,
    view: BatchView,
    other: Boundary,
    differ: dict[str, set[str]],
    made: Against,
) -> bool:
    """Compare one boundary; True when a difference there can be trusted."""
    names = [n for n in view.names if n in other.fields and n not in OWN]
    theirs = other.view()
    if _shaped(boundary, view, theirs, other, made):
        return True
    if not view.has("responses"):
        return _beside(boundary, other, differ, made)
    ours, them, marks = _pairs(view, theirs)
    made.paired = max(made.paired, len(ours))
    if not len(ours):
        return False
    stage = boundary.stage
    reads = (*STAGES[stage].reads, *READS.get(stage, ()))
    news: dict[str, NDArray[np.bool_]] = {}
    for name in names:
        cells = _cells(view, theirs, name, ours, them, bad.settings)
        if cells is not None and cells.any():
            news[name] = cells
    if _groups(view, theirs, ours, them, boundary, made):
        return True
    for name, cells in news.items():
        rows = np.flatnonzero(cells.any(1))
        if not set(marks[rows]) - differ.get(name, set()):
            continue  # said at an earlier boundary
        spoilt = _spoilt(view, ours, marks, [r for r in reads if r != name], differ, bad.settings)
        trusted = [int(row) for row in rows if not spoilt[row]]
        fresh = [row for row in trusted if marks[row] not in differ.get(name, set())]
        if fresh:
            _name(made, boundary, name, fresh, cells, ours)
            return True
        made.other.append(f"{stage}.{name}")
    for name, cells in news.items():
        differ.setdefault(name, set()).update(marks[np.flatnonzero(cells.any(1))])
    whole = len(ours) == view.rows == theirs.rows and not any(differ.values())
    return whole and _beside(boundary, other, differ, made)


def _shaped(
    boundary: Boundary, view: BatchView, theirs: BatchView, other: Boundary, made: Against
) -> bool:
    """Other fields, kinds of number or widths than the healthy run has: no rows are needed."""
    said = ""
    sizes = boundary.rows and other.rows and boundary.settings == other.settings
    if sizes and boundary.rows != other.rows:
        made.field, said = "rows", f"{boundary.rows} rows and not {other.rows}"
    for name in () if said else other.fields:
        if name not in boundary.fields:
            made.field, said = name, f"{name} is missing"
            break
        own, healthy = boundary.fields[name], other.fields[name]
        if own.kind == healthy.kind != "objects" and own.dtype != healthy.dtype:
            made.field, said = name, f"{name} is {own.dtype} and not {healthy.dtype}"
            break
        if own.kind == healthy.kind == "tensor" and own.shape[1:] != healthy.shape[1:]:
            same = (view.prompt, view.response) == (theirs.prompt, theirs.response)
            if same:
                made.field, said = name, f"{name} is {own.shape} and not {healthy.shape}"
                break
    if said:
        made.stage, made.boundary = boundary.stage, boundary.name
        made.text = f"{boundary.when} {boundary.stage}: {said}"
    return bool(said)


def _groups(
    view: BatchView, theirs: BatchView, ours: Any, them: Any, boundary: Boundary, made: Against
) -> bool:
    """Paired rows that are grouped otherwise: uids are a run's own, who shares one is not."""
    if "uid" not in view.arrays or "uid" not in theirs.arrays:
        return False
    sides = []
    for one, rows in ((view, ours), (theirs, them)):
        uids = one.arrays["uid"]
        if len(uids) != one.rows:
            return False
        members: dict[Any, list[int]] = {}
        for pair, row in enumerate(rows.tolist()):
            members.setdefault(str(uids[row]), []).append(pair)
        sides.append([members[str(uids[row])] for row in rows.tolist()])
    wrong = [pair for pair, (a, b) in enumerate(zip(*sides, strict=True)) if a != b]
    if wrong:
        made.stage, made.field, made.boundary = boundary.stage, "uid", boundary.name
        made.rows = sorted(int(ours[pair]) for pair in wrong)
        made.text = f"{len(wrong)} paired rows share their uid with other rows, at {boundary.name}"
    return bool(wrong)


def _beside(
    boundary: Boundary, other: Boundary, differ: Mapping[str, set[str]], made: Against
) -> bool:
    """Numbers that the producers gave along with equal batches: loss terms, notes of a sync."""
    for name in ("losses", "trainer_checksum", "engine_checksum", "engine_prefix_cache_reset"):
        own, healthy = boundary.evidence.get(name), other.evidence.get(name)
        if own is None or healthy is None or any(differ.values()) or _alike(own, healthy):
            continue
        made.stage, made.field, made.boundary = boundary.stage, name, boundary.name
        made.text = f"{name} differs, {boundary.when} {boundary.stage}, for an equal batch"
        return True
    return False


def _alike(own: Any, healthy: Any) -> bool:
    if isinstance(own, Mapping) and isinstance(healthy, Mapping):
        return own.keys() == healthy.keys() and all(_alike(own[k], healthy[k]) for k in own)
    if isinstance(own, (list, tuple)) and isinstance(healthy, (list, tuple)):
        return len(own) == len(healthy) and all(map(_alike, own, healthy))
    if isinstance(own, (int, float)) and isinstance(healthy, (int, float)):
        return own == healthy or abs(own - healthy) <= 1e-5 + 1e-4 * abs(healthy)
    return bool(frozen(own) == frozen(healthy))


def _name(
    made: Against,
    boundary: Boundary,
    name: str,
    fresh: Sequence[int],
    cells: NDArray[np.bool_],
    ours: NDArray[np.int64],
) -> None:
    made.stage, made.field, made.boundary = boundary.stage, name, boundary.name
    made.rows = sorted(int(ours[row]) for row in fresh)
    if cells.shape[1] > 1:
        found = [(int(ours[row]), int(c)) for row in fresh for c in np.flatnonzero(cells[row])]
        made.tokens = sorted(found)[:MAX_CELLS]
    made.text = (
        f"{name} differs first, {boundary.when} {boundary.stage}, in {len(fresh)} of "
        f"{made.paired} paired rows whose inputs are equal"
    )


def _pairs(view: BatchView, other: BatchView) -> tuple[Any, Any, Any]:
    """Positions of equal rows in both batches, and a mark for each pair."""
    sides = []
    for one in (view, other):
        marks = row_marks(one)
        seen: dict[int, int] = {}
        listed = []
        for mark in marks.tolist():
            seen[mark] = count = seen.get(mark, -1) + 1
            listed.append(f"{mark:016x}/{count}")
        sides.append(listed)
    place = {mark: row for row, mark in enumerate(sides[1])}
    ours = [row for row, mark in enumerate(sides[0]) if mark in place]
    them = [place[sides[0][row]] for row in ours]
    marks = np.array([sides[0][row] for row in ours], dtype=object)
    return np.array(ours, np.int64), np.array(them, np.int64), marks


def _cells(
    view: BatchView, other: BatchView, name: str, ours: Any, them: Any, settings: Settings
) -> NDArray[np.bool_] | None:
    """Where paired rows differ by more than rounding, ``[pairs, columns]``; None: incomparable."""
    if name in view.arrays or name in other.arrays:
        if name not in view.arrays or name not in other.arrays:
            return None
        left, right = view.arrays[name], other.arrays[name]
        if len(left) != view.rows or len(right) != other.rows:
            return None
        unlike = [frozen(left[a]) != frozen(right[b]) for a, b in zip(ours, them, strict=True)]
        return np.array(unlike, np.bool_)[:, None]
    left, right = view.numpy(name), other.numpy(name)
    if len(left) != view.rows or len(right) != other.rows or left.shape[1:] != right.shape[1:]:
        return None
    a, b = left[ours].reshape(len(ours), -1), right[them].reshape(len(ours), -1)
    if a.dtype.kind != "f":
        return np.asarray(a != b, np.bool_)
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound: Any = 1e-5 * (1.0 + np.abs(b))
    if name in LOG_PROBS:
        noise = noise_between(settings.trainer_dtype, settings.rollout_dtype)
        bound = noise.token + noise.relative * np.abs(b) if noise.token else 5 * noise.mean
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= bound)
    out: NDArray[np.bool_] = ~same
    return out


def _spoilt(
    view: BatchView,
    ours: NDArray[np.int64],
    marks: NDArray[Any],
    reads: Sequence[str],
    differ: Mapping[str, set[str]],
    settings: Settings,
) -> NDArray[np.bool_]:
    """Pairs whose inputs differ already; of a group, all pairs where one does or is unpaired."""
    unequal = set().union(*(differ.get(name, set()) for name in reads))
    own = np.array([mark in unequal for mark in marks], np.bool_)
    if "uid" not in reads or "uid" not in view.arrays:
        return own
    if settings.adv_estimator in WHITENED:
        return np.full(len(ours), bool(own.any()) or len(ours) < view.rows)
    uids = view.arrays["uid"]
    paired = set(ours.tolist())
    touched = {uids[row] for row, bad in zip(ours.tolist(), own, strict=True) if bad}
    touched |= {uids[row] for row in range(view.rows) if row not in paired}
    return np.array([uids[row] in touched for row in ours.tolist()], np.bool_)
