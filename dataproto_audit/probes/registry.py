"""Declaring probes. A probe says what it needs; the rest is derived.

A probe runs at its home stages, and again at any later boundary where a field that it needs was
changed, or is seen for the first time. What is missing makes it ``not_checkable`` there, with the
reason derived from the declaration; where ``applies`` returns a reason it is ``not_applicable``.

Needs are written as ``"responses"`` (a field), ``"settings.n"``, ``"evidence.losses"``,
``"history.actor/grad_norm"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import CODES
from dataproto_audit.findings import Finding, Severity
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.scan import Stat
from dataproto_audit.reasons import NotRecorded, SettingUnknown

AT_END = "end of step"
"""Home of probes that look at the metrics of a whole step and at earlier steps, at no batch."""

Run = Callable[[BatchView, Mapping[str, Any], Context], Iterable[Finding]]
Absent = Callable[[BatchView, Context], str]


@dataclass(frozen=True)
class Probe:
    """One registered check. ``every`` runs it at steps 1, 1 + every, 1 + 2 every...

    ``later=False`` keeps it at its home stages: what it says of a field holds only there.
    ``absent`` returns why a batch without one of the fields has no such thing, or ''.
    ``basic`` checks come first at a boundary: what they find, others would explain by other things.
    """

    name: str
    code: str
    run: Run
    stages: tuple[str, ...]
    needs: tuple[str, ...] = ()
    stats: tuple[Stat, ...] = ()
    applies: Callable[[Context], str] | None = None
    severity: Severity = "fail"
    every: int = 1
    later: bool = True
    absent: Absent | None = None
    basic: bool = False

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The row fields among the needs, with those of the statistics."""
        own = [need for need in self.needs if "." not in need]
        return tuple(dict.fromkeys([*own, *(f for stat in self.stats for f in stat.needs)]))

    @cached_property
    def _beside(self) -> tuple[tuple[str, str], ...]:
        """The other needs, as (source, name)."""
        parts = (need.partition(".") for need in self.needs if "." in need)
        return tuple((source, name) for source, _, name in parts)

    def missing(self, view: BatchView, ctx: Context) -> str:
        """Why the probe cannot run here; '' when it can."""
        return self.without_fields(view, ctx.broken) or self.without_knowledge(ctx)

    def without_fields(self, view: BatchView, broken: Mapping[str, str]) -> str:
        """Which fields of the batch are missing or cannot be read; '' for none."""
        absent = [name for name in self.fields if not view.has(name) and name not in broken]
        if absent:
            return f"field not in the batch: {', '.join(absent)}"
        wrong = [f"{name} {broken[name]}" for name in self.fields if name in broken]
        if wrong:
            return f"field breaks its declaration: {', '.join(wrong)}"
        empty = [name for name in self.fields if name in view.empty]
        return f"field without values: {', '.join(empty)}" if empty else ""

    def without_knowledge(self, ctx: Context) -> str:
        """Which settings, evidence or history are missing; '' for none."""
        for source, name in self._beside:
            if source == "settings" and getattr(ctx.settings, name) is None:
                return SettingUnknown.of(name)
            if source == "evidence" and _nothing(ctx.given(name)):
                return NotRecorded.of(name)
            if source == "history" and not ctx.history.get(name):
                return f"no earlier steps of {name}"
        return ""


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


PROBES: dict[str, Probe] = {}


def probe(
    code: str,
    *,
    stages: tuple[str, ...],
    needs: tuple[str, ...] = (),
    stats: tuple[Stat, ...] = (),
    applies: Callable[[Context], str] | None = None,
    severity: Severity = "fail",
    every: int = 1,
    later: bool = True,
    absent: Absent | None = None,
    basic: bool = False,
) -> Callable[[Run], Run]:
    """Register the decorated function as the probe of its own name.

    The function gets ``(view, stats, ctx)`` and yields ``ctx.fail(...)`` for what is wrong;
    yielding nothing means passed. ``code`` is one of the catalogue, or a user's own that does not
    begin with ``DPA``.
    """
    if code.startswith("DPA") and code not in CODES:
        raise ValueError(f"{code} is not in the catalogue; codes of your own begin otherwise")

    def register(run: Run) -> Run:
        name = getattr(run, "__name__", str(run))
        if name in PROBES and PROBES[name].run.__module__ != run.__module__:
            raise ValueError(f"a probe named {name!r} exists already")
        PROBES[name] = Probe(
            name, code, run, stages, needs, stats, applies, severity, every, later, absent, basic
        )
        return run

    return register


Function = TypeVar("Function", bound=Callable[..., Any])


def unchecked(function: Function) -> Function:
    """A reference function without the check of its signature, which costs more than it does.

    For probes at every step only: there the contract has just checked the fields they hand over.
    """
    plain: Function = getattr(function, "__wrapped__", function)
    return plain
