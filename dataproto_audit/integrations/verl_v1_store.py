"""What verl's V1 trainer keeps in its store, read as one of our batches.

The driver holds a ``KVBatchMeta``, keys and tags only; the fields are in TransferQueue, jagged.
They are read by key with ``transfer_queue.kv_batch_get`` (interface.py of 0.1: the retrieval by key
names no consumer, so nothing counts as consumed), and never written.

Names in which V0 and V1 differ stand in :data:`NAMES`; which call is which stage stands in
:data:`dataproto_audit.dump.readers.names.METHODS` for both trainers and for files of either.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import InternalError
from dataproto_audit.dump.readers.keys import KEY, KEY_FIELD
from dataproto_audit.integrations.samples import picked

QUEUE = "transfer_queue"
NAMES = {"entropy": "entropys"}
"""V1's name of a field and ours."""
SCRATCH = ("log_probs", "dummy_tensor")
"""Fields that one worker leaves and the next one overwrites: no field of the step."""
COPIES = {"token_level_scores": "rm_scores", "token_level_rewards": "token_level_scores"}
"""Fields that V1 makes in ``_compute_advantage`` out of another and does not store."""
FILLING = "is_padding"
MAX_PROMPTS = 100_000
"""Prompts remembered until their rollouts are sampled; the oldest are forgotten first."""


def is_meta(batch: Any) -> bool:
    """True for a ``KVBatchMeta``, or what looks like one."""
    return all(hasattr(batch, name) for name in ("keys", "tags", "partition_id"))


def uid_of(key: str) -> str:
    """The uid in a store key ``<uid>_<session>_<output>``; of another form, the key itself.

    >>> uid_of("4f1c-a0_3_0")
    '4f1c-a0'
    """
    found = KEY.fullmatch(key)
    return found["uid"] if found else key


def grouped(keys: Sequence[str]) -> list[int]:
    """Positions of ``keys`` with the rows of a prompt side by side, prompts by first arrival.

    Rows arrive in the order in which they finish, which means nothing.
    """
    first: dict[str, int] = {}
    for key in keys:
        first.setdefault(uid_of(key), len(first))
    return sorted(range(len(keys)), key=lambda row: (first[uid_of(keys[row])], _counts(keys[row])))


def _counts(key: str) -> tuple[int, ...]:
    parts = key.rsplit("_", 2)[1:]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def fields_of(meta: Any, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Everything in the store under the keys of ``meta``, its ``rows`` only where they are given.

    Returns ``{"batch": {name: jagged}, "non_tensor_batch": {name: array}, "meta_info": {}}``, rows
    in the order asked for, with the key of each row, its weight version where tags tell one for all
    rows, and ``is_padding`` where any row only fills up. Raises what the store raises, and
    :class:`InternalError` where there is no store in this process.
    """
    queue = sys.modules.get(QUEUE)
    if queue is None:
        raise InternalError("DPA904", "transfer_queue is not imported in this process.")
    places = range(len(meta.keys)) if rows is None else rows
    keys, tags = [meta.keys[row] for row in places], [meta.tags[row] for row in places]
    stored = queue.kv_batch_get(keys=keys, partition_id=meta.partition_id)
    view = BatchView.of(stored)
    tensors = {NAMES.get(k, k): t for k, t in view.tensors.items() if k not in SCRATCH}
    arrays = {NAMES.get(k, k): a for k, a in view.arrays.items() if k not in SCRATCH}
    return {
        "batch": tensors,
        "non_tensor_batch": {**arrays, **_told(keys, tags)},
        "meta_info": {},
    }


def _told(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {KEY_FIELD: np.array(keys, dtype=object)}
    filling = [bool(tag.get(FILLING)) for tag in tags]
    if any(filling):
        columns[FILLING] = np.array(filling, dtype=object)
    versions = [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in tags]
    if versions and all(type(old) is int and old == new for old, new in versions):
        columns["weight_version"] = np.array([old for old, _ in versions], dtype=object)
    return columns


def filling_rows(meta: Any) -> list[bool]:
    """For each row, whether it only fills the batch up."""
    return [bool(tag.get(FILLING)) for tag in meta.tags]


def with_copies(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    """``batch`` with those fields of :data:`COPIES` that it has none of yet."""
    fields = dict(batch["batch"])
    for name in names:
        if name not in fields and COPIES[name] in fields:
            fields[name] = fields[COPIES[name]]
    return {**batch, "batch": fields}


class Prompts:
    """Prompts that were sent to the rollout, by uid, until their rows are sampled."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[BatchView, int]] = {}

    def sent(self, batch: Any) -> None:
        """Remember a batch of the data loader, which has uids."""
        view = BatchView.of(batch)
        uids = view.arrays.get("uid")
        for row, uid in enumerate(() if uids is None else uids.tolist()):
            self._sent[str(uid)] = (view, row)
        for uid in list(self._sent)[:-MAX_PROMPTS]:
            del self._sent[uid]

    def of(self, keys: Sequence[str]) -> dict[str, Any] | None:
        """The prompts of these rows, each once, in order, and forgotten; None unless all of them
        are known."""
        uids = list(dict.fromkeys(uid_of(key) for key in keys))
        found = [self._sent.pop(uid, None) for uid in uids]
        known = [place for place in found if place is not None]
        if not known or len(known) < len(found):
            return None
        view = known[0][0]
        if any(other is not view for other, _ in known):
            return _joined(known)
        return picked(view, np.array([row for _, row in known], dtype=np.int64))


def _joined(places: Sequence[tuple[BatchView, int]]) -> dict[str, Any] | None:
    """Prompts of several batches: the objects that all of them have."""
    names = set.intersection(*(set(view.arrays) for view, _ in places))
    arrays = {}
    for name in sorted(names):
        column = arrays[name] = np.empty(len(places), dtype=object)
        for row, (view, place) in enumerate(places):
            column[row] = view.arrays[name][place]
    return {"batch": {}, "non_tensor_batch": arrays, "meta_info": {}} if "uid" in names else None
