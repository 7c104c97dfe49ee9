"""One line for a value of unknown origin: numbers as numbers, chats as chats, the rest cut off."""

from __future__ import annotations

import datetime
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataproto_audit.render.text import visible

LONGEST = 200
"""Characters of a value that are shown."""
PART_KINDS = ("text", "image", "video", "audio")
MAX_MESSAGES = 12


class _Short(reprlib.Repr):
    """One line for any value of a file, however large or deep; no names of numpy's or torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxdict = 4, 60, 60, 6

    def repr1(self, x: Any, level: int) -> str:
        return super().repr1(_plain(x), level)

    def repr_ndarray(self, value: Any, level: int) -> str:
        if value.dtype == object and value.ndim == 1:
            return self.repr_list(value.tolist(), level)
        return f"array({value.dtype}, {list(value.shape)})"

    def repr_Tensor(self, value: torch.Tensor, _: int) -> str:
        return f"tensor({dtype_name(value)}, {shape_text(value)})"

    repr_NestedTensor = repr_Tensor

    def repr_dtype(self, value: Any, _: int) -> str:
        return str(value).removeprefix("torch.")

    def repr_date(self, value: Any, _: int) -> str:
        return str(value.isoformat())

    repr_datetime = repr_date


_SHORT = _Short()


def short(value: Any) -> str:
    """One line for a value: cut off, control characters escaped.

    A number is a number whoever made it, ``np.float64(1.5)`` is ``1.5``; a chat of messages with
    ``role`` and ``content`` reads ``user: how many? | assistant: 4``.
    """
    chat = _chat(value)
    text = visible(_SHORT.repr(value) if chat is None else chat)
    return text[:LONGEST].replace("\n", "\\n").replace("\t", "\\t")


def _plain(value: Any) -> Any:
    """numpy's scalars, and tensors and arrays of no axes, as Python's own values."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        plain = value.item()
        return str(value) if isinstance(value, np.datetime64) and _is_date(plain) else plain
    if isinstance(value, torch.Tensor) and not value.is_nested and not value.dim():
        return value.item() if value.device.type != "meta" else value
    return value


def _is_date(value: Any) -> bool:
    return isinstance(value, (datetime.date, datetime.datetime))


def _chat(value: Any) -> str | None:
    """A list of messages, or an object that holds one under ``messages``; None for others."""
    if isinstance(value, Mapping) and set(value) == {"messages"}:
        value = value["messages"]
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if not all(isinstance(one, Mapping) and "role" in one and "content" in one for one in value):
        return None
    said = [f"{one['role']}: {_content(one)}" for one in value[:MAX_MESSAGES]]
    more = [f"{len(value) - MAX_MESSAGES} more"] if len(value) > MAX_MESSAGES else []
    return " | ".join([*said, *more])


def _content(message: Mapping[Any, Any]) -> str:
    """What a message says, its parts in a row; what else it carries is named."""
    content = message["content"]
    if isinstance(content, np.ndarray):
        content = content.tolist()
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
    said = [_part(one) for one in parts[:MAX_MESSAGES]]
    rest = [f"<{name}>" for name in message if name not in ("role", "content") and message[name]]
    return " ".join([*said, *rest])


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part[:LONGEST]
    if part is None:
        return ""
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return str(part["text"])[:LONGEST]
        if part.get("type") in PART_KINDS:
            return f"<{part['type']}>"
    return _SHORT.repr(part)


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def shape_text(tensor: torch.Tensor) -> str:
    """``[4, 6]``; of rows of their own lengths ``[4, 2..6]``."""
    if not tensor.is_nested:
        return str(list(tensor.shape))
    rows: Any = tensor.unbind()
    lengths = [int(row.shape[0]) if row.dim() else 1 for row in rows]
    if not lengths:
        return "[0, j]"
    return f"[{len(lengths)}, {min(lengths)}..{max(lengths)}]"
