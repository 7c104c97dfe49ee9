"""Which sample each row of each boundary is: what a cut has to keep together.

A sample is a row of the batch as the rollout made it, numbered in that order; its group is the
prompt that it answers. Rows keep their place from boundary to boundary unless a stage reorders
them; then, and where rows were lost or doubled, they are found again by what they hold. Batches of
their own (validation) have samples of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.fingerprint import frozen
from dataproto_audit.replay.recording import Piece, Recording

Index = NDArray[np.int64]
SAME_ROW = ("responses", "prompts")
TELLING = (
    "rollout_log_probs", "response_mask", "attention_mask", "position_ids", "input_ids",
    "token_level_scores", "old_log_probs",
)  # fmt: skip
"""Fields by which a row is found again, and those that tell equal rows apart."""


@dataclass(frozen=True)
class Followed:
    """``samples[i]`` are the samples of the rows of piece ``i``, ``prompts[i]`` its groups where
    its rows are prompts (then ``samples[i]`` is None). ``group_of`` has the group of each sample.
    """

    samples: tuple[Index | None, ...]
    prompts: tuple[Index | None, ...]
    group_of: dict[int, int]

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """Samples of each group."""
        out: dict[int, tuple[int, ...]] = {}
        for sample, group in self.group_of.items():
            out[group] = (*out.get(group, ()), sample)
        return out


def follow(recording: Recording) -> Followed:
    """Follow the rows of a recording; see the module."""
    views = [BatchView.of(piece.batch) for piece in recording.pieces]
    samples: list[Index | None] = []
    prompts: list[Index | None] = []
    group_of: dict[int, int] = {}
    first = _expanded(recording.pieces, views)
    base = views[first]
    whole = base.rows
    groups, uids = _groups(recording, views, first, whole)
    group_of.update(enumerate(groups.tolist()))
    previous, rows = base, np.arange(whole)
    following, extra, named = False, whole, int(groups.max(initial=-1)) + 1
    for number, (piece, view) in enumerate(zip(recording.pieces, views, strict=True)):
        declared = STAGES.get(piece.stage or "")  # a user's own stage need not be declared
        own = declared is not None and declared.own_input and view.rows != 0
        if own and piece.stage != "prompts":
            samples.append(np.arange(extra, extra + view.rows))
            prompts.append(None)
            group_of.update({extra + i: named + i for i in range(view.rows)})
            extra, named = extra + view.rows, named + view.rows
            continue
        if number < first or (view.rows != whole and not following):
            samples.append(None)
            prompts.append(_of_prompts(view, uids, len(set(groups.tolist()))))
            continue
        if view.rows and (piece.stage == "balance" or view.rows != len(rows)):
            rows = _found_again(previous, rows, view, extra)
            fresh = sorted(set(rows.tolist()) - group_of.keys())
            group_of.update({sample: named + i for i, sample in enumerate(fresh)})
            extra, named = extra + len(fresh), named + len(fresh)
        following = True
        samples.append(rows if view.rows else np.zeros(0, np.int64))
        prompts.append(None)
        previous = view if view.rows else previous
    return Followed(tuple(samples), tuple(prompts), group_of)


def _expanded(pieces: Sequence[Piece], views: Sequence[BatchView]) -> int:
    """The first boundary at which the batch has its rows: where responses are first seen."""
    own = ("prompts", "validation", "sync_weights")
    for number, (piece, view) in enumerate(zip(pieces, views, strict=True)):
        if "responses" in view and piece.stage not in own:
            return number
    rows = [view.rows for view in views]
    return rows.index(max(rows)) if rows else 0


def _groups(
    recording: Recording, views: Sequence[BatchView], first: int, whole: int
) -> tuple[Index, list[Any]]:
    """Group of each row as the rollout made them, and the uid of each group, where there are any.

    By the prompts and n, where both were seen; a wrong uid is no reason to follow it. Rows are not
    reordered before ``balance``, so uids that come later belong to the same places.
    """
    n, pieces = recording.settings.n, recording.pieces
    if pieces[0].stage == "prompts" and n and views[0].rows * n == whole:
        own = views[0].arrays["uid"].tolist() if "uid" in views[0].arrays else []
        labels = _coded(own)[1] if len(own) == views[0].rows else []
        return np.arange(whole) // n, labels if len(labels) == len(own) else []
    for piece, view in zip(pieces[first:], views[first:], strict=True):
        if piece.stage == "balance" and piece.when == "after":
            break
        if "uid" in view.arrays and len(view.arrays["uid"]) == whole == view.rows:
            return _coded(view.arrays["uid"].tolist())
    base = views[first]
    for name in ("raw_prompt", "index"):
        if name in base.arrays and len(base.arrays[name]) == whole:
            return _coded(base.arrays[name].tolist())[0], []
    if "prompts" in base.tensors and len(base.row_hashes("prompts")) == whole:
        return _coded(base.row_hashes("prompts").tolist())[0], []
    return np.arange(whole), []


def _coded(labels: Sequence[Any]) -> tuple[Index, list[Any]]:
    plain = [label if isinstance(label, (str, int)) else str(frozen(label)) for label in labels]
    number = {label: place for place, label in enumerate(dict.fromkeys(plain))}
    return np.array([number[label] for label in plain], np.int64), list(number)


def _of_prompts(view: BatchView, uids: Sequence[Any], groups: int) -> Index:
    """Group of each row of a batch of prompts: by uid, else in order."""
    place = {str(uid): group for group, uid in enumerate(uids)}
    own = view.arrays["uid"].tolist() if "uid" in view.arrays else []
    if own and all(isinstance(uid, (str, int)) for uid in own):
        found = [place.get(str(uid), -1) for uid in own]
        if len(set(found)) == len(found) and -1 not in found:
            return np.array(found, np.int64)
    times = max(1, view.rows // groups) if groups else 1
    out: Index = np.minimum(np.arange(view.rows) // times, max(0, groups - 1))
    return out


def _found_again(previous: BatchView, rows: Index, view: BatchView, extra: int) -> Index:
    """Samples of the rows of ``view`` by what they hold; of those not found, what is left over.

    Rows with the same prompt and response are told apart by the field that most agrees: any one
    field may be the one that was moved wrongly.
    """
    known, more = (_shared(previous, view, names) for names in (SAME_ROW, TELLING))
    free: dict[Any, list[int]] = {}
    for place, mark in enumerate(_marks(previous, known)):
        free.setdefault(mark, []).append(place)
    old, new = _columns(previous, more), _columns(view, more)
    out = np.full(view.rows, -1, np.int64)
    for place, mark in enumerate(_marks(view, known)):
        places = free.get(mark)
        if places:
            best = places[0]
            if len(places) > 1 and len(more):
                best = places[int((old[places] == new[place]).sum(1).argmax())]
            places.remove(best)
            out[place] = rows[best]
    left = [int(rows[place]) for places in free.values() for place in places]
    for place in np.flatnonzero(out < 0).tolist():
        same = int(rows[place]) if place < len(rows) else -1
        if same in left:
            left.remove(same)
            out[place] = same
        else:
            out[place] = left.pop(0) if left else extra
            extra += out[place] == extra
    return out


def _shared(previous: BatchView, view: BatchView, names: Sequence[str]) -> list[str]:
    """Fields that both batches have, one entry a row."""
    there = [n for n in names if n in previous.tensors and n in view.tensors]
    return [n for n in there if len(previous.row_hashes(n)) == previous.rows
            and len(view.row_hashes(n)) == view.rows]  # fmt: skip


def _columns(view: BatchView, names: Sequence[str]) -> NDArray[np.uint64]:
    if not names:
        return np.zeros((view.rows, 0), np.uint64)
    return np.stack([view.row_hashes(name) for name in names], axis=1)


def _marks(view: BatchView, names: Sequence[str]) -> list[Any]:
    if not names:
        return list(range(view.rows))
    return list(map(tuple, _columns(view, names).tolist()))
