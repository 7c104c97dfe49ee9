"""A recording that tells nothing of its data: ids renamed one to one, text taken out.

Token ids become small numbers in the order in which they are met; equal ids stay equal, the ids of
padding, stop tokens, tools and images are renamed in settings and meta, too. Ids outside of the
vocabulary, and negative ones, stay as they are. Row ids become ``u0, u1, ...``; any other text, and
any object that holds some, becomes ``text 0, text 1, ...``, equal ones alike; pixels become one
number. Numbers stay in the columns and entries that :mod:`.known` names; others are left out.

Not covered: what log-probs, rewards and lengths tell about the text. They are the finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.fingerprint import frozen
from dataproto_audit.probes import Settings
from dataproto_audit.replay import known
from dataproto_audit.replay.recording import Piece, Recording

ID_FIELDS = ("prompts", "responses", "input_ids")
ID_SETTINGS = ("stop_ids", "tool_ids", "image_ids")
UIDS = ("uid", "store_key", "request_id")
WORDS = frozenset((
    "none", "all ones", "rows", "new", "stop", "length", "abort", "completed", "truncated", "eos",
))  # fmt: skip
"""Texts that belong to formats and not to data."""


class Renamer:
    """The bijection of one recording, and what was taken out on the way."""

    def __init__(self, settings: Settings, *, keep_text: bool = False) -> None:
        self.settings = settings
        self.keep_text = keep_text
        self.removed: dict[str, None] = {}
        self._ids: dict[int, int] = {}
        self._texts: dict[Any, str] = {}
        self._uids: dict[Any, str] = {}
        self._blanks: dict[Any, int] = {}
        for special in (settings.pad_id, *(settings.stop_ids or ()), *(settings.image_ids or ()),
                      *(settings.tool_ids or ())):  # fmt: skip
            if special is not None:
                self.token(special)

    @property
    def tokens(self) -> int:
        """Token ids that were renamed."""
        return len(self._ids)

    def recording(self, recording: Recording) -> Recording:
        """The recording under other names."""
        for piece in recording.pieces:  # padding first, so that it is 0 where it is known
            self._padding(piece.batch["batch"])
        pieces = tuple(self._piece(piece) for piece in recording.pieces)
        changed: dict[str, Any] = {}
        if self.settings.pad_id is not None:
            changed["pad_id"] = self.token(self.settings.pad_id)
        for name in ID_SETTINGS:
            ids = getattr(self.settings, name)
            if ids is not None:
                changed[name] = tuple(self.token(one) for one in ids)
        metrics = self._entries("metrics", recording.metrics)
        settings = replace(self.settings, **changed)
        return replace(recording, pieces=pieces, settings=settings, metrics=metrics)

    def token(self, token: int) -> int:
        """Another id for a token id."""
        size = self.settings.vocab_size
        if token < 0 or (size is not None and token >= size):
            return token
        return self._ids.setdefault(int(token), len(self._ids))

    def _padding(self, tensors: Mapping[str, Tensor]) -> None:
        mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
        if mask is None or ids is None or mask.is_nested or mask.shape != ids.shape:
            return
        off = ids[mask == 0]
        if off.numel() and not off.is_floating_point():
            self.token(int(off.mode().values))

    def _piece(self, piece: Piece) -> Piece:
        batch = piece.batch
        tensors = {
            n: self._tensor(n, t) for n, t in batch["batch"].items()
            if known.is_id(n) or self._kept("batch", n, n in known.COLUMNS)
        }  # fmt: skip
        arrays = {
            n: self._column(n, a) for n, a in batch["non_tensor_batch"].items()
            if _is_ids(n, a) or self._kept("non_tensor_batch", n, n in known.COLUMNS or n in UIDS)
        }  # fmt: skip
        made = {"batch": tensors, "non_tensor_batch": arrays,
                "meta_info": self._entries("meta_info", batch["meta_info"])}  # fmt: skip
        evidence = self._entries("evidence", piece.evidence)
        return replace(piece, batch=made, evidence=evidence, place="")

    def _kept(self, place: str, name: Any, is_known: bool) -> bool:
        """False for what no check knows, which is noted; its name is said where it is a plain one.

        With text also numbers of unknown columns may be published, so they stay.
        """
        if not is_known and not self.keep_text:
            plain = isinstance(name, str) and name.isidentifier() and len(name) <= 40
            self.removed[f"{place}.{name}" if plain else f"{place}: another entry"] = None
            return False
        return True

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        if not (name in ID_FIELDS or known.is_id(name)) or not tensor.numel():
            return tensor
        if tensor.is_nested:
            rows = [self._tensor(name, row) for row in tensor.unbind()]
            made: Tensor = torch.nested.nested_tensor(rows, layout=tensor.layout)
            return made
        flat, back = torch.unique(tensor.reshape(-1), return_inverse=True)
        for token in dict.fromkeys(tensor.reshape(-1).tolist()):
            self._number(token)
        renamed = torch.tensor([self._number(t) for t in flat.tolist()], dtype=tensor.dtype)
        return renamed[back].reshape(tensor.shape)

    def _number(self, token: float) -> float:
        """An id that may be stored as a float; what is no whole number stays."""
        return self.token(int(token)) if float(token).is_integer() else token

    def _column(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind in "iufb":
            if _is_ids(name, array):
                return np.asarray(self._renamed(array.tolist()), array.dtype)
            if not (name in UIDS or name == "index"):
                return array
        out = np.empty(len(array), object)
        for row, value in enumerate(array.tolist() if array.ndim == 1 else list(array)):
            out[row] = self._cell(name, value)
        return out

    def _cell(self, name: str, value: Any) -> Any:
        if name in UIDS:
            return self._uids.setdefault(frozen(value), f"u{len(self._uids)}")
        if name == "index" and isinstance(value, (int, str)):
            return self._uids.setdefault(("index", value), f"u{len(self._uids)}")
        if name in known.IMAGES and isinstance(value, Mapping):
            return {k: self._image(k, v) for k, v in value.items() if k in known.IMAGE_KEYS}
        if name not in known.NOT_IDS and _ints(value):
            return self._renamed(value)
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
            return value if name in known.ARRAYS else self._blank(value)
        rows = value.values() if isinstance(value, Mapping) else ()
        shown = bool(rows) and value.keys() <= known.CELL_KEYS and all(map(_scalar, rows))
        private = not shown and (name in known.TEXTUAL or not _scalar(value)) and value is not None
        return self._plain(f"non_tensor_batch.{name}", value, private=private)

    def _image(self, key: str, value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return value if key.endswith("_grid_thw") else self._blank(value)
        return self._plain("non_tensor_batch.images", value, private=True)

    def _blank(self, value: Any) -> Any:
        """An array of the same shape with one number in it, the same one for equal arrays."""
        number = self._blanks.setdefault(frozen(value), len(self._blanks)) % 100
        if isinstance(value, Tensor):
            return torch.full_like(value, number)
        if value.dtype.kind in "iuf":
            return np.full_like(value, number)
        return np.full(value.shape, number)

    def _renamed(self, value: Any) -> Any:
        """Integers at any depth of lists, arrays and tensors by their new ids."""
        if isinstance(value, Tensor):
            return torch.tensor(self._renamed(value.tolist()), dtype=value.dtype)
        if isinstance(value, np.ndarray):
            return np.asarray(self._renamed(value.tolist()), value.dtype)
        if isinstance(value, (list, tuple)):
            return [self._renamed(item) for item in value]
        return self.token(int(value))

    def _entries(self, place: str, entries: Mapping[Any, Any]) -> dict[Any, Any]:
        """Entries of meta, evidence and of mappings in them, as far as their names are known."""
        section = place.rpartition(".")[2]
        return {
            name: self._told(f"{place}.{name}", str(name), value)
            for name, value in entries.items()
            if self._kept(place, name, known.is_entry(section, name))
        }

    def _told(self, place: str, name: str, value: Any) -> Any:
        if known.is_id(name):
            if _ints(value) or (isinstance(value, (int, np.integer)) and type(value) is not bool):
                return self._renamed(value)
            return None if value is None else self._plain(place, value, private=True)
        if isinstance(value, Mapping):
            return self._entries(place, value)
        if isinstance(value, (list, tuple)):
            items = [self._told(place, name, item) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, str) and known.is_choice(name, value):
            return value
        return self._plain(place, value)

    def _plain(self, place: str, value: Any, *, private: bool = False) -> Any:
        """``value`` where it holds numbers only and is not private, else a text in its place."""
        if self.keep_text or not (private or _has_text(value)):
            return value
        self.removed[place] = None
        return self._texts.setdefault(frozen(value), f"text {len(self._texts)}")


def _scalar(value: Any) -> bool:
    """A number or a text, or lists of them: nothing that has names or shapes of its own."""
    if isinstance(value, (list, tuple)):
        return all(map(_scalar, value))
    return value is None or isinstance(value, (str, bool, int, float, np.generic))


def _ints(value: Any) -> bool:
    """Integers, and nothing else, in lists, arrays or tensors of any depth."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and not value.is_floating_point() and value.dtype != torch.bool
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.ndim > 0 and value.dtype.kind in "iu"
    if isinstance(value, (list, tuple, np.ndarray)):
        return len(value) > 0 and all(
            _ints(v) or (isinstance(v, (int, np.integer)) and type(v) is not bool) for v in value
        )
    return False


def _is_ids(name: str, array: NDArray[Any]) -> bool:
    """Whether a column holds lists of ids, whatever its name; an empty row is one, too."""
    if name in known.NOT_IDS or name in UIDS or not len(array):
        return False
    if array.dtype.kind in "iu":
        return array.ndim > 1
    rows = list(array) if array.dtype == object else []
    return any(map(_ints, rows)) and all(
        _ints(row) or row is None or (isinstance(row, (list, tuple, np.ndarray)) and not len(row))
        for row in rows
    )


def _has_text(value: Any) -> bool:
    if isinstance(value, str):
        return value not in WORDS
    if isinstance(value, (bool, int, float)) or value is None:
        return False
    if isinstance(value, Mapping):
        return any(_has_text(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_has_text, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "iufb"
    return not isinstance(value, (Tensor, np.generic))


def texts_of(values: Iterable[Any]) -> set[str]:
    """All texts in nested values, for a look at what would be published."""
    found: set[str] = set()
    todo = list(values)
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif isinstance(item, np.ndarray) and item.dtype == object:
            todo += item.reshape(-1).tolist()
    return found
