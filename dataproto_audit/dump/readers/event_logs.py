"""Scalars out of TensorBoard's event files and W&B's offline files; both are rows of messages.

Only numbers under a name are taken: ``simple_value`` and scalar tensors of TensorBoard's
``Event.summary`` (``tensorflow/core/util/event.proto``, ``framework/summary.proto``), and the items
of W&B's ``HistoryRecord`` (``wandb/proto/wandb_internal.proto``), whose values are JSON. Images,
histograms, configurations and system metrics are passed over. What a process that was killed left
unfinished at the end is left out.

Checksums: of W&B's files and of event files up to 16 MiB every record's is verified; of larger
event files only those of the lengths, since TFRecord's checksum takes 0.4 s a MiB in Python.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from dataproto_audit.dump.readers.protobuf import BYTES, FIXED32, FIXED64, VARINT, fields

Step = dict[str, Any]
WANDB = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_CHECKED = 1 << 24
"""Bytes of an event file up to which every record's checksum is verified."""
_FLOAT, _DOUBLE = 1, 2


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum, masked as TFRecord files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(data: bytes) -> bool:
    """Whether the bytes begin as a TFRecord of a small message does."""
    if len(data) < 12:
        return False
    return int.from_bytes(data[8:12], "little") == crc32c(data[:8])


def is_wandb_file(data: bytes) -> bool:
    """Whether the bytes begin as W&B's offline files do, whatever their version."""
    return data[:4] == WANDB[:4]


def event_steps(data: bytes) -> list[Step]:
    """Scalars of a TensorBoard event file, one mapping a step, in order.

    Raises ``ValueError`` for a record whose checksum is wrong, as far as they are verified.
    """
    steps: dict[int, Step] = {}
    for record in _records(data):
        step, found = _event(record)
        if found:
            steps.setdefault(step, {"step": step}).update(found)
    return [steps[step] for step in sorted(steps)]


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        if struct.unpack("<I", data[at + 8 : at + 12])[0] != crc32c(data[at : at + 8]):
            raise ValueError(f"the record at byte {at} has a wrong checksum")
        body = data[at + 12 : at + 12 + size]
        end = at + 12 + size + 4
        if end > len(data):
            return  # cut off while it was written
        if len(data) <= _CHECKED:
            (told,) = struct.unpack("<I", data[end - 4 : end])
            if told != crc32c(body):
                raise ValueError(f"the record at byte {at} has a wrong checksum")
        yield body
        at = end


def _event(record: bytes) -> tuple[int, Step]:
    step, found = 0, {}
    for number, kind, value in fields(record):
        if number == 2 and kind == VARINT and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif number == 5 and isinstance(value, bytes):
            for inner, how, item in fields(value):
                if inner == 1 and how == BYTES and isinstance(item, bytes):
                    found.update(_scalar(item))
    return step, found


def _scalar(message: bytes) -> Step:
    name, number = "", None
    for field, kind, value in fields(message):
        if field == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", "replace")
        elif field == 2 and kind == FIXED32 and isinstance(value, bytes):
            (number,) = struct.unpack("<f", value)
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return {name: number} if name and number is not None else {}


def _tensor(message: bytes) -> float | None:
    """The value of a scalar ``TensorProto``: float_val, double_val, or four or eight raw bytes."""
    dtype = 0
    found: float | None = None
    for field, kind, value in fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            wide = field == 6 or kind == FIXED64 or (field == 4 and dtype == _DOUBLE)
            if dtype in (_FLOAT, _DOUBLE) and len(value) == (8 if wide else 4):
                (found,) = struct.unpack("<d" if wide else "<f", value)
    return found


def wandb_steps(data: bytes) -> list[Step]:
    """Rows of the history in a ``.wandb`` file, one mapping a step, in order.

    Raises ``ValueError`` for another version, or a record whose checksum is wrong.
    """
    if data[:_HEADER] != WANDB:
        raise ValueError("it is of another version of W&B's file format")
    steps: dict[int, Step] = {}
    for record in _wandb_records(data):
        for number, kind, value in fields(record):
            if number == 2 and kind == BYTES and isinstance(value, bytes):
                step, row = _history(value, len(steps))
                steps.setdefault(step, {"step": step}).update(row)
    return [steps[step] for step in sorted(steps)]


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, with zlib's checksum over type and data."""
    at, whole = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        told, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0 and size == 0:  # a block that was not filled
            at += left
            continue
        part = data[at + _HEADER : at + _HEADER + size]
        if len(part) < size:
            return  # cut off while it was written
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise ValueError(f"the record at byte {at} is of unknown type {kind}")
        if told != zlib.crc32(part, zlib.crc32(bytes([kind]))):
            raise ValueError(f"the record at byte {at} has a wrong checksum")
        at += _HEADER + size
        whole = part if kind in (_FULL, _FIRST) else whole + part
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def _history(message: bytes, usual: int) -> tuple[int, Step]:
    step, row = usual, Step()
    for number, kind, value in fields(message):
        if kind != BYTES or not isinstance(value, bytes):
            continue
        if number == 2:
            step = next((v for n, k, v in fields(value) if n == 1 and isinstance(v, int)), 0)
        elif number == 1:
            name, found = _item(value)
            if name == "_step" and isinstance(found, int):
                step = found
            elif isinstance(found, (int, float)) and not isinstance(found, bool):
                row[name] = found
    return step, row


def _item(message: bytes) -> tuple[str, Any]:
    names: list[str] = []
    found: Any = None
    for number, _, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if number in (1, 2):
            names.append(value.decode("utf-8", "replace"))
        elif number == 16:
            try:
                found = json.loads(value)
            except (ValueError, RecursionError):
                found = None
    return "/".join(names), found
