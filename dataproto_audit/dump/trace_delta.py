"""What of a batch is new at a boundary: the part of recording that the training thread pays for.

A field whose row fingerprints, kind and shape are those of the boundary before is stored by
reference; one whose rows only moved, as an index. Everything else is copied to the host at once,
because its memory may be overwritten before it is written; so are evidence and meta entries. A meta
entry that is what it was stays the very copy of the boundary before, to which the writer then
refers. Objects of non-tensor fields are kept as references: one that is changed from within later
is recorded as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.dump.trace_copy import Copies, copied
from dataproto_audit.dump.trace_format import STORABLE, Stored, boundary_name, dtype_name
from dataproto_audit.dump.trace_json import is_storable
from dataproto_audit.dump.trace_meta import LIMIT
from dataproto_audit.findings import Report, When
from dataproto_audit.fingerprint import KEY_FIELDS, Hashes, row_keys
from dataproto_audit.storage import flat_parts, host_copy

_LENGTH = np.uint64(0x9E3779B97F4A7C15)
_PLAIN = frozenset({str, int, bool, float})
Later = Callable[[], Sequence[str]]
"""What gives the row keys when they are written."""
RowKeys = Sequence[str] | Callable[[], Sequence[str] | Later] | None
"""Row keys, or what is asked for them, or for a :data:`Later`, at a boundary with new ones."""


@dataclass
class Snapshot:
    """One boundary, ready to be written by another thread.

    ``fields`` is the whole table; ``tensors`` (dense), ``jagged`` (values and offsets) and
    ``columns`` hold what is stored here. ``order`` is where each row was at the boundary before,
    where rows moved. ``row_keys`` gives the keys, None where they are those of ``keys_at``.
    """

    name: str
    stage: str
    when: When
    part: str
    sizes: tuple[int, int | None, int | None]
    fields: list[Stored]
    tensors: dict[str, Tensor]
    columns: dict[str, NDArray[Any]]
    order: NDArray[np.int64] | None
    row_keys: Later | None
    keys_at: str
    meta: Mapping[str, Any]
    evidence: Mapping[str, Any]
    report: Report
    opaque: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    gap: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the copied tensors and arrays; of objects, the references to them."""
        arrays = [*self.columns.values(), *([] if self.order is None else [self.order])]
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return tensors + sum(array.nbytes for array in arrays)


@dataclass
class _Known:
    """A field as it was at the last boundary that carried it."""

    stored: Stored
    form: tuple[Any, ...]
    hashes: Hashes | None = None
    objects: NDArray[Any] | None = None
    taken: Hashes | None = None
    """The view's own fingerprints: a tensor that was not written has this very array again."""
    memory: bytes = b""
    """That of ``objects``, which keep what it points to alive."""

    def holds(self, array: NDArray[Any]) -> bool:
        """True for an array of the very same objects, or bits, in the same form."""
        return self.form == (array.dtype, array.shape) and self.memory == array.tobytes()


class StepDelta:
    """Follows the fields of one step from boundary to boundary."""

    def __init__(self, number: int = 0) -> None:
        """``number`` is that of the first boundary, in its name."""
        self._known: dict[str, _Known] = {}
        self._content: dict[tuple[Any, ...], list[tuple[Hashes, Stored]]] = {}
        self._marks = self._now = np.zeros(0, np.uint64)
        self._marked: list[Hashes] = []
        self._addresses: bytes | None = None
        self._alive: Any = None  # so that addresses of uids stay theirs
        self._keys_at = ""
        self._prompts: list[Any] = []
        self._meta = Copies(LIMIT)
        self._number = number

    def take(
        self,
        stage: str,
        view: BatchView,
        *,
        when: When = "after",
        part: str = "",
        row_keys: RowKeys = None,
        evidence: Mapping[str, Any] | None = None,
        report: Report | None = None,
    ) -> Snapshot:
        """The next boundary of the step. Blocks no longer than a host copy of what is new."""
        name = boundary_name(self._number, stage, when, part)
        self._number += 1
        order, keys = self._rows(view, name, row_keys)
        made = Snapshot(
            name, stage, when, part, (view.rows, view.prompt, view.response), [], {}, {}, None,
            keys, self._keys_at, self._meta(view.meta),
            copied(dict(evidence or {})), report or Report(), (),
        )  # fmt: skip
        opaque = []
        for field_name, tensor in view.tensors.items():
            before = self._known.get(field_name)
            if before is not None and before.taken is view.hashes.get(field_name) is not None:
                made.fields.append(before.stored)  # not written since
                continue
            if dtype_name(tensor.dtype) not in STORABLE or not tensor.dim():
                opaque.append(f"{field_name}: {tensor.dtype} of {tensor.dim()} axes")
                continue
            known, moved = self._tensor(field_name, tensor, view, order, made)
            made.fields.append(known.stored)
            if moved:
                made.order = order
            self._known[field_name] = known
        for field_name, array in view.arrays.items():
            before = self._known.get(field_name)
            if before is not None and before.holds(array):
                made.fields.append(before.stored)
                continue
            if not is_storable(array.dtype):
                opaque.append(f"{field_name}: {array.dtype}")
                continue
            known, moved = self._array(field_name, array, order, made)
            made.fields.append(known.stored)
            if moved:
                made.order = order
            self._known[field_name] = known
        made.opaque = tuple(opaque)
        return made

    @property
    def number(self) -> int:
        """Number of the next boundary."""
        return self._number

    # -- rows --------------------------------------------------------------------------------------

    def _rows(
        self, view: BatchView, name: str, given: RowKeys
    ) -> tuple[NDArray[np.int64] | None, Later | None]:
        """Where rows came from if they moved, and what gives their keys if those are new.

        Keys are made when they are written: nothing but fingerprints is compared here.
        """
        hashes = [view.row_hashes(n) for n in KEY_FIELDS if n in view.tensors]
        if [*map(id, hashes)] != [*map(id, self._marked)] or view.rows != len(self._now):
            self._marked, self._now = hashes, row_marks(view)
        marks, uids = self._now, view.arrays.get("uid")
        if uids is not None and not any(field in view.tensors for field in KEY_FIELDS):
            self._prompts = uids.tolist()  # of prompts, before they are repeated
        before, addresses = self._marks, None if uids is None else uids.tobytes()
        known = self._keys_at and len(marks) == len(before) and addresses == self._addresses
        if known and (marks is before or np.array_equal(marks, before)):
            return None, None
        self._marks, self._addresses, self._alive, self._keys_at = marks, addresses, uids, name
        asked = given() if callable(given) else given
        if asked is None:
            asked = own_keys(view, self._prompts)
        return _moved(before, marks), asked if callable(asked) else partial(tuple, asked)

    # -- fields ------------------------------------------------------------------------------------

    def _tensor(
        self,
        name: str,
        tensor: Tensor,
        view: BatchView,
        order: NDArray[np.int64] | None,
        made: Snapshot,
    ) -> tuple[_Known, bool]:
        taken = hashes = view.row_hashes(name)
        jagged, before = bool(tensor.is_nested), self._known.get(name)
        form = (tensor.dtype, jagged, None if jagged else tuple(tensor.shape[1:]))
        printed = int(hashes.sum(dtype=np.uint64))
        if jagged:  # padded to the same width, rows of other lengths may look alike
            hashes = hashes + view.lengths(name).astype(np.uint64) * _LENGTH
        earlier, moved = _same(before, form, hashes, order, made.name)
        if earlier is not None:
            return _Known(earlier, form, hashes, taken=taken), moved
        mark = (*form, len(hashes), int(hashes.sum(dtype=np.uint64)))
        for seen, stored in self._content.get(mark, ()):
            if np.array_equal(seen, hashes):  # the same values under another name
                return _Known(replace(stored, name=name), form, hashes, taken=taken), False
        shape = (len(hashes),) if jagged else tuple(tensor.shape)
        stored = Stored(
            name, "jagged" if jagged else "tensor", dtype_name(tensor.dtype), shape,
            f"{printed:016x}", made.name, name,
        )  # fmt: skip
        if jagged:
            made.tensors[f"{name}.values"], made.tensors[f"{name}.offsets"] = flat_parts(tensor)
        else:
            made.tensors[name] = host_copy(tensor)
        self._content.setdefault(mark, []).append((hashes, stored))
        return _Known(stored, form, hashes, taken=taken), False

    def _array(
        self, name: str, array: NDArray[Any], order: NDArray[np.int64] | None, made: Snapshot
    ) -> tuple[_Known, bool]:
        form, known, kept = (array.dtype, array.shape), self._known.get(name), array.copy()
        stored, moved = None, False
        if known is not None and known.objects is not None and known.form == form:
            fits = order is not None and len(known.objects) == len(array) == len(order)
            if _alike(known.objects, array):
                stored = known.stored
            elif fits and _identical(known.objects[order], array):
                orders = (*known.stored.orders, made.name)
                stored, moved = replace(known.stored, orders=orders), True
        if stored is None:
            stored = Stored(
                name, "objects", array.dtype.str, tuple(array.shape), "", made.name, name
            )  # fmt: skip
            made.columns[name] = kept
        return _Known(stored, form, objects=kept, memory=kept.tobytes()), moved


def row_marks(view: BatchView) -> Hashes:
    """What tells rows apart here: the fingerprint of prompt and response, ``[rows]``."""
    out = np.zeros(view.rows, np.uint64)
    for name in KEY_FIELDS:
        if name in view.tensors and view.tensors[name].dim():
            hashes = view.row_hashes(name)
            if len(hashes) == len(out):
                out = out * _LENGTH + hashes
    return out


def _moved(before: Hashes, marks: Hashes) -> NDArray[np.int64] | None:
    """Where each row was before, when the same rows are there in another order."""
    if len(before) != len(marks) or np.array_equal(before, marks):
        return None
    old, new = before.argsort(kind="stable"), marks.argsort(kind="stable")
    if not np.array_equal(before[old], marks[new]):
        return None
    order = np.empty(len(marks), np.int64)
    order[new] = old
    return order


def _same(
    known: _Known | None,
    form: tuple[Any, ...],
    hashes: Hashes,
    order: NDArray[np.int64] | None,
    here: str,
) -> tuple[Stored | None, bool]:
    """Where the field lies already, and whether its rows moved here; None where it is new."""
    if known is None or known.hashes is None or known.form != form:
        return None, False
    if known.hashes is hashes or np.array_equal(known.hashes, hashes):
        return known.stored, False
    fits = order is not None and len(known.hashes) == len(hashes) == len(order)
    if fits and np.array_equal(known.hashes[order], hashes):
        return replace(known.stored, orders=(*known.stored.orders, here)), True
    return None, False


def _identical(old: NDArray[Any], new: NDArray[Any]) -> bool:
    """The same objects, or equal plain ones, in the same order."""
    return (old.shape == new.shape and old.tobytes() == new.tobytes()) or _alike(old, new)


def _alike(old: NDArray[Any], new: NDArray[Any]) -> bool:
    """Equal plain objects, or the same ones, in the same order."""
    if old.dtype != object or old.ndim != 1:
        return bool(old.shape == new.shape and old.dtype.kind in "iufbU" and (old == new).all())
    olds, news = old.tolist(), new.tolist()
    kinds = [*map(type, olds)]
    if _PLAIN.issuperset(kinds) and kinds == [*map(type, news)]:
        return bool(olds == news)
    return all(
        a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)
        for a, b in zip(olds, news, strict=True)
    )


def own_keys(view: BatchView, prompts: Sequence[Any] = ()) -> Later:
    """What gives the row keys of a batch: uid, fingerprint of prompt and response, occurrence.

    ``prompts`` are the uids of the prompts, for a batch that does not carry its own yet. Tensors
    of ``view`` are not kept alive by it.
    """
    uids = np.atleast_1d(view.arrays["uid"]).tolist() if "uid" in view.arrays else []
    parts = [view.row_hashes(n) for n in KEY_FIELDS if n in view.tensors and view.tensors[n].dim()]
    parts = [part for part in parts if len(part) == view.rows]
    return partial(row_keys, uids, parts, view.rows, prompts=prompts)
