"""Boundaries of a trace as batches, so that every command that reads files reads traces, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers.saved import Hint, Saved, parts
from dataproto_audit.dump.trace import Boundary, Trace, named_boundary
from dataproto_audit.dump.trace_read import intact

_NUMBER = re.compile(r"^\d+_")


@dataclass(frozen=True)
class Place:
    """One boundary of a trace, without its fields: ``fields`` counts them."""

    step: int
    name: str
    stage: str
    when: str
    rows: int
    fields: int


def places_of(path: Path, *, step: int | None = None, boundary: str | None = None) -> list[Place]:
    """The boundaries of a trace, of one step, or those that :func:`of_trace` would read."""
    return [
        Place(number, one.name, one.stage, one.when, one.rows, len(one.fields))
        for number, one in _chosen(path, step, boundary)
    ]


def of_trace(path: Path, *, step: int | None = None, boundary: str | None = None) -> list[Saved]:
    """The boundaries of every step, in order; of ``step`` only, or those called ``boundary``.

    A boundary is called by its folder, with or without the number (``10_old_log_prob``,
    ``rollout_before``), or by its stage, which is what left that. A path that is the folder of a
    boundary is that one alone. Raises :class:`UsageError` for a broken trace, ``DPA820`` for a
    step and ``DPA851`` for a boundary that is not there, which list those that are.
    """
    found = []
    for number, one in _chosen(path, step, boundary):
        view = one.view()
        intact(one, view)
        batch = parts(view.tensors, view.arrays, view.meta)
        hint = Hint(one.stage, one.when, step=number)
        opaque = tuple(map(str, one.head.get("opaque") or ()))
        place = f"step {number} {one.name}"
        found.append(Saved(path, place, "trace", batch, hint, opaque=opaque))
    return found


def _chosen(path: Path, step: int | None, boundary: str | None) -> Iterator[tuple[int, Boundary]]:
    trace = Trace(path)
    only, names, any_found = named_boundary(path), [], False
    for number in [step] if step is not None else trace.steps or trace.torn:
        opened = trace.step(number)
        for one in opened.boundaries:
            if only is not None and one.name != only:
                continue
            names.append(one.name)
            if boundary is None or _is_called(one, boundary):
                any_found = True
                yield number, one
        opened.forget()
    if only is not None and not names:
        raise UsageError(
            "DPA820", f"{path} is no boundary of its step.", "Name the step to see those it has."
        )
    if boundary is not None and not any_found:
        known = list(dict.fromkeys(names))
        where = "" if step is None else f" in step {step}"
        more = f", ... ({len(known)} in all)" if len(known) > MOST else ""
        raise UsageError(
            "DPA851", f"{path} has no boundary {boundary!r}{where}.",
            f"It holds: {', '.join(known[:MOST])}{more}.",
        )  # fmt: skip


MOST = 40
"""Names that an error lists."""


def _is_called(one: Boundary, wanted: str) -> bool:
    """By the name of its folder, that without its number, or the stage that it left."""
    plain = _NUMBER.sub("", one.name)
    if wanted in (one.name, plain):
        return True
    return wanted == one.stage and one.when == "after" and not one.part
