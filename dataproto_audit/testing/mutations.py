"""Damaged and hostile variants of files, for fuzzing readers: fixed by a seed, none alike.

Most damage is below a checksum, where it is noticed at once; so archives are also taken apart,
damaged inside and packed again, pickles are damaged at their opcodes, and JSON at its values.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)
_NUMBERS = (b"-1", b"0", b"1e309", b"9" * 40, b"NaN", b"null", b"[]", b"{}", b'""', b"true")
_DEEP = 2000
_OPCODES = (
    b"R", b"b", b"\x81", b"t", b"(", b"0", b"2", b"a", b"Q", b"u", b"N", b"}", b"]",
    b"cos\nsystem\n", b"cbuiltins\neval\n",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One input: what it was made of, how, and its bytes."""

    origin: str
    how: str
    data: bytes


def mutants(seeds: Sequence[tuple[str, bytes]], count: int, *, seed: int = 0) -> Iterator[Mutant]:
    """``count`` damaged variants of named files; the same ones for the same seed."""
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        origin, data = seeds[draw.randrange(len(seeds))]
        other = seeds[draw.randrange(len(seeds))][1]
        how = draw.choice(_KINDS)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            data = _DAMAGE[how](data, other, draw)
        yield Mutant(origin, how, data)


def _flip(data: bytes, _: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _i in range(draw.choice((1, 2, 8, 32))):
        if out:
            at = draw.randrange(len(out))
            out[at] = draw.choice((draw.randrange(256), out[at] ^ (1 << draw.randrange(8)),
                                   draw.choice(EXTREMES)))  # fmt: skip
    return bytes(out)


def _cut(data: bytes, _: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _without(data: bytes, _: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + data[start + draw.choice((1, 4, 64, 1024)) :]


def _repeat(data: bytes, _: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data) + 1)
    part = data[start : start + draw.choice((1, 16, 256))]
    return data[:start] + part * draw.choice((2, 16, 256)) + data[start:]


def _splice(data: bytes, other: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _sizes(data: bytes, _: bytes, draw: random.Random) -> bytes:
    """Four or eight bytes become a size: a small, a huge or a negative one."""
    if len(data) < 8:
        return data
    at = draw.randrange(len(data) - 7)
    size = draw.choice((0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1))
    packed = struct.pack("<Q", size)[: draw.choice((4, 8))]
    return data[:at] + packed + data[at + len(packed) :]


def _inside(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Damage in a member of an archive, with a new checksum; in other files, in their opcodes."""
    start, end = data.find(b"PK\x03\x04"), data.rfind(b"PK\x05\x06")
    if start < 0 or end < 0:
        return _opcodes(data, other, draw)
    try:
        with zipfile.ZipFile(io.BytesIO(data[start : end + 22])) as file:
            members = {name: file.read(name) for name in file.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
        return _flip(data, other, draw)
    if not members:
        return data
    name = draw.choice(sorted(members, key=lambda n: (not n.endswith("data.pkl"), n))[:3])
    damage = _opcodes if name.endswith(".pkl") else draw.choice((_flip, _cut, _repeat))
    members[name] = damage(members[name], other, draw)
    if draw.random() < 0.1:
        members.pop(draw.choice(list(members)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, body in members.items():
            file.writestr(name, body)
    return data[:start] + buffer.getvalue() + data[end + 22 :]


def _opcodes(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Opcodes of a pickle left out, doubled, exchanged or put in."""
    places: list[int] = []
    try:
        places += [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:  # noqa: BLE001 - no pickle up to its end: damaged as far as it is one
        if len(places) < 2:
            return _flip(data, other, draw)
    if len(places) < 3:
        return _flip(data, other, draw)
    cuts = [*places, len(data)]
    ops = [data[a:b] for a, b in pairwise(cuts)]
    at, to = draw.randrange(len(ops)), draw.randrange(len(ops))
    action = draw.randrange(5)
    if action == 0:
        del ops[at]
    elif action == 1:
        ops.insert(to, ops[at])
    elif action == 2:
        ops[at], ops[to] = ops[to], ops[at]
    elif action == 3:
        ops.insert(at, draw.choice(_OPCODES))
    else:
        ops[at:at] = ops[to : to + 8]
    return data[: places[0]] + b"".join(ops)


def _values(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """A value of a JSON line becomes another one, or very deep."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    try:
        row = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _flip(data, other, draw)
    if not isinstance(row, dict) or not row:
        return _flip(data, other, draw)
    name = draw.choice(sorted(row))
    row[name] = "\0value"
    new = draw.choice((*_NUMBERS, b"[" * _DEEP + b"]" * _DEEP, b"[" + b"0," * 5000 + b"0]"))
    lines[at] = json.dumps(row).encode().replace(b'"\\u0000value"', new)
    return b"\n".join(lines)


_DAMAGE = {
    "flip": _flip, "cut": _cut, "without": _without, "repeat": _repeat, "splice": _splice,
    "sizes": _sizes, "inside": _inside, "opcodes": _opcodes, "values": _values,
}  # fmt: skip
_KINDS = (*_DAMAGE, "inside", "inside", "opcodes", "values")
