"""What a fault is, and the two lists of faults.

``FAULTS`` are those that can be seeded into a live run too: they need nothing but what a stage
hands on, the sampling settings, or the weights that are sent. ``CATALOGUE`` holds them and all
others, which are made in the simulated step; the bench runs the catalogue.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dc_field
from typing import Any, Literal, TypeVar

from dataproto_audit.codes import UsageError

Where = Literal["after_stage", "before_stage", "start", "sampling", "before_sync"]
Apply = TypeVar("Apply", bound=Callable[..., Any])


@dataclass
class Truth:
    """What a fault changed: rows and, for token fields, columns of each row.

    No rows, or no columns, means that none are defined. Rows are positions in the batch at the
    boundary where the fault was made. ``also`` are other answers that are as good.
    """

    field: str
    rows: tuple[int, ...] = ()
    columns: dict[int, tuple[int, ...]] = dc_field(default_factory=dict)
    also: tuple[Truth, ...] = ()


@dataclass(frozen=True)
class Fault:
    """``apply`` makes the fault; ``stage`` is where the error is made, ``field`` where it shows.

    A live fault's ``apply`` changes a batch in place (``after_stage``) or returns the changed
    settings or weights. All others take a :class:`~.scene.Scene`, after the stage, on entering it
    (``before_stage``), or before the step begins (``start``), and return the truth.

    ``stages``, ``fields`` and ``causes`` are accepted answers, the best first. ``levels`` are the
    severities that count as found. ``bases`` name the batches it is tried on, ``options`` what
    those must be changed to. ``lead`` healthy steps come before ``lasts`` steps with the fault.
    ``origin`` lists the public cases it comes from. ``tuned`` is True once a probe was adjusted
    after a look at what it said about this very fault.
    """

    name: str
    stage: str
    where: Where
    field: str
    meaning: str
    apply: Callable[..., Any]
    live: bool = False
    stages: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    levels: tuple[str, ...] = ("fail", "warn")
    bases: tuple[str, ...] = ()
    options: Mapping[str, Any] = dc_field(default_factory=dict)
    lead: int = 0
    lasts: int = 1
    origin: tuple[str, ...] = ()
    tuned: bool = False

    @property
    def cause(self) -> str:
        """The best accepted cause."""
        return self.causes[0] if self.causes else ""


FAULTS: dict[str, Fault] = {}
CATALOGUE: dict[str, Fault] = {}

DEFAULT_BASES = ("plain", "unbalanced", "long")


def _meaning(apply: Callable[..., Any]) -> str:
    return (apply.__doc__ or "").strip().splitlines()[0]


def fault(
    name: str, stage: str, field: str, *, where: Where = "after_stage"
) -> Callable[[Apply], Apply]:
    """Register the decorated function as a live fault; its docstring is the meaning."""

    def register(apply: Apply) -> Apply:
        FAULTS[name] = Fault(name, stage, where, field, _meaning(apply), apply, live=True)
        return apply

    return register


def seeded(
    stage: str,
    *fields: str,
    cause: str | tuple[str, ...],
    stages: tuple[str, ...] = (),
    where: Where = "after_stage",
    bases: tuple[str, ...] = DEFAULT_BASES,
    levels: tuple[str, ...] = ("fail", "warn"),
    options: Mapping[str, Any] | None = None,
    lead: int = 0,
    lasts: int = 1,
    origin: tuple[str, ...] = (),
    tuned: bool = False,
) -> Callable[[Apply], Apply]:
    """Register the decorated function under its own name; ``stages`` are others than ``stage``."""

    def register(apply: Apply) -> Apply:
        name = apply.__name__
        if name in CATALOGUE:
            raise ValueError(f"fault {name!r} is registered already")
        CATALOGUE[name] = Fault(
            name, stage, where, fields[0], _meaning(apply), apply,
            stages=(stage, *stages), fields=fields,
            causes=(cause,) if isinstance(cause, str) else cause,
            levels=levels, bases=bases, options=dict(options or {}), lead=lead, lasts=lasts,
            origin=origin, tuned=tuned,
        )  # fmt: skip
        return apply

    return register


def parse_injection(text: str) -> tuple[Fault, int]:
    """``FAULT@STEP`` as a fault and a step; raises :class:`UsageError` with the list of faults."""
    name, at, step = text.partition("@")
    if name not in FAULTS or not at or not step.isdigit() or int(step) < 1:
        listed = ", ".join(FAULTS)
        near = difflib.get_close_matches(name, FAULTS, 1) if name not in FAULTS else []
        meant = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            "DPA851",
            f"audit.inject={text} is no FAULT@STEP.",
            f"{meant}Faults: {listed}; steps from 1.",
        )
    return FAULTS[name], int(step)
