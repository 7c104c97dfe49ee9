"""Boundaries of a trace as batches, so that every command that reads files reads traces, too."""

from __future__ import annotations

from pathlib import Path

from dataproto_audit.dump.readers.saved import Hint, Saved, parts
from dataproto_audit.dump.trace import Trace
from dataproto_audit.dump.trace_read import intact


def of_trace(path: Path) -> list[Saved]:
    """Every boundary of every step, in order. Raises :class:`UsageError` for a broken trace."""
    trace = Trace(path)
    found = []
    for number in trace.steps or trace.torn:
        step = trace.step(number)
        for boundary in step.boundaries:
            view = boundary.view()
            intact(boundary, view)
            batch = parts(view.tensors, view.arrays, view.meta)
            hint = Hint(boundary.stage, boundary.when, step=number)
            place = f"step {number} {boundary.name}"
            opaque = tuple(map(str, boundary.head.get("opaque") or ()))
            found.append(Saved(path, place, "trace", batch, hint, opaque=opaque))
        step.forget()
    return found
