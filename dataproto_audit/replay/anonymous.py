"""A recording that tells nothing of its data: ids renamed one to one, text taken out.

Token ids become small numbers in the order in which they are met; equal ids stay equal, the ids of
padding, stop tokens, tools and images are renamed in the settings, too. Ids outside of the
vocabulary, and negative ones, stay as they are. Row ids become ``u0, u1, ...``; any other text, and
any object that holds some, becomes ``text 0, text 1, ...``, equal ones alike. Numbers stay.

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
        for known in (settings.pad_id, *(settings.stop_ids or ()), *(settings.image_ids or ()),
                      *(settings.tool_ids or ())):  # fmt: skip
            if known is not None:
                self.token(known)

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
        return replace(recording, pieces=pieces, settings=replace(self.settings, **changed))

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
        tensors = {n: self._tensor(n, t) for n, t in batch["batch"].items()}
        arrays = {n: self._column(n, a) for n, a in batch["non_tensor_batch"].items()}
        meta = {n: self._plain(f"meta_info.{n}", v) for n, v in batch["meta_info"].items()}
        evidence = {n: self._plain(f"evidence.{n}", v) for n, v in piece.evidence.items()}
        made = {"batch": tensors, "non_tensor_batch": arrays, "meta_info": meta}
        return replace(piece, batch=made, evidence=evidence, place="")

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        if name not in ID_FIELDS or tensor.is_floating_point() or not tensor.numel():
            return tensor
        flat, back = torch.unique(tensor.reshape(-1), return_inverse=True)
        order: dict[int, None] = dict.fromkeys(tensor.reshape(-1).tolist())
        for token in order:
            self.token(token)
        renamed = torch.tensor([self.token(token) for token in flat.tolist()], dtype=tensor.dtype)
        return renamed[back].reshape(tensor.shape)

    def _column(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind in "iufb" and name != "prompt_ids":
            return array
        out = np.empty(len(array), object)
        for row, value in enumerate(array.tolist()):
            out[row] = self._cell(name, value)
        return out

    def _cell(self, name: str, value: Any) -> Any:
        if name == "prompt_ids" and isinstance(value, (list, tuple)):
            return [self.token(t) if type(t) is int else t for t in value]
        if name in UIDS:
            return self._uids.setdefault(frozen(value), f"u{len(self._uids)}")
        if name == "index" and isinstance(value, (int, str)):
            return self._uids.setdefault(("index", value), f"u{len(self._uids)}")
        return self._plain(f"non_tensor_batch.{name}", value)

    def _plain(self, place: str, value: Any) -> Any:
        """``value`` where it holds numbers only, else a text in its place."""
        if self.keep_text or not _has_text(value):
            return value
        if isinstance(value, Mapping) and place.startswith(("meta_info.", "evidence.")):
            return {key: self._plain(place, item) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and place.startswith("evidence."):
            return type(value)(self._plain(place, item) for item in value)
        self.removed[place] = None
        return self._texts.setdefault(frozen(value), f"text {len(self._texts)}")


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
