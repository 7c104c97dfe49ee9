"""Whose loop is at work: verl's own, whose calls come in a known order, or somebody else's.

What happens between two stages is judged in verl's own loop only. A subclass with a loop of its own
may call that of verl inside it (``super().fit()``), wherever it keeps that call; so verl's loop is
wrapped on its class, and for as long as it runs the order is known. Loops that verl itself builds
on its trainers (``SeparateRayPPOTrainer``, ``OneStepOffRayTrainer``) count as others': their steps
are made of parts that are meant to be replaced, and some overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataproto_audit.integrations.patches import Args, Kwargs


class Loop:
    """The loop of one trainer: its method ``name``, which verl defines in ``module``."""

    def __init__(self, trainer: Any, name: str, module: str) -> None:
        self.trainer, self.name = trainer, name
        self.home = next(
            (cls for cls in type(trainer).__mro__ if _is_of(vars(cls).get(name), module)), None
        )
        """The class whose loop is verl's own, if one of the trainer's is."""
        self._others = not _is_of(getattr(trainer, name, None), module)
        self._known = self._inside = 0

    @property
    def own(self) -> bool:
        """True while what happens between the calls is not known."""
        return self._others and not self._known

    @property
    def elsewhere(self) -> bool:
        """True while another trainer trains inside of this one's loop."""
        return self._inside > 0

    def counts(self, trainer: Any, change: int) -> None:
        """verl's own loop begins (1) or ends (-1) for ``trainer``."""
        if trainer is self.trainer:
            self._known += change
        else:
            self._inside += change


class LoopCall:
    """Around verl's own loop, on its class: whose trainer it runs for.

    ``on`` is asked once, before the loop runs, and both sides of the call follow from it.
    """

    def __init__(self, loop: Loop, on: Callable[[], bool]) -> None:
        self.loop, self.on = loop, on

    def before(self, args: Args, kwargs: Kwargs) -> None:
        """It begins."""
        self.loop.counts(args[0] if args else None, 1)

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """It is over."""
        self.loop.counts(args[0] if args else None, -1)
        return result

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """It is over, too."""
        self.loop.counts(args[0] if args else None, -1)


def _is_of(function: Any, module: str) -> bool:
    return getattr(function, "__module__", None) == module
