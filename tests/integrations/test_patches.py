"""Wrapping and restoring, whoever owns the function and whoever wraps it after us."""

import asyncio
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dataproto_audit.integrations.patches import Patches


class Notes:
    """Writes down what happens."""

    def __init__(self, *, on: bool = True) -> None:
        self.told: list[Any] = []
        self._on = on

    def on(self) -> bool:
        return self._on

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.told.append(("before", args, dict(kwargs)))

    def after(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        self.told.append(("after", result))
        return result

    def raised(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException
    ) -> None:
        self.told.append(("raised", error))


class Thing:
    def double(self, x: int) -> int:
        return 2 * x


def test_a_method_of_one_object_is_wrapped_and_restored() -> None:
    one, other, notes, patches = Thing(), Thing(), Notes(), Patches()
    assert patches.wrap(one, "double", notes)
    assert (one.double(2), other.double(3)) == (4, 6)
    assert notes.told == [("before", (2,), {}), ("after", 4)]
    patches.undo()
    assert vars(one) == {}
    assert one.double(5) == 10
    assert len(notes.told) == 2


def test_a_method_of_a_class_and_an_attribute_of_an_object_are_restored() -> None:
    original, patches = Thing.double, Patches()
    own = SimpleNamespace(f=len)
    patches.wrap(Thing, "double", Notes())
    patches.wrap(own, "f", Notes())
    assert Thing().double(1) == 2
    patches.undo()
    assert Thing.double is original
    assert own.f is len


def test_what_is_not_there_or_wrapped_already_is_left_alone() -> None:
    one, patches = Thing(), Patches()
    assert not patches.wrap(one, "triple", Notes())
    assert patches.wrap(one, "double", Notes())
    assert not patches.wrap(one, "double", Notes())


def test_an_error_goes_on_as_the_same_object() -> None:
    own, notes, patches, error = SimpleNamespace(), Notes(), Patches(), ValueError("no")

    def fail() -> None:
        raise error

    own.f = fail
    patches.wrap(own, "f", notes)
    with pytest.raises(ValueError, match="no") as caught:
        own.f()
    assert caught.value is error
    assert notes.told[-1] == ("raised", error)


def test_what_somebody_else_put_over_ours_stays() -> None:
    own, notes, patches = SimpleNamespace(f=len), Notes(), Patches()
    patches.wrap(own, "f", notes)
    ours = own.f

    def theirs(x: Any) -> Any:
        return ours(x)

    own.f = theirs
    patches.undo()
    assert own.f is theirs
    notes._on = False
    assert own.f("abc") == 3
    assert notes.told == []


def test_switched_off_calls_pass_through() -> None:
    own, notes, patches = SimpleNamespace(f=len), Notes(on=False), Patches()
    patches.wrap(own, "f", notes)
    assert own.f("ab") == 2
    assert notes.told == []


def auto(function: Any) -> Any:
    """As verl's decorator: a coroutine for a caller that awaits, the value for another."""
    import inspect
    import sys

    def wrapper(*args: Any) -> Any:
        awaits = sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE
        return function(*args) if awaits else asyncio.run(function(*args))

    return wrapper


@pytest.mark.parametrize("on", [True, False])
def test_functions_that_look_who_awaits_them(on: bool) -> None:
    async def double(x: int) -> int:
        return 2 * x

    own, notes, patches = SimpleNamespace(f=auto(double), g=double), Notes(on=on), Patches()
    patches.wrap(own, "f", notes, may_be_awaited=True)
    patches.wrap(own, "g", notes)

    async def caller() -> tuple[int, int]:
        return await own.f(3), await own.g(4)

    assert own.f(2) == 4
    assert asyncio.run(caller()) == (6, 8)
    assert len(notes.told) == (6 if on else 0)


@pytest.mark.parametrize("on", [True, False])
def test_a_function_that_never_awaits_is_called_by_coroutines_too(on: bool) -> None:
    own, notes, patches = SimpleNamespace(f=lambda x: 2 * x), Notes(on=on), Patches()
    patches.wrap(own, "f", notes, may_be_awaited=True)

    async def caller() -> Any:
        return own.f(3)

    assert asyncio.run(caller()) == 6
    assert len(notes.told) == (2 if on else 0)


def test_a_patch_undone_within_its_call_is_quiet() -> None:
    notes, patches = Notes(), Patches()
    own = SimpleNamespace(f=patches.undo, g=lambda: (patches.undo(), 1 / 0))
    patches.wrap(own, "f", notes)
    own.f()
    patches.wrap(own, "g", notes)
    with pytest.raises(ZeroDivisionError):
        own.g()
    assert len(notes.told) == 2  # their beginnings


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)]
)
@pytest.mark.parametrize("of_class", [True, False])
def test_several_may_end_in_any_order(order: tuple[int, ...], of_class: bool) -> None:
    original, thing = Thing.double, Thing()
    owner = Thing if of_class else thing
    notes, patches = [Notes() for _ in order], [Patches() for _ in order]
    for note, patch in zip(notes, patches, strict=True):
        patch.wrap(owner, "double", note)
    ended: set[int] = set()
    for place in order:
        assert thing.double(1) == 2
        patches[place].undo()
        ended.add(place)
        before = [len(note.told) for note in notes]
        assert thing.double(1) == 2
        told = [len(note.told) > n for note, n in zip(notes, before, strict=True)]
        assert told == [place not in ended for place in range(3)]
    assert Thing.double is original
    assert vars(thing) == {}


def test_a_stranger_that_copied_our_mark_stays() -> None:
    original, ours, others = Thing.double, Patches(), Patches()
    ours.wrap(Thing, "double", Notes())
    below = Thing.double

    @functools.wraps(below)
    def stranger(self: Thing, x: int) -> int:
        return below(self, x) + 1

    try:
        Thing.double = stranger  # type: ignore[method-assign]
        others.wrap(Thing, "double", Notes())
        ours.undo()
        others.undo()
        assert Thing.double is stranger
        assert Thing().double(1) == 3
    finally:
        Thing.double = original  # type: ignore[method-assign]
