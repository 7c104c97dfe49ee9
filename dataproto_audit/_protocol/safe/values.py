"""From the tree of a pickle to plain values, through a fixed list of names.

Every name on the list stands for one of our own functions, which checks what it is given. Other
instances become :class:`~dataproto_audit._protocol.safe.errors.Opaque`; calls of other names were
refused when the tree was read. Values that contain themselves, nest deeper than ``MAX_DEPTH`` or
unfold to far more nodes than the file has bytes are refused, because whoever walks them later
would not come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from dataproto_audit._protocol.safe.errors import (
    MAX_DEPTH,
    Budget,
    Opaque,
    RefusedError,
    TooLargeError,
)
from dataproto_audit._protocol.safe.machine import Global, Members, Node, Pairs

ATOMS = frozenset({NoneType, bool, int, float, str, bytes, bytearray})
KEYS = ATOMS - {bytearray}
_TEXTS = frozenset({str, bytes, bytearray})
_FREE_NODES = 1 << 23
_NODES_PER_BYTE = 8
_TEXT_PER_NODE = 256
_LARGEST_KEY = (1 << 61) - 1  # larger integers can be chosen so that their hashes collide


@dataclass(frozen=True)
class Maker:
    """How a named call or instance becomes a value; ``state`` says whether BUILD may follow."""

    make: Callable[[Values, Node], Any]
    state: bool = False


@dataclass(frozen=True)
class Names:
    """The list of names: those that may be called, made as instances, or just mentioned."""

    calls: Mapping[Global, Maker]
    instances: Mapping[Global, Maker]
    constants: Mapping[Global, Any]


class Values:
    """Turns the trees of one file into values. ``storage`` finds what lies outside the pickle."""

    def __init__(
        self, names: Names, budget: Budget, storage: Callable[[Any], Any] | None = None
    ) -> None:
        self.names = names
        self.budget = budget
        self.storage = storage
        self._done: dict[int, tuple[Any, Any, int, int]] = {}
        self._open: set[int] = set()
        self._frames: list[list[int]] = [[0, 0]]  # nodes and height so far, per unfinished value

    def value(self, tree: Any) -> Any:
        """The value of ``tree``; one that occurs twice is made once."""
        if type(tree) in ATOMS:
            self._count(1 + (len(tree) // _TEXT_PER_NODE if type(tree) in _TEXTS else 0), 0)
            return tree
        known = self._done.get(id(tree))
        if known is None:
            if id(tree) in self._open:
                raise RefusedError("a value that contains itself")
            if len(self._frames) > MAX_DEPTH:
                raise TooLargeError(f"its values nest deeper than {MAX_DEPTH} levels")
            self._open.add(id(tree))
            self._frames.append([1, 0])
            made = self._make(tree)
            nodes, height = self._frames.pop()
            self._open.discard(id(tree))
            # The tree is kept, so that its id is not given to another one.
            known = self._done[id(tree)] = (tree, made, nodes, height + 1)
        self._count(known[2], known[3])
        return known[1]

    def _count(self, nodes: int, height: int) -> None:
        frame = self._frames[-1]
        frame[0] += nodes
        frame[1] = max(frame[1], height)
        if frame[1] > MAX_DEPTH:
            raise TooLargeError(f"its values nest deeper than {MAX_DEPTH} levels")
        if frame[0] > _FREE_NODES + _NODES_PER_BYTE * self.budget.file_bytes:
            raise TooLargeError("its values unfold to far more of them than the file holds")

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """A dictionary of these pairs."""
        return {self._key(key): self.value(item) for key, item in pairs}

    def opaque(self, name: str) -> Opaque:
        """Note and return the stand-in for something unknown."""
        self.budget.opaque[name] = None
        return Opaque(name)

    def call(self, what: Any, args: Any) -> Any:
        """What a call of ``what`` with these arguments gives, as for REDUCE."""
        if type(what) is not Global or what not in self.names.calls:
            raise RefusedError(f"a call of {getattr(what, 'path', type(what).__name__)}")
        return self.value(Node("call", what, args))

    def _make(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is list:
            return [self.value(item) for item in tree]
        if kind is tuple:
            return tuple([self.value(item) for item in tree])
        if kind is Pairs:
            return self.pairs(tree.items)
        if kind is Members:
            members = [self._key(item) for item in tree.items]
            return frozenset(members) if tree.frozen else set(members)
        if kind is Global:
            if tree in self.names.constants:
                return self.names.constants[tree]
            return self.opaque(tree.path)
        return self._of_node(tree)

    def _of_node(self, node: Node) -> Any:
        if node.how == "persistent":
            if self.storage is None:
                raise RefusedError("a reference out of the pickle")
            return self.storage(node.args)
        table = self.names.calls if node.how == "call" else self.names.instances
        maker = table.get(node.what)
        if maker is None:
            return self.opaque(node.what.path)
        if node.has_state and not maker.state:
            raise RefusedError(f"a state for {node.what.path}")
        return maker.make(self, node)

    def _key(self, tree: Any) -> Any:
        """A dictionary key or member of a set: plain, and hashed in no time."""
        key = self.value(tree)
        for part in key if type(key) is tuple else (key,):
            if type(part) in KEYS:
                if type(part) is int and abs(part) >= _LARGEST_KEY:
                    raise RefusedError("a dictionary key beyond 61 bits")
            elif not (type(key) is not tuple and getattr(type(key), "__hash__", None)):
                raise RefusedError(f"a dictionary key of type {type(part).__name__}")
        return key
