"""Meta entries of boundaries: each is written where it is new, and referred to where it is not.

A reference is ``{"$": "at", "v": BOUNDARY}`` in the place of the entry: that boundary *of the same
step* has the entry itself under the same name. The encoder never writes a ``$`` of a user's own
mapping that way, so there is no mistaking the two. Entries of a few letters are repeated. One
larger than ``LIMIT`` is left out: an opaque value in its place says so, and the log once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.dump.trace_format import dtype_name
from dataproto_audit.dump.trace_json import Encoder, TooLarge

log = logging.getLogger("dataproto_audit")

LIMIT = 1 << 26
"""Bytes that one entry may take, text and tensors together, each part as often as it is there."""
SMALL = 64
"""Letters of an entry that is rather repeated than referred to."""
KIND = "at"
_COPIED = (dict, list, tuple, np.ndarray, Tensor)
"""Kinds of entries of which the writer gets copies, that nobody writes to."""
_SAID: set[str] = set()


@dataclass
class _Written:
    """An entry as it was written: its value, a hash of what was written, what is to be written
    where it is met again, and the classes that it lacks."""

    value: Any
    mark: bytes
    again: Any
    opaque: set[str]


@dataclass
class Entries:
    """What is written of the meta of one boundary: JSON, tensors beside it, classes left out."""

    said: Any
    tensors: dict[str, Tensor]
    opaque: set[str]


class MetaWriter:
    """Encodes the meta entries of the boundaries of one step, in their order."""

    def __init__(self) -> None:
        self._known: dict[str, _Written] = {}

    def __call__(self, here: str, meta: Mapping[str, Any]) -> Entries:
        """The entries at boundary ``here``.

        A container, array or tensor that is the very object of the boundary before is taken for
        unchanged: the copies are made so (:class:`~dataproto_audit.dump.trace_copy.Copies`). Of
        everything else what would be written is compared, tensors included.
        """
        made = Entries({}, {}, set())
        if any(type(name) is not str for name in meta) or "$" in meta:  # no place for a reference
            made.said = self._whole(meta, made)
            return made
        for name, value in meta.items():
            made.said[name] = self._entry(here, name, value, made)
        return made

    def _whole(self, meta: Mapping[str, Any], made: Entries) -> Any:
        encode = Encoder(prefix="#meta", limit=LIMIT)
        try:
            said = encode(dict(meta))
        except TooLarge:
            said = _left_out("")
        made.tensors, made.opaque = encode.tensors, encode.opaque
        return said

    def _entry(self, here: str, name: str, value: Any, made: Entries) -> Any:
        known = self._known.get(name)
        if known is not None and known.value is value and type(value) in _COPIED:
            made.opaque |= known.opaque
            return known.again
        encode = Encoder(prefix=f"#meta.{name}.", limit=LIMIT)
        try:
            entry = encode(value)
        except TooLarge:
            entry = _left_out(name)
            made.opaque.add(entry["v"])
            self._known[name] = _Written(value, b"", entry, {entry["v"]})
            return entry
        made.opaque |= encode.opaque
        text = json.dumps(entry)
        if len(text) <= SMALL and not encode.tensors:
            self._known.pop(name, None)
            return entry
        mark = _mark(text, encode.tensors)
        if known is not None and known.mark == mark:
            known.value = value
            return known.again
        self._known[name] = _Written(value, mark, {"$": KIND, "v": here}, encode.opaque)
        made.tensors |= encode.tensors
        return entry


def _left_out(name: str) -> dict[str, Any]:
    what = f"the meta entry {name!r}" if name else "the meta entries"
    told = f"{what}, larger than {LIMIT >> 20} MiB and left out"
    if told not in _SAID:
        _SAID.add(told)
        log.warning("the trace does not keep %s.", told)
    return {"$": "opaque", "v": told}


def _mark(text: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Equal for entries of which the same is written."""
    made = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors.values():
        made.update(f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.digest()


def place_of(entry: Any) -> str | None:
    """The boundary that a reference names; None for an entry itself."""
    if isinstance(entry, dict) and entry.get("$") == KIND:
        return str(entry.get("v"))
    return None
