"""Names of Python's own library that saved batches use, as makers of plain values."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections import OrderedDict
from typing import Any

from dataproto_audit._protocol.safe.errors import RefusedError
from dataproto_audit._protocol.safe.machine import Global, Node
from dataproto_audit._protocol.safe.values import KEYS, Maker, Values


def _bytes_like(values: Values, node: Node) -> bytes:
    """``bytearray(b"..")``, or text and encoding as protocol 2 writes bytes."""
    args = values.value(node.args)
    if not args:
        return b""
    if type(args[0]) is str and tuple(args[1:]) in (("latin1",), ("latin-1",)):
        return args[0].encode("latin1")
    if len(args) != 1 or type(args[0]) is not bytes:  # a number would ask for that many bytes
        raise RefusedError(f"{node.what.path} that is not made of bytes")
    return args[0]


def _bytearray(values: Values, node: Node) -> bytearray:
    return bytearray(_bytes_like(values, node))


def _mapping(values: Values, node: Node) -> dict[Any, Any]:
    """An ``OrderedDict`` (which keeps its type), ``defaultdict`` or ``Counter``."""
    made: dict[Any, Any] = OrderedDict() if node.what.name == "OrderedDict" else {}
    for argument in node.args if node.what.name != "defaultdict" else ():
        given = values.value(argument)
        for key, item in given.items() if isinstance(given, dict) else given:
            if type(key) not in KEYS:
                raise RefusedError(f"a dictionary key of type {type(key).__name__}")
            made[key] = item
    made.update(values.pairs(node.pairs))
    return made


def _sequence(values: Values, node: Node) -> Any:
    """``list``, ``tuple``, ``set``, ``frozenset`` or ``deque`` of one sequence."""
    given = values.value(node.args)
    if given and type(given[0]) not in (list, tuple, set, frozenset):  # a range may be endless
        raise RefusedError(f"{node.what.path} of a {type(given[0]).__name__}")
    items = [*(given[0] if given else ()), *(values.value(item) for item in node.items)]
    if node.what.name in ("set", "frozenset"):
        if not all(type(item) in (int, str, float, bool) for item in items):
            raise RefusedError("a set of other things than numbers and text")
        return set(items) if node.what.name == "set" else frozenset(items)
    return tuple(items) if node.what.name == "tuple" else items


def _complex(values: Values, node: Node) -> complex:
    real, imaginary = values.value(node.args)
    return complex(float(real), float(imaginary))


def _range(values: Values, node: Node) -> Any:
    args = [int(number) for number in values.value(node.args)]
    return slice(*args) if node.what.name == "slice" else range(*args)


def _moment(values: Values, node: Node) -> Any:
    """A date, time, duration or offset; these classes only check and keep numbers."""
    return getattr(datetime, node.what.name)(*values.value(node.args))


def _decimal(values: Values, node: Node) -> decimal.Decimal:
    (text,) = values.value(node.args)
    if type(text) is not str or len(text) > 1000:
        raise RefusedError("a decimal number that is no short text")
    return decimal.Decimal(text)


def _path(values: Values, node: Node) -> str:
    return "/".join(str(part) for part in values.value(node.args))


def _uuid(values: Values, node: Node) -> Any:
    state = values.value(node.state) if node.has_state else {}
    return uuid.UUID(int=state["int"])


def _reconstructor(values: Values, node: Node) -> Any:
    """``copyreg._reconstructor(cls, base, state)``: how protocols 0 and 1 make an instance."""
    if type(node.args) is not tuple or not node.args or type(node.args[0]) is not Global:
        raise RefusedError("an instance of something without a name")
    same = Node("new", node.args[0], ())
    same.state, same.has_state = node.state, node.has_state
    same.items, same.pairs = node.items, node.pairs
    return values.value(same)


def _table(module: str, makers: dict[str, Any], *, state: bool = False) -> dict[Global, Maker]:
    return {Global(module, name): Maker(make, state) for name, make in makers.items()}


CALLS: dict[Global, Maker] = {
    **_table("builtins", dict.fromkeys(("list", "tuple", "set", "frozenset"), _sequence)),
    **_table("builtins", {"bytes": _bytes_like, "bytearray": _bytearray, "complex": _complex}),
    **_table("builtins", {"range": _range, "xrange": _range, "slice": _range}),
    **_table("_codecs", {"encode": _bytes_like}),
    **_table(
        "collections",
        dict.fromkeys(("OrderedDict", "defaultdict", "Counter"), _mapping),
        state=True,
    ),
    **_table("collections", {"deque": _sequence}, state=True),
    **_table(
        "datetime", dict.fromkeys(("datetime", "date", "time", "timedelta", "timezone"), _moment)
    ),
    **_table("decimal", {"Decimal": _decimal}),
    **_table(
        "pathlib", dict.fromkeys(("PosixPath", "WindowsPath", "Path", "PurePosixPath"), _path)
    ),
    **_table("pathlib._local", dict.fromkeys(("PosixPath", "WindowsPath"), _path)),
    **_table("copyreg", {"_reconstructor": _reconstructor}, state=True),
}
INSTANCES: dict[Global, Maker] = _table("uuid", {"UUID": _uuid}, state=True)
