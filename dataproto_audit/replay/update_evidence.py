"""What workers noted about a batch, cut with it: rank notes, loss terms, the metrics of the update.

Counts and sums keep their distance from what the batch itself says, loss terms their quotient, so
that a wrong note stays wrong by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.probes import Settings
from dataproto_audit.probes.loss_terms import TERMS as SPLIT_TERMS
from dataproto_audit.probes.loss_terms import Undecided, unreadable
from dataproto_audit.replay.update_terms import TERMS, loss_terms, unusable, value_terms

Index = NDArray[np.int64]
COUNTED = ("peak_token_sum", "token_limit")
BY_MODE = ("pg_loss", "total")
"""Terms that depend on which policy loss it is."""


def cut_ranks(
    notes: Sequence[Mapping[str, Any]], rows: Index, before: Index, after: Index
) -> list[dict[str, Any]]:
    """Rank notes of the rows that stay: positions ``rows`` of the batch before.

    ``before`` and ``after`` are the attended tokens of each row of the batch before and after.
    """
    place = {row: at for at, row in enumerate(rows.tolist())}
    out, start, begun = [], 0, 0
    for note in notes:
        held = int(note.get("rows", 0))
        own = [row for row in range(start, start + held) if row in place]
        begin = place[own[0]] if own else begun
        made = dict(note)
        made["rows"] = len(own)
        if "tokens" in note:
            own_before = int(before[start : start + held].sum())
            made["tokens"] = int(note["tokens"]) - own_before + int(after[begin:][: len(own)].sum())
        made |= _micro_batches(note, start, begin, place, before, after)
        out.append(made)
        start, begun = start + held, begin + len(own)
    return out


def _micro_batches(
    note: Mapping[str, Any], start: int, begin: int, place: Mapping[int, int],
    before: Index, after: Index,
) -> dict[str, Any]:  # fmt: skip
    lists = note.get("indices")
    if not isinstance(lists, list):
        return {}
    sums = list(note.get("micro_batches") or [])
    held: list[list[int]] = []
    counted: list[int] = []
    kept: dict[int, int] = {}
    stays: list[list[int]] = []
    for number, micro in enumerate(lists):
        inside = [at for at, i in enumerate(micro) if i < 0 or start + i in place]
        if not inside and micro:
            continue
        kept[number] = len(held)
        stays.append(inside)
        # A negative row is a row of nobody, and stays one; of the rank before, it would be one.
        held.append([micro[at] if micro[at] < 0 else place[start + micro[at]] - begin
                     for at in inside])  # fmt: skip
        old = sum(int(before[start + i]) for i in micro if i >= 0 and start + i < len(before))
        new = sum(int(after[begin + i]) for i in held[-1] if i >= 0 and begin + i < len(after))
        counted.append((int(sums[number]) if number < len(sums) else old) - old + new)
    made: dict[str, Any] = {"indices": held, "micro_batches": counted}
    if isinstance(note.get("mini_batches"), list):
        made["mini_batches"] = [m for i, m in enumerate(note["mini_batches"]) if i in kept]
    if sums and counted:
        lower = max(sums) - max(counted)
        for name in COUNTED:
            if isinstance(note.get(name), int):
                made[name] = max(1, note[name] - lower)
    if isinstance(note.get("packed"), list):
        made["packed"] = [
            {**told, "micro_batch": kept[told["micro_batch"]],
             "restarts": [told["restarts"][at] for at in stays[kept[told["micro_batch"]]]
                          if at < len(told["restarts"])]}
            for told in note["packed"] if told.get("micro_batch") in kept
        ]  # fmt: skip
    if isinstance(note.get("attended"), list):
        made["attended"] = [
            _attended(told, kept[told["micro_batch"]], lists[told["micro_batch"]], stays[
                kept[told["micro_batch"]]], start, place, before, after)
            for told in note["attended"] if told.get("micro_batch") in kept
        ]  # fmt: skip
    return made


def _attended(
    told: Mapping[str, Any], number: int, micro: Sequence[int], stays: Sequence[int], start: int,
    place: Mapping[int, int], before: Index, after: Index,
) -> dict[str, Any]:  # fmt: skip
    """What the rows that stay see of their tokens; both counts lose the columns that a row lost."""
    gone = {
        at: int(before[start + micro[at]]) - int(after[place[start + micro[at]]])
        for at in stays if micro[at] >= 0 and start + micro[at] in place
    }  # fmt: skip
    cut = {
        name: [max(0, told[name][at] - gone.get(at, 0)) for at in stays if at < len(told[name])]
        for name in ("lengths", "seen")
    }
    return {**told, "micro_batch": number, **cut}


def cut_losses(
    losses: Sequence[Mapping[str, Any]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    settings: Settings,
    *,
    ranks: tuple[Any, Any] = ((), ()),
) -> list[dict[str, Any]]:
    """Loss terms of each mini-batch for the rows that stay; ``before`` and ``after`` are fields,
    ``ranks`` the notes of the ranks before and after.

    Where they cannot be computed, from a broken field for one, they stay as they were told; of a
    mean over micro-batches that were not recorded, what depends on those. Of a policy loss that is
    not known, what depends on it is left out.
    """
    if unusable(before, settings) or unusable(after, settings):
        return [dict(told) for told in losses]
    out = []
    for number, told in enumerate(losses):
        made, how = dict(told), told
        if unreadable(told):
            made = {name: value for name, value in told.items() if name not in BY_MODE}
            how = {name: told[name] for name in ("split", "old") if name in told}
        sides = ((before, ranks[0]), (after, ranks[1]))
        names: tuple[str, ...] = TERMS
        try:
            old, new = (loss_terms(f, number, settings, told=how, ranks=r) for f, r in sides)
        except Undecided:
            how = {name: value for name, value in how.items() if name != "split"}
            old, new = (loss_terms(f, number, settings, told=how) for f, _ in sides)
            names = tuple(name for name in TERMS if name not in SPLIT_TERMS)
        eps = told.get("eps") or 0.0
        for name in names:
            if old and new and isinstance(made.get(name), (int, float)):
                rough = 0.0 if name == "normaliser" else float(eps)
                made[name] = _carried(float(told[name]), old[name], new[name], rough)
        out.append(made)
    return out


def cut_value_losses(
    losses: Sequence[Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The same of a critic's losses; where they cannot be computed, they stay as they were told."""
    out = []
    for number, told in enumerate(losses):
        made = dict(told)
        old, new = (value_terms(fields, number, told) for fields in (before, after))
        for name in old if new else ():
            if isinstance(told.get(name), (int, float)):
                made[name] = _carried(float(told[name]), old[name], new[name])
        out.append(made)
    return out


def _carried(told: float, old: float, new: float, eps: float = 0.0) -> float:
    """``eps``: the precision of what ``told`` was computed from; rounding is no fault to keep."""
    if abs(told - old) <= max(1e-6, eps) + max(1e-5, eps) * abs(old):
        return new
    return told * new / old if abs(old) > 1e-12 else told


def cut_metrics(
    metrics: Mapping[str, Any], before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Metrics of an update with ``actor/kl_loss`` as far from the mini-batches' mean as it was."""
    out = dict(metrics)
    told = metrics.get("actor/kl_loss")
    old, new = ([loss["kl_loss"] for loss in losses if "kl_loss" in loss]
                for losses in (before, after))  # fmt: skip
    if isinstance(told, float) and old and new:
        out["actor/kl_loss"] = _carried(told, float(np.mean(old)), float(np.mean(new)))
    return out
