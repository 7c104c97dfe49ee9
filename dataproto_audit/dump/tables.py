"""Writing the tables of a run, cheaply: columns buffered in memory, one write per table and step.

::

    with TableWriter(folder) as tables:
        for step in ...:
            tables.append("rows", {"row": np.arange(512), "row_key": keys, "score": scores, ...})
            tables.append_rows("fields", [("rollout", "after", "responses", "i64", ...), ...])
            tables.append_block(all_passed)         # made once with tables.block(...)
            tables.flush_step(step)                   # fills in the step, writes, commits

Everything between two flushes belongs to one step, and is on disk as a whole or not at all (see
:mod:`.streams`). Nothing is synced per step: a kill of the process loses no finished step, a power
cut may lose the last ones. One writer per folder; :mod:`.run_folder` sees to that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataproto_audit.atomic import json_text, storage_error
from dataproto_audit.codes import CodedError, InternalError, RunError, UsageError
from dataproto_audit.dump import streams
from dataproto_audit.dump.columns import Block, from_tuples, make_block, repeated_step
from dataproto_audit.dump.schema import TABLES, Table
from dataproto_audit.findings import Finding

MAX_WAITING_BYTES = 32 << 20
"""Kept in memory while the disk refuses; beyond it whole steps are given up, and counted."""

COMPRESS_FROM = 1024
"""Rows from which a batch is compressed (lz4): below, compressing costs more than writing (0.27 ms
of a step's CPU time for 39 KB of a 69 KB table of 512 rows, which Parquet compresses later)."""

_Part = Block | list[tuple[Any, ...]]


class TableWriter:
    """The tables of one run. ``folder`` is made if missing.

    ``resume`` continues the tables that are there, after dropping the steps behind ``resume_after``
    (None keeps all); without it a folder with tables is refused (``UsageError`` DPA801).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume: bool = False,
        resume_after: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.cpu_s = 0.0
        """CPU seconds of the calling thread spent converting and writing."""
        self.lost_steps = 0
        """Steps that were given up because the disk refused for too long."""
        self._parts: dict[str, list[_Part]] = {name: [] for name in TABLES}
        self._merged: dict[str, tuple[list[Block], tuple[pa.Array, ...]]] = {}
        self._waiting: list[tuple[int, list[bytes]]] = []
        self._running: int | None = None
        self._open = True
        self._buffer = bytearray(1 << 18)
        self._options = None
        if pa.Codec.is_available("lz4"):
            self._options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with self._timed():
            try:
                self._start(resume, resume_after)
            except OSError as error:
                raise storage_error(self.folder, error) from error

    def _start(self, resume: bool, resume_after: int | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not streams.has_tables(self.folder):
            start = streams.create_streams(self.folder)
        elif resume:
            start = streams.reopen(self.folder, after_step=resume_after)
        else:
            raise UsageError(
                "DPA801",
                f"{self.folder}: the folder holds the tables of another run.",
                "Choose another trainer.run_dir, or pass --overwrite.",
            )
        self._last_step, self._ends = start.step, list(start.ends)
        paths = [streams.stream_path(self.folder, name) for name in TABLES]
        paths.append(self.folder / streams.COMMITS)
        self._log_end = paths[-1].stat().st_size
        self._fds = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in paths]

    @property
    def last_step(self) -> int:
        """The last step that was flushed, or found on resuming; 0 when there is none."""
        return self._last_step

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - start

    # -- appending ---------------------------------------------------------------------------------

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows given as columns: sequences or arrays of one length; a scalar is repeated.

        Nullable columns may be left out, ``step`` must be. The values are copied, so arrays may be
        reused at once. Best for many rows; see :meth:`append_rows` for few.
        """
        start = time.thread_time()
        self._parts[table].append(make_block(table, columns))
        self.cpu_s += time.thread_time() - start

    def append_rows(self, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows given as tuples of all columns but ``step``, in the declared order."""
        parts = self._parts[table]
        if parts and isinstance(parts[-1], list):
            parts[-1].extend(rows)
        else:
            parts.append(list(rows))

    def block(self, table: str, columns: Mapping[str, Any]) -> Block:
        """Rows that will be appended again and again, for instance a boundary where all passed."""
        return make_block(table, columns)

    def append_block(self, block: Block) -> None:
        """Add the rows of ``block``: no conversion, and no copy when a step repeats the last."""
        self._parts[block.table].append(block)

    def append_findings(self, findings: Iterable[Finding]) -> None:
        """Add findings; their own ``step`` gives way to the step of the next flush."""
        names = [column.name for column in TABLES["findings"].given]
        rows = []
        for finding in findings:
            values = finding.to_dict()
            rows.append(tuple(
                v if isinstance(v := values[name], str) else json_text(v) for name in names
            ))  # fmt: skip
        if rows:
            self.append_rows("findings", rows)

    def begin_step(self, step: int) -> None:
        """Name the step that runs, so that an exception in it does not lose what was appended."""
        self._running = step

    # -- writing -----------------------------------------------------------------------------------

    def flush_step(self, step: int) -> None:
        """Write what was appended since the last flush as rows of ``step``, and commit the step.

        Several flushes of one step add up. Raises ``RunError`` DPA802 when the disk refuses: the
        tables on disk still end with a whole step, and this step is kept and tried again at the
        next flush or at :meth:`close`.
        """
        with self._timed():
            if not self._open or step < self._last_step:
                state = f"after step {self._last_step}" if self._open else "after close()"
                raise InternalError("DPA903", f"step {step} was flushed {state}.")
            parts, self._parts = self._parts, {name: [] for name in TABLES}
            rows = {name: sum(map(_rows, of_table)) for name, of_table in parts.items()}
            steps = repeated_step(step, max(rows.values()))
            messages = [
                self._message(spec, steps, parts[name]) if rows[name] else b""
                for name, spec in TABLES.items()
            ]
            self._last_step = step
            self._waiting.append((step, messages))
            self._write_waiting()

    def close(self) -> None:
        """Write what waits and turn the streams into Parquet. Rows without a flush are an error.

        Raises ``RunError`` DPA802 when the disk refuses; what was written stays readable. A second
        call does nothing.
        """
        if not self._open:
            return
        self._open = False
        with self._timed():
            try:
                if self._waiting:
                    self._write_waiting()
            finally:
                for fd in self._fds:
                    os.close(fd)
            streams.compact(self.folder)
        if self.lost_steps:
            raise _lost(self.folder, self.lost_steps)
        unflushed = [name for name, parts in self._parts.items() if parts]
        if unflushed:
            names = ", ".join(unflushed)
            raise InternalError("DPA903", f"rows of {names} were appended but never flushed.")

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None = None, *_: object
    ) -> None:
        """Close. When a step was cut short by an exception, its rows are what explains it."""
        try:
            if exc is not None and self._open and any(self._parts.values()):
                running = self._running
                self.flush_step(self._last_step + 1 if running is None else running)
            self.close()
        except CodedError as error:
            if exc is None:
                raise
            exc.add_note(f"The tables could not be closed: {error}")  # the first error matters more

    def abandon(self) -> None:
        """Let go of the files as they are, without closing the run; readers find whole steps."""
        if self._open:
            self._open = False
            for fd in self._fds:
                os.close(fd)

    def _message(self, spec: Table, steps: pa.Array, parts: list[_Part]) -> bytes:
        """One record batch as the bytes of an IPC message."""
        arrays, at = self._merge(spec, parts), spec.step_at
        rows = len(arrays[0])
        columns = [*arrays[:at], steps.slice(0, rows), *arrays[at:]]
        batch = pa.RecordBatch.from_arrays(columns, schema=spec.arrow)
        if self._options is None or rows < COMPRESS_FROM:
            return bytes(batch.serialize())
        try:
            return self._compressed(spec, batch)
        except (OSError, pa.ArrowException):  # the buffer is too small; measuring first costs more
            self._buffer = bytearray(2 * batch.nbytes + (1 << 16))
            return self._compressed(spec, batch)

    def _compressed(self, spec: Table, batch: pa.RecordBatch) -> bytes:
        """``batch`` as a message with lz4 buffers.

        ``serialize`` cannot compress; a stream of one batch can, and its schema message in front is
        cut off again. The buffer is reused, because fresh memory pages cost more than the copy.
        """
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(self._buffer))
        with pa.ipc.new_stream(sink, spec.arrow, options=self._options) as stream:
            stream.write_batch(batch)
            end = sink.tell()
        return bytes(memoryview(self._buffer)[len(spec.schema_message) : end])

    def _merge(self, spec: Table, parts: list[_Part]) -> tuple[pa.Array, ...]:
        blocks = [from_tuples(spec, p) if isinstance(p, list) else p for p in parts]
        if len(blocks) == 1:
            return blocks[0].arrays
        last = self._merged.get(spec.name)
        if last and len(last[0]) == len(blocks) and all(map(_same, last[0], blocks)):
            return last[1]
        arrays = tuple(map(pa.concat_arrays, zip(*(b.arrays for b in blocks), strict=True)))
        self._merged[spec.name] = (blocks, arrays)
        return arrays

    def _write_waiting(self) -> None:
        while self._waiting:
            step, messages = self._waiting[0]
            try:
                self._write(step, messages)
            except OSError as error:
                self._roll_back()
                raise self._refused(error) from error
            del self._waiting[0]

    def _write(self, step: int, messages: Sequence[bytes]) -> None:
        ends = list(self._ends)
        for at, message in enumerate(messages):
            if message:
                _write_all(self._fds[at], message, ends[at])
                ends[at] += len(message)
        line = streams.Commit(step, tuple(ends)).line()
        _write_all(self._fds[-1], line, self._log_end)
        self._ends, self._log_end = ends, self._log_end + len(line)

    def _roll_back(self) -> None:
        """Cut off what a failed write left, so that the streams end with a whole step."""
        for fd, end in zip(self._fds, [*self._ends, self._log_end], strict=True):
            with suppress(OSError):  # left as it is, the rest lies behind what readers look at
                os.ftruncate(fd, end)

    def _refused(self, error: OSError) -> RunError:
        waiting = sum(len(m) for _, messages in self._waiting for m in messages)
        if waiting <= MAX_WAITING_BYTES:
            return storage_error(self.folder, error)
        self.lost_steps += len(self._waiting)
        self._waiting = []
        return _lost(self.folder, self.lost_steps)


def _lost(folder: Path, steps: int) -> RunError:
    what = f"{folder}: the disk refused for too long, and the tables of {steps} steps are lost."
    return RunError("DPA802", what, "Free space; steps written before and after are intact.")


def _rows(part: _Part) -> int:
    return part.rows if isinstance(part, Block) else len(part)


def _same(left: Block, right: Block) -> bool:
    return left is right


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)  # a full disk may take a part before it refuses
        view, offset = view[written:], offset + written
