"""Identity of rows through a step: which rows a stage kept, moved, lost or changed.

A field is compared row by row through 64-bit fingerprints, which are taken again only when the
tensor is another object or was written in place (torch counts writes; a write through a numpy view
of the same memory is not seen). Non-tensor fields compare object by object, first by identity and
by value only where that differs, because values can be arbitrarily large; an object that was
changed from within is not seen.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.fingerprint import KEY_FIELDS, Hashes, frozen, object_hash, row_keys

Index = NDArray[np.int64]


class RowState:
    """What every field of one boundary held, as fingerprints and as references to objects.

    ``same`` names the fields whose rows are, position by position, those of ``previous``.
    Fingerprints of tensors are taken here and now, because their memory may be overwritten before
    the next boundary. The objects of non-tensor fields are kept alive, so that their addresses
    tell later whether they are still the same ones.
    """

    def __init__(self, view: BatchView, previous: "RowState | None" = None) -> None:
        self.view = view
        self.objects: dict[str, list[Any]] = {}
        self._versions: dict[str, int | None] = {}
        self._addresses: dict[str, bytes] = {}
        self._hashes: dict[str, Hashes] = {}
        same = self._fingerprint(previous)
        same += [name for name in view.arrays if self._list(name, previous)]
        self.same = frozenset(same)

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.view.rows

    def untouched(self, view: BatchView) -> bool:
        """True when ``view`` shows these very tensors and objects, none of them written since."""
        if view.names != self.view.names or view.untracked or view.odd or self.view.odd:
            return False
        own, versions = self.view.tensors, self._versions
        for name, tensor in view.tensors.items():
            if tensor is not own[name] or versions[name] is None:
                return False
            if tensor._version != versions[name]:
                return False
        return all(a.tobytes() == self._addresses[n] for n, a in view.arrays.items())

    def again(self) -> "RowState":
        """This state at the next boundary of an untouched batch."""
        state = RowState.__new__(RowState)
        state.__dict__ |= self.__dict__
        state.same = frozenset(self.view.names)
        return state

    def _fingerprint(self, previous: "RowState | None") -> list[str]:
        """Fingerprint the rows of all tensors; names of those that are as they were."""
        view, same = self.view, []
        earlier = {} if previous is None else previous.view.tensors
        for name, tensor in view.tensors.items():
            version = None if tensor.is_inference() else tensor._version
            self._versions[name] = version = None if name in view.untracked else version
            known = previous is not None and tensor is earlier.get(name)
            if known and previous is not None and version == previous._versions[name] is not None:
                view.take_over(name, previous.view)
                same.append(name)
        view.hash_rows(view.tensors)
        if previous is not None:
            again = {name for name in view.tensors if name in earlier}.difference(same)
            same += [
                name
                for name in again
                if np.array_equal(previous.view.row_hashes(name), view.row_hashes(name))
            ]
        return same

    def _list(self, name: str, previous: "RowState | None") -> bool:
        """Note the objects of a non-tensor field; True when they are those of ``previous``."""
        array = self.view.arrays[name]
        self._addresses[name] = addresses = array.tobytes()
        old = None if previous is None else previous.objects.get(name)
        if previous is not None and old is not None and previous._addresses[name] == addresses:
            self.objects[name] = old
            if name in previous._hashes:
                self._hashes[name] = previous._hashes[name]
            return True
        objects = self.objects[name] = np.atleast_1d(array).tolist()
        return old is not None and alike(old, objects)

    def hashes(self, name: str) -> Hashes:
        """Fingerprint of each row of the field, by value."""
        if name in self.view.tensors:
            return self.view.row_hashes(name)
        found = self._hashes.get(name)
        if found is None:
            found = self._hashes[name] = object_hash(self.objects[name])
        return found

    def whole(self, name: str) -> bool:
        """True when the field has one entry for each row."""
        own = self.objects[name] if name in self.objects else self.view.row_hashes(name)
        return len(own) == self.rows

    def fingerprint(self, name: str) -> str:
        """Fingerprint of the field as a bag of rows, in hex; '' for non-tensor fields."""
        if name not in self.view.tensors:
            return ""
        return f"{int(self.hashes(name).sum(dtype=np.uint64)):016x}"

    def keys(self, prompts: Sequence[Any] = ()) -> tuple[str, ...]:
        """Row keys for people (:func:`row_keys`). ``prompts`` are the uids of the prompts, which
        stand in where the batch does not carry its own yet."""
        return self.key_maker(prompts)()

    def key_maker(self, prompts: Sequence[Any] = ()) -> Callable[[], tuple[str, ...]]:
        """What gives the row keys later. It keeps fingerprints and uids alive, and no tensor."""
        parts = [self.hashes(n) for n in KEY_FIELDS if n in self.view.tensors and self.whole(n)]
        uids = self.objects.get("uid", ())
        return partial(row_keys, uids, parts, self.rows, prompts=prompts)


def differing(old: Sequence[Any], new: Sequence[Any]) -> Iterator[int]:
    """Positions at which two equally long sequences hold different values, one by one.

    Identical objects are equal without a look inside; others are compared by value.
    """
    try:
        if list(old) == list(new):  # the usual case: the same objects, in one call for all rows
            return
    except Exception:  # noqa: BLE001 - arrays have no single truth value, and users write __eq__
        pass
    for row, (before, after) in enumerate(zip(old, new, strict=True)):
        if before is not after and frozen(before) != frozen(after):
            yield row


def alike(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """True when two sequences hold the same values in the same order."""
    return len(old) == len(new) and next(differing(old, new), None) is None
