"""Fields of a protobuf message without its schema: numbers and bytes, nothing else.

Wire format: varints, 64-bit, 32-bit and length-delimited fields
(https://protobuf.dev/programming-guides/encoding/). Groups, which nothing writes any more, are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_LONGEST = 10
_SIZES = {FIXED64: 8, FIXED32: 4}


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field: an int for a varint, else its bytes.

    Raises ``ValueError`` for what is no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise ValueError("a field without a number")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError("a field that reaches over the end")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(_LONGEST):
        if at + count >= len(data):
            raise ValueError("a number that reaches over the end")
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + count + 1
    raise ValueError("a number of more than 64 bits")
