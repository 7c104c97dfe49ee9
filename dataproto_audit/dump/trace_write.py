"""The writer of traces: what is kept of a run, and when it reaches the disk.

=============  ====================================================================================
retention      keeps
=============  ====================================================================================
``last:K``     the last K steps in memory; they reach the disk when the run ends or raises. The
               first step with a finding of severity ``fail`` is written at once and stays.
``every:N``    steps whose number is a multiple of N, written boundary by boundary
``failing``    every step with a finding of severity ``fail``, or that the run raised in
``all``        every step, written boundary by boundary
=============  ====================================================================================

A step that was broken off is written in every mode, and so is one that :meth:`TraceWriter.mark`
was called in. A step that begins again under its number goes on where it ended.

Another thread writes. Its queue is bounded by boundaries and bytes: when the disk is slow the
training thread waits, and nothing is left out in silence. An error is raised once, as ``RunError``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataproto_audit.atomic import storage_error
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import RunError
from dataproto_audit.dump.retention import DEFAULT, MODES, Retention
from dataproto_audit.dump.trace_delta import RowKeys, Snapshot, StepDelta
from dataproto_audit.dump.trace_disk import (
    StepFiles,
    listed,
    remove_leftovers,
    remove_step,
    whole_step,
)
from dataproto_audit.findings import Report, When

QUEUE_ITEMS, QUEUE_BYTES = 64, 1 << 30
"""Boundaries, and bytes of their tensors, that may wait for the disk."""


@dataclass
class _Step:
    number: int
    delta: StepDelta = field(default_factory=StepDelta)
    held: list[Snapshot] = field(default_factory=list)
    ended: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
    streamed: bool = False
    marked: bool = False
    """To be written, whatever the retention says."""


class TraceWriter:
    """Records the boundaries of a run under ``folder``; see :mod:`dataproto_audit.dump.trace`.

    ``settings`` are written with every boundary, so that a replay checks as the run did. Recorded
    steps beyond ``after`` are those of a run that was resumed before them, and removed. A recorded
    step of another writer is replaced, with ``append`` it goes on.
    The object is used by one thread. Errors of the disk are raised once, by the call that meets
    them next, as ``RunError`` DPA802; after that nothing is written any more.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        retention: str = DEFAULT,
        settings: Mapping[str, Any] | None = None,
        after: int | None = None,
        append: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.retention = Retention.parse(retention)
        self.settings = dict(settings or {})
        self.after = after
        self.cpu_s = 0.0
        """CPU seconds of the writing thread."""
        self.waited_s = 0.0
        """Seconds that the training thread waited for the disk."""
        self._append = append
        self._gap = False
        self._step: _Step | None = None
        self._last: _Step | None = None
        self._numbers: dict[int, int] = {}  # of the next boundary, by step that has ended
        self._whole: set[int] = set()  # steps that this writer finished
        self._ring: list[_Step] = []
        self._failing_kept = False
        self._error: RunError | None = None
        self._told = False
        self._queue: queue.Queue[Any] = queue.Queue()
        self._room = threading.Condition()
        self._items = self._bytes = 0
        self._thread: threading.Thread | None = None

    # -- recording ---------------------------------------------------------------------------------

    def begin_step(self, step: int | None) -> None:
        """Begin a step; one that is open is ended first."""
        self.end_step()
        self._begun(int(step or 0))

    def _begun(self, number: int) -> _Step:
        self._last, self._gap = None, False
        if self._append and number not in self._numbers:
            self._numbers[number] = len(whole_step(self.folder, number).get("boundaries", ()))
        step = self._step = _Step(number, StepDelta(self._numbers.get(number, 0)))
        step.streamed = self.retention.streams(number)
        return step

    def at_step(self, step: int | None) -> None:
        """Begin ``step`` unless it is the open one; the one that ended last is opened again."""
        last = self._last
        if self._step is None and last is not None and last.number == int(step or 0):
            self._step, self._last = last, None
            self._ring = [other for other in self._ring if other is not last]
        elif self._step is None or self._step.number != int(step or 0):
            self.begin_step(step)

    def mark(self, step: int | None) -> bool:
        """Have ``step`` written when it ends, whatever the retention; False if it is not open."""
        if self._step is None or self._step.number != int(step or 0) or self._error is not None:
            return False
        self._step.marked = True
        return True

    def unseen(self) -> None:
        """Something of the step was left out: the next boundary follows a gap."""
        self._gap = True

    def write_boundary(
        self,
        stage: str,
        batch: Any,
        *,
        when: When = "after",
        part: str = "",
        row_keys: RowKeys = None,
        evidence: Mapping[str, Any] | None = None,
        report: Report | None = None,
        gap: bool = False,
    ) -> str:
        """Record ``batch`` as it entered or left ``stage``; returns the boundary's folder name.

        ``part`` tells batches at one boundary apart (the sides of a union). ``row_keys`` are the
        identities of the rows, or what gives them on demand; default: uid and fingerprint.
        ``report`` is what the checks said. ``gap``: what lies between it and the boundary before
        was not seen (see :meth:`unseen`). Outside :meth:`begin_step` the step is 0.
        """
        self._raise()
        step = self._step or self._begun(0)
        snapshot = step.delta.take(
            stage, BatchView.of(batch), when=when, part=part, row_keys=row_keys,
            evidence=evidence, report=report,
        )  # fmt: skip
        snapshot.settings = self.settings
        if not part:  # parts are beside the chain
            snapshot.gap, self._gap = gap or self._gap, False
        step.failed |= not snapshot.report.ok
        if step.streamed:
            self._put(step.number, snapshot)
        else:
            step.held.append(snapshot)
        return snapshot.name

    def end_step(
        self,
        *,
        failed: bool = False,
        ended: str = "finished",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Close the open step. ``failed`` where something was found that no boundary's report says.

        ``metrics`` are what the run measured in it, ``ended`` is ``broken_off`` where it stopped.
        """
        step, self._step = self._step, None
        if step is None:
            return
        self._last = step
        self._numbers[step.number] = step.delta.number
        step.failed |= failed
        step.ended, step.metrics = ended, {**step.metrics, **(metrics or {})}
        mode, must = self.retention.mode, step.marked or ended == "broken_off"
        if mode == "last" and step.failed and not self._failing_kept:
            self._failing_kept = must = True
        if step.streamed or must or (mode == "failing" and step.failed):
            self._write(step)
        elif mode == "last":
            self._ring.append(step)
            del self._ring[: -self.retention.number]

    def keep(self) -> None:
        """Write what is in memory: it must survive what comes now."""
        for step in self._ring:
            self._write(step)
        self._ring.clear()

    def close(self) -> None:
        """Write what is kept and wait for the disk. Raises ``RunError`` once.

        A step that is still open was broken off: it is written with the boundaries that it has.
        """
        try:
            self.end_step(ended="broken_off")
            if self.retention.mode == "last":
                self.keep()
        finally:
            self._last = None
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
                self._thread = None
        self._raise()

    def flush(self) -> None:
        """Wait until what was handed to the disk is there. Raises ``RunError`` once."""
        with self._room:
            while self._items:
                self._room.wait()
        self._raise()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except RunError as own:
            if error is None:
                raise
            error.add_note(f"The trace is not complete: {own}")  # the cause goes on, not its effect

    # -- the writing thread ------------------------------------------------------------------------

    def _write(self, step: _Step) -> None:
        held, step.held, step.streamed = step.held, [], True  # what comes after goes on there
        for snapshot in held:
            self._put(step.number, snapshot)
        said = _Step(step.number, ended=step.ended, metrics=step.metrics, failed=step.failed)
        self._put(step.number, said)

    def _put(self, number: int, item: Snapshot | _Step) -> None:
        self._raise()
        if self._error is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dpa-trace", daemon=True)
            self._thread.start()
        size, start = item.nbytes if isinstance(item, Snapshot) else 0, time.monotonic()
        with self._room:
            while self._items and (self._items >= QUEUE_ITEMS or self._bytes + size > QUEUE_BYTES):
                self._room.wait()
            self._items, self._bytes = self._items + 1, self._bytes + size
        self.waited_s += time.monotonic() - start
        self._queue.put((number, item, size))

    def _run(self) -> None:
        files: StepFiles | None = None
        last: StepFiles | None = None
        fresh = True
        while (taken := self._queue.get()) is not None:
            number, item, size = taken
            try:
                if self._error is None:
                    if fresh:
                        self._prepare()
                        fresh = False
                    if files is None and last is not None and last.step == number:
                        files = last
                    elif files is None:
                        known = self._append or number in self._whole
                        files = StepFiles(self.folder, number, after=known)
                    if isinstance(item, Snapshot):
                        files.write(item)
                    else:
                        files.finish(item.ended, failed=item.failed, metrics=item.metrics)
                        self._whole.add(number)
                        files, last = None, files
            except RunError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001 - raised again where the training thread asks
                self._error = RunError(
                    "DPA905", f"{self.folder}: {type(error).__name__}: {error}.",
                    "No more is recorded of this run; please report it.",
                )  # fmt: skip
            finally:
                with self._room:
                    self._items, self._bytes = self._items - 1, self._bytes - size
                    self._room.notify()
                self.cpu_s = time.thread_time()

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            for step in [] if self.after is None else listed(self.folder):
                if step > (self.after or 0):
                    remove_step(self.folder, step)
        except OSError as error:
            raise storage_error(self.folder, error) from error

    def _raise(self) -> None:
        if self._error is not None and not self._told:
            self._told = True
            raise self._error


__all__ = ["DEFAULT", "MODES", "Retention", "TraceWriter", "remove_step"]
