"""Files as trackers write them, in memory: TensorBoard's events, W&B's offline log, verl's console.

For tests of readers; written from the format descriptions named in
:mod:`dataproto_audit.dump.readers.event_logs`, one scalar a message.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping

from dataproto_audit.dump.readers.event_logs import WANDB, crc32c

_BLOCK, _HEADER = 32768, 7
Steps = Iterable[Mapping[str, float]]


def event_file(steps: Steps) -> bytes:
    """A TensorBoard event file; each mapping holds ``step`` and values by name."""
    out = [_record(_field(1, 1, struct.pack("<d", 1.0)) + _text(3, b"brain.Event:2"))]
    for step in steps:
        for name, value in step.items():
            if name != "step":
                scalar = _text(1, name.encode()) + _field(2, 5, struct.pack("<f", value))
                event = _varint(2, int(step["step"])) + _text(5, _text(1, scalar))
                out.append(_record(event))
    return b"".join(out)


def wandb_file(steps: Steps) -> bytes:
    """An offline ``.wandb`` file with a history."""
    out = bytearray(WANDB)
    for number, step in enumerate(steps, 1):
        items = b"".join(
            _text(1, _text(1, name.encode()) + _text(16, json.dumps(value).encode()))
            for name, value in step.items() if name != "step"
        )  # fmt: skip
        history = items + _text(2, _varint(1, int(step["step"])))
        _append(out, _varint(1, number) + _text(2, history))
    return bytes(out)


def console_text(steps: Steps, *, prefix: str = "") -> str:
    """What verl prints of its steps, with other lines between them."""
    lines = ["Training Progress:  10%|#         | 1/10 [00:01<00:09]"]
    for step in steps:
        named = [f"{name}:{value!r}" for name, value in step.items() if name != "step"]
        lines.append(prefix + " - ".join([f"step:{int(step['step'])}", *named]))
    return "\n".join(lines) + "\n"


def _append(out: bytearray, data: bytes) -> None:
    """One record, in pieces where it does not fit into what is left of a block."""
    first, rest = True, data
    while rest or first:
        room = _BLOCK - len(out) % _BLOCK
        if room < _HEADER:
            out += bytes(room)
            continue
        part, rest = rest[: room - _HEADER], rest[room - _HEADER :]
        kind = (2 if rest else 1) if first else (3 if rest else 4)
        crc = zlib.crc32(part, zlib.crc32(bytes([kind])))
        out += struct.pack("<IHB", crc, len(part), kind) + part
        first = False


def _record(body: bytes) -> bytes:
    size = struct.pack("<Q", len(body))
    crcs = (struct.pack("<I", crc32c(part)) for part in (size, body))
    return size + next(crcs) + body + next(crcs)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, kind: int, body: bytes) -> bytes:
    return _number(number << 3 | kind) + body


def _varint(number: int, value: int) -> bytes:
    return _field(number, 0, _number(value))


def _text(number: int, body: bytes) -> bytes:
    return _field(number, 2, _number(len(body)) + body)
