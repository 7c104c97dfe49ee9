"""Traces: the recorded boundaries of a run, on disk, safe to open.

::

    with TraceWriter("reports/run/trace", retention="all", settings=vars(settings)) as writer:
        writer.begin_step(12)
        writer.write_boundary("old_log_prob", batch, evidence={"ranks": notes}, report=report)
        writer.end_step()

    trace = Trace("reports/run")
    for boundary in trace.step(12).boundaries:
        view = boundary.view()                 # a BatchView; boundary.view(rows=[3]) reads one row
        boundary.stage, boundary.when, boundary.evidence, boundary.settings, boundary.row_keys

``docs/traces.md`` describes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataproto_audit._protocol.safe.errors import Opaque
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace_format import (
    BOUNDARY,
    SCHEMA,
    TRACE_DIR,
    step_of_name,
)
from dataproto_audit.dump.trace_read import (
    REMEDY,
    Boundary,
    Step,
    broken,
    listed_steps,
    open_step,
)
from dataproto_audit.dump.trace_write import DEFAULT, Retention, TraceWriter

__all__ = [
    "DEFAULT", "SCHEMA", "TRACE_DIR", "Boundary", "Opaque", "Retention", "Step", "Trace",
    "TraceWriter", "find_trace", "is_trace", "named_boundary", "write_step",
]  # fmt: skip


class Trace:
    """The steps of a trace folder, of a run folder that holds one, or of one step's folder.

    ``steps`` are whole; ``torn`` are those that a kill left unfinished, which ``step`` opens only
    when they are asked for by number. Raises :class:`UsageError` DPA820 when there is nothing to
    read.
    """

    def __init__(self, path: str | Path) -> None:
        found = find_trace(Path(path))
        if found is None:
            known = Path(path).exists()
            raise UsageError(
                "DPA820",
                f"{path} holds no trace." if known else f"there is no file or folder {path}.",
                REMEDY if known else "Check the path.",
            )
        self.folder, only = found
        self._listed = listed_steps(self.folder)
        if only is not None:
            self._listed = {only: self._listed[only]}
        self.steps = [number for number, (_, whole) in self._listed.items() if whole]
        self.torn = [number for number, (_, whole) in self._listed.items() if not whole]
        if not self.steps and only is None:
            why = f"its steps {self.torn} are not whole" if self.torn else "it holds no step"
            raise broken(self.folder, why)

    def step(self, number: int) -> Step:
        """One step. Raises :class:`UsageError` for one that was not recorded."""
        if number not in self._listed:
            known = ", ".join(map(str, self.steps)) or "none"
            raise UsageError(
                "DPA820", f"{self.folder} has no step {number}.", f"It holds: {known}."
            )
        folder, whole = self._listed[number]
        return open_step(folder, number, whole=whole)

    def __iter__(self) -> Iterator[Step]:
        """Whole steps in order, one at a time; each is forgotten before the next is read."""
        for number in self.steps or self.torn:
            step = self.step(number)
            yield step
            step.forget()


def find_trace(path: Path) -> tuple[Path, int | None] | None:
    """The trace folder that ``path`` names, and the step if it names one; None for other paths."""
    try:
        if not path.is_dir():
            return None
        whole = Path(os.path.abspath(path))  # a name may be relative, as seen from within a step
        number = step_of_name(whole.name)
        if number is not None:
            return (path if path.name == whole.name else whole).parent, number
        if named_boundary(path):
            return whole.parent.parent, step_of_name(whole.parent.name)
        for folder in (path, path / TRACE_DIR):
            if folder.is_dir() and any(step_of_name(p.name) is not None for p in folder.iterdir()):
                return folder, None
    except OSError as error:
        raise UsageError(
            "DPA820", f"{path} cannot be read: {error.strerror}.", "Check its permissions."
        ) from error
    return None


def named_boundary(path: str | Path) -> str | None:
    """The boundary whose own folder ``path`` is; None for a trace, a step and all else."""
    whole = Path(os.path.abspath(path))
    inside = step_of_name(whole.parent.name) is not None
    return whole.name if inside and (whole / BOUNDARY).is_file() else None


def is_trace(path: str | Path) -> bool:
    """True for a folder that holds recorded steps."""
    return find_trace(Path(path)) is not None


def write_step(
    folder: str | Path,
    step: int,
    batches: Any,
    *,
    settings: Any = None,
    ended: str = "kept",
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Write one whole step at once; ``batches`` are (stage, batch, further arguments) of
    :meth:`TraceWriter.write_boundary`, ``metrics`` what was measured. Returns the trace
    folder. Raises ``RunError`` DPA802.
    """
    with TraceWriter(folder, retention="all", settings=settings) as writer:
        writer.begin_step(step)
        for stage, batch, options in batches:
            writer.write_boundary(stage, batch, **options)
        writer.end_step(ended=ended, metrics=metrics)
    return Path(folder)
