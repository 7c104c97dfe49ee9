"""Replacing functions of others and putting every original back.

A function is replaced on the object that its callers look it up on: a module, a class or one
instance. ``undo`` restores what was there; where somebody has replaced ours in the meantime, theirs
stays, and ours below it passes every call on. Of several attachments to one function each may end
first: the last one that ends puts the original back.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from asyncio import get_running_loop
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

log = logging.getLogger("dataproto_audit")

_PATCH = "_dataproto_audit_patch"
"""Attribute of our functions that holds their patch."""
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Around(Protocol):
    """What happens around a call. Neither side may raise but on purpose."""

    def on(self) -> bool:
        """False where the call is none of ours: it is passed on as it is."""
        ...

    def before(self, args: Args, kwargs: Kwargs) -> None:
        """The call is about to be made."""
        ...

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """The call returned ``result``; what is returned goes to the caller instead."""
        ...

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """The call raised ``error``, which goes on to the caller."""
        ...


@dataclass
class _Gate:
    """``around`` until its patch is undone, be that within the call itself."""

    around: Around
    undone: bool = False

    def on(self) -> bool:
        return not self.undone and self.around.on()

    def before(self, args: Args, kwargs: Kwargs) -> None:
        self.around.before(args, kwargs)

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        return result if self.undone else self.around.after(args, kwargs, result)

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        if not self.undone:
            self.around.raised(args, kwargs, error)


@dataclass
class Patch:
    """One replaced attribute."""

    owner: Any
    name: str
    ours: Any
    theirs: Any
    owned: bool
    """True where the attribute was the owner's own, not inherited."""
    gate: _Gate

    def undo(self) -> None:
        """Put the original back, unless somebody else has replaced ours.

        Where ours lies over one of ours that was undone before, that one goes, too.
        """
        self.gate.undone = True
        if vars(self.owner).get(self.name) is not self.ours:
            return
        lowest = self
        while (below := lowest.below()) is not None and below.gate.undone:
            lowest = below
        if lowest.owned:
            setattr(self.owner, self.name, lowest.theirs)
        else:
            delattr(self.owner, self.name)

    def below(self) -> Patch | None:
        """The patch of ours that this one replaced, if it did."""
        found = getattr(self.theirs, _PATCH, None) if self.owned else None
        # A wrapper of somebody else's may have copied the attribute of the function it wraps.
        return found if isinstance(found, Patch) and found.ours is self.theirs else None


@dataclass
class Patches:
    """All replaced attributes of one attachment, undone last first."""

    done: list[Patch] = field(default_factory=list)

    def wrap(self, owner: Any, name: str, around: Around, *, may_be_awaited: bool = False) -> bool:
        """Wrap ``owner.name``; False where there is no such function, or it is wrapped already."""
        original = getattr(owner, name, None)
        if not callable(original) or any(p.owner is owner and p.name == name for p in self.done):
            return False
        own, gate = vars(owner), _Gate(around)
        patch = Patch(owner, name, wrapped(original, gate, may_be_awaited=may_be_awaited),
                      own.get(name), name in own, gate)  # fmt: skip
        setattr(patch.ours, _PATCH, patch)
        setattr(owner, name, patch.ours)
        self.done.append(patch)
        return True

    def undo(self) -> None:
        """Restore every original."""
        while self.done:
            self.done.pop().undo()


def wrapped(
    original: Callable[..., Any], around: Around, *, may_be_awaited: bool = False
) -> Callable[..., Any]:
    """``original`` with ``around``. With ``may_be_awaited`` it may return a coroutine to a caller
    that is one and a value to another; it sees who calls, and what it returns decides."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await _awaiting(original, around, args, kwargs)

        return awaited

    @functools.wraps(original)
    def plain(*args: Any, **kwargs: Any) -> Any:
        awaits = may_be_awaited and _caller_awaits()
        call = partial(_from_coroutine, original) if awaits else original
        if not around.on():
            return call(*args, **kwargs)
        around.before(args, kwargs)
        with _told(around, args, kwargs):
            result = call(*args, **kwargs)
        if awaits and inspect.iscoroutine(result):
            return _awaited(result, around, args, kwargs)
        return around.after(args, kwargs, result)

    return plain


def _from_coroutine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``original`` returns where a coroutine calls it."""

    async def calls() -> Any:
        return original(*args, **kwargs)

    try:
        calls().send(None)
    except StopIteration as done:
        return done.value


async def _awaited(
    coroutine: Coroutine[Any, Any, Any], around: Around, args: Args, kwargs: Kwargs
) -> Any:
    with _told(around, args, kwargs):
        result = await coroutine
    return around.after(args, kwargs, result)


async def _awaiting(
    original: Callable[..., Any], around: Around, args: Args, kwargs: dict[str, Any]
) -> Any:
    if not around.on():
        return await original(*args, **kwargs)
    around.before(args, kwargs)
    return await _awaited(original(*args, **kwargs), around, args, kwargs)


@contextmanager
def _told(around: Around, args: Args, kwargs: Kwargs) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        try:
            around.raised(args, kwargs, error)
        except Exception as ours:  # the same error goes on, whatever becomes of our look at it
            log.error("DPA904 looking at an error of the trainer failed inside dataproto-audit; "
                      "it goes on as it is.", exc_info=ours)  # fmt: skip
        raise


def _caller_awaits() -> bool:
    try:
        get_running_loop()
    except RuntimeError:
        return False
    return bool(sys._getframe(2).f_code.co_flags & inspect.CO_COROUTINE)
