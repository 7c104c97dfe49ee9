"""The trace format: names on disk, and how a tensor is stored in fewer bytes without a loss.

``trace/step_000012/04_old_log_prob/{tensors.safetensors, objects.json, boundary.json}``, and
``step.json`` once the step is whole. ``docs/traces.md`` describes every key.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = 2
"""Version of the format. A reader refuses newer ones; older ones stay readable. In 1, each boundary
held all of its meta entries."""
KIND = "dataproto_audit.boundary"
TRACE_DIR = "trace"
TENSORS, OBJECTS, BOUNDARY, STEP = (
    "tensors.safetensors", "objects.json", "boundary.json", "step.json",
)  # fmt: skip
MAX_BOUNDARIES = 10_000
"""Boundaries of one step; a step that claims more is refused."""

STORABLE: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
"""Kinds of number that are stored, by name; a tensor of any other kind is opaque."""

_STEP_NAME = re.compile(r"step_(\d{6,12})")
_BOUNDARY_NAME = re.compile(r"\d{2,4}_[A-Za-z0-9_.-]{1,100}")
_FOREIGN = re.compile(r"[^A-Za-z0-9_.-]")
_INTEGERS = (torch.uint8, torch.int16, torch.int32)
_WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Stored:
    """Where a field lies: ``key`` in the tensors of boundary ``at``, its rows then taken in the
    order of each boundary in ``orders``, one after the other.

    ``kind`` is ``tensor``, ``jagged`` (``key.values`` and ``key.offsets``), ``array`` (numbers of a
    non-tensor field) or ``objects`` (a column of ``objects.json``). ``dtype`` is the logical one.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    at: str
    key: str
    orders: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``boundary.json``."""
        return {**self.__dict__, "shape": list(self.shape), "orders": list(self.orders)}


def step_name(step: int) -> str:
    """``step_000012``."""
    return f"step_{step:06d}"


def step_of_name(name: str) -> int | None:
    """The step of a folder's name; None for other folders."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


def boundary_name(number: int, stage: str, when: str, part: str = "") -> str:
    """``07_old_log_prob`` after the stage, ``06_old_log_prob_before`` on entering it.

    What a folder may not be called is replaced or cut off; ``boundary.json`` has the true names.
    """
    tail = "_before" if when == "before" else ""
    name = f"{stage}{tail}{f'_{part}' if part else ''}"
    return f"{number:02d}_{_FOREIGN.sub('_', name)[:100] or '_'}"


def is_boundary_name(name: Any) -> bool:
    """True for what may be the folder of a boundary; never a path."""
    return isinstance(name, str) and bool(_BOUNDARY_NAME.fullmatch(name))


def step_folder(trace: Path, step: int) -> Path:
    """The folder of a step."""
    return trace / step_name(step)


def dtype_name(dtype: torch.dtype) -> str:
    """``int64``; the name in :data:`STORABLE` where there is one."""
    return str(dtype).removeprefix("torch.")


def narrowed(tensor: Tensor) -> Tensor:
    """``tensor`` in the smallest kind of number that gives every bit back, contiguous.

    Integers by their range; floats that are whole numbers from 0 to 255 as bytes, else in half the
    width where no bit is lost. :func:`widened` is the inverse.
    """
    tensor = tensor.contiguous()
    if not tensor.numel():
        return tensor
    if tensor.dtype in (torch.int64, torch.int32, torch.int16):
        low, high = (int(bound) for bound in torch.aminmax(tensor))
        for dtype in _INTEGERS:
            limits = torch.iinfo(dtype)
            if dtype.itemsize < tensor.dtype.itemsize and limits.min <= low <= high <= limits.max:
                return tensor.to(dtype)
        return tensor
    if tensor.dtype in _WORDS:
        least, most = (float(bound) for bound in torch.aminmax(tensor))  # NaN spreads
        half = torch.bfloat16 if tensor.dtype == torch.float32 else torch.float32
        for dtype in (torch.uint8, half):
            if (dtype != torch.uint8 or (least >= 0 and most <= 255)) and _exact(tensor, dtype):
                return tensor.to(dtype)
    return tensor


def _exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    words = _WORDS[tensor.dtype]
    few = tensor.reshape(-1)[:64]  # most fields show it in their first values
    if not torch.equal(few.to(dtype).to(tensor.dtype).view(words), few.view(words)):
        return False
    return torch.equal(tensor.to(dtype).to(tensor.dtype).view(words), tensor.view(words))


def sum_of(data: Any) -> str:
    """Checksum (CRC-32, 8 hex digits) of bytes or of a tensor's bytes, which sees their order, too.

    It finds damage and edits by hand, and is no protection against somebody who means harm.
    """
    if isinstance(data, Tensor):
        data = data.contiguous().reshape(-1).view(torch.uint8).numpy() if data.numel() else b""
    return f"{zlib.crc32(data):08x}"


def widened(tensor: Tensor, dtype: str) -> Tensor:
    """``tensor`` in its logical kind of number."""
    return tensor.to(STORABLE[dtype])
