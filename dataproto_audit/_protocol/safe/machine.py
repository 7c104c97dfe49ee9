"""A machine for pickle's opcodes that builds a tree and calls nothing.

Python's own unpickler calls what the file names. This one writes down *that* a name was called
with such arguments, as a :class:`Node`; ``values.py`` knows a fixed list of names and makes plain
values of them. A call of any other name is refused here, also where its result is thrown away.

Opcodes are cut by ``pickletools``, which only reads. See PEP 307, PEP 574 and ``pickletools.dis``.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from dataproto_audit._protocol.safe.errors import RefusedError

# Names that moved: Python 2's modules as protocol 2 still writes them, and numpy 1's core.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy.core": "numpy._core"}


@dataclass(frozen=True)
class Global:
    """A name of the file: module and name in it. It is never imported."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Dotted name, for messages."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Node:
    """A call or a new object that the file asks for, with what it does to the result.

    ``how`` is ``call`` (REDUCE), ``new`` (NEWOBJ and the older ways of making an instance) or
    ``persistent`` (a reference out of the pickle, as ``torch.save`` writes for storages).
    """

    how: Literal["call", "new", "persistent"]
    what: Global
    args: Any
    state: Any = None
    has_state: bool = False
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Pairs:
    """A dictionary of the file, before its keys are known to be harmless."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Members:
    """A set or frozen set of the file."""

    frozen: bool
    items: list[Any] = field(default_factory=list)


PERSISTENT = Global("torch", "storage")


def _as_global(module: str, name: str) -> Global:
    for old, new in _RENAMED.items():
        if module == old or module.startswith(old + "."):
            module = new + module[len(old) :]
    return Global(module, name)


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, callable_names: Collection[Global], *, persistent: bool) -> None:
        self.callable_names = callable_names
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def step(self, name: str, argument: Any) -> None:
        if name in _PUSHES_ARGUMENT:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif (action := getattr(self, f"op_{name}", None)) is not None:
            action(argument)
        else:
            raise RefusedError(f"the opcode {name}")

    # -- containers ------------------------------------------------------------------------------

    def op_MARK(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def op_POP(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def op_POP_MARK(self, _: Any) -> None:
        self.since_mark()

    def op_DUP(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def op_EMPTY_LIST(self, _: Any) -> None:
        self.stack.append([])

    def op_EMPTY_DICT(self, _: Any) -> None:
        self.stack.append(Pairs())

    def op_EMPTY_SET(self, _: Any) -> None:
        self.stack.append(Members(frozen=False))

    def op_LIST(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def op_TUPLE(self, _: Any) -> None:
        items = tuple(self.since_mark())
        self.stack.append(items)

    def _tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("a tuple of more items than the stack holds")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def op_TUPLE1(self, _: Any) -> None:
        self._tuple_of(1)

    def op_TUPLE2(self, _: Any) -> None:
        self._tuple_of(2)

    def op_TUPLE3(self, _: Any) -> None:
        self._tuple_of(3)

    def op_FROZENSET(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(Members(frozen=True, items=items))

    def op_DICT(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(Pairs(_paired(items)))

    def op_APPEND(self, _: Any) -> None:
        item = self.stack.pop()
        self._extend([item])

    def op_APPENDS(self, _: Any) -> None:
        self._extend(self.since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Node:
            target.items.extend(items)
        else:
            raise RefusedError(f"an append to a {_kind(target)}")

    def op_ADDITEMS(self, _: Any) -> None:
        items, target = self.since_mark(), self.stack[-1]
        if type(target) is not Members:
            raise RefusedError(f"an addition to a {_kind(target)}")
        target.items.extend(items)

    def op_SETITEM(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([(key, value)])

    def op_SETITEMS(self, _: Any) -> None:
        self._set(_paired(self.since_mark()))

    def _set(self, pairs: list[tuple[Any, Any]]) -> None:
        target = self.stack[-1]
        if type(target) is Pairs:
            target.items.extend(pairs)
        elif type(target) is Node:
            target.pairs.extend(pairs)
        else:
            raise RefusedError(f"an item for a {_kind(target)}")

    # -- memo ------------------------------------------------------------------------------------

    def op_MEMOIZE(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def op_PUT(self, slot: int) -> None:
        self.memo[slot] = self.stack[-1]

    op_BINPUT = op_LONG_BINPUT = op_PUT

    def op_GET(self, slot: int) -> None:
        self.stack.append(self.memo[slot])

    op_BINGET = op_LONG_BINGET = op_GET

    # -- names, calls, objects -------------------------------------------------------------------

    def op_GLOBAL(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(_as_global(module, name))

    def op_STACK_GLOBAL(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise RefusedError("a name that is no text")
        self.stack.append(_as_global(module, name))

    def op_REDUCE(self, _: Any) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if type(what) is not Global:
            raise RefusedError(f"a call of a {_kind(what)}")
        if what not in self.callable_names:
            raise RefusedError(f"a call of {what.path}")
        self.stack.append(Node("call", what, args))

    def op_NEWOBJ(self, _: Any) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        self._new(what, args)

    def op_NEWOBJ_EX(self, _: Any) -> None:
        named, args, what = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._new(what, (args, named))

    def op_OBJ(self, _: Any) -> None:
        what, *args = self.since_mark()
        self._new(what, tuple(args))

    def op_INST(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        args = tuple(self.since_mark())
        self._new(_as_global(module, name), args)

    def _new(self, what: Any, args: Any) -> None:
        if type(what) is not Global:
            raise RefusedError(f"an instance of a {_kind(what)}")
        self.stack.append(Node("new", what, args))

    def op_BUILD(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Node or target.how == "persistent":
            raise RefusedError(f"a state for a {_kind(target)}")
        if target.has_state:
            raise RefusedError(f"a second state for {target.what.path}")
        target.state, target.has_state = state, True

    def op_BINPERSID(self, _: Any) -> None:
        if not self.persistent:
            raise RefusedError("the opcode BINPERSID")
        self.stack.append(Node("persistent", PERSISTENT, self.stack.pop()))


_PUSHES_ARGUMENT = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "FLOAT", "BINFLOAT",
))  # fmt: skip
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _kind(value: Any) -> str:
    if type(value) is Global:
        return f"name ({value.path})"
    return {Pairs: "dict", Members: "set", Node: "finished value"}.get(
        type(value), type(value).__name__
    )


def _paired(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))


def run(file: BinaryIO, callable_names: Collection[Global], *, persistent: bool = False) -> Any:
    """Read one pickle from ``file`` and return the tree it describes.

    Only names in ``callable_names`` may be called. ``persistent`` allows references out of the
    pickle. The file is left right after the pickle, whose end is its STOP opcode.

    Errors: :class:`RefusedError`; ``ValueError``, ``IndexError``, ``KeyError`` or ``TypeError``
    for a broken stream.
    """
    machine = _Machine(callable_names, persistent=persistent)
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "STOP":
            if len(machine.stack) != 1 or machine.marks:
                raise ValueError("a pickle that ends with an unfinished stack")
            return machine.stack[0]
        if opcode.name not in ("PROTO", "FRAME"):
            machine.step(opcode.name, argument)
    raise EOFError
