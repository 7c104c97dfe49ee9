"""The files behind the tables: append-only Arrow streams, the commit log, and Parquet.

While a run writes, ``tables/`` holds one Arrow IPC stream per table (``rows.arrows``) and
``commits.log``. After each step the log gets one line with the step and the length that every
stream has reached. A reader takes the last whole line whose lengths are all on disk and reads each
stream up to there: a kill at any byte leaves whole steps, in all tables alike. At the end the
streams become Parquet (``rows.parquet``), and only when that is durable are they deleted. Where
both exist, Parquet is complete and wins.

Not covered: flipped bits inside a stream that still decode to valid values (Parquet pages carry
checksums, streams do not).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataproto_audit.atomic import atomic_path, atomic_write_bytes, fsync_folder, storage_error
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.schema import SCHEMA_VERSION, TABLES, VERSION_KEY, Table

COMMITS = "commits.log"
_READ = pa.ipc.IpcReadOptions(use_threads=False)
ROW_GROUP = 1 << 16
"""Rows of a Parquet row group, which bounds the memory that compaction needs."""


@dataclass(frozen=True)
class Commit:
    """A finished step and the length in bytes of every stream at its end, in table order."""

    step: int
    ends: tuple[int, ...]

    def line(self) -> bytes:
        """The line of the commit log."""
        return (" ".join(map(str, (self.step, *self.ends))) + "\n").encode()


@dataclass(frozen=True)
class Tail:
    """Where a reader has to stop. ``dropped`` finished steps are not wholly on disk."""

    ends: dict[str, int]
    last_step: int | None = None
    dropped: int = 0


def stream_path(folder: Path, name: str) -> Path:
    """The stream of table ``name``."""
    return folder / f"{name}.arrows"


def parquet_path(folder: Path, name: str) -> Path:
    """The Parquet file of table ``name``."""
    return folder / f"{name}.parquet"


def has_tables(folder: Path) -> bool:
    """True when ``folder`` holds a commit log or any table."""
    paths = [folder / COMMITS]
    for name in TABLES:
        paths += [stream_path(folder, name), parquet_path(folder, name)]
    return any(path.exists() for path in paths)


def remove_tables(folder: Path) -> None:
    """Delete every table file and the commit log; other files stay."""
    (folder / COMMITS).unlink(missing_ok=True)
    for name in TABLES:
        stream_path(folder, name).unlink(missing_ok=True)
        parquet_path(folder, name).unlink(missing_ok=True)


def header() -> bytes:
    """The first line of the commit log: schema version and the order of the tables."""
    return (json.dumps({"schema": SCHEMA_VERSION, "tables": list(TABLES)}) + "\n").encode()


def unreadable(path: Path, why: str, remedy: str = "") -> UsageError:
    """DPA803 about one file or folder."""
    return UsageError("DPA803", f"{path}: {why}.", remedy or "Name a folder written by train.")


def too_new(path: Path, version: Any) -> UsageError:
    """DPA803 about a schema version that this package does not know."""
    return unreadable(
        path,
        f"written with table schema {version}, and this package reads up to {SCHEMA_VERSION}",
        "Upgrade dataproto-audit.",
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what Arrow and the system raise about a damaged file into DPA803."""
    try:
        yield
    except FileNotFoundError as error:
        raise unreadable(path, "the file is missing") from error
    except (pa.ArrowException, OSError, ValueError, MemoryError, EOFError) as error:
        if isinstance(error, UsageError):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "Restore it from a copy; the other tables can be read on their own."
        raise unreadable(path, f"damaged ({first})", remedy) from error


# -- commit log ------------------------------------------------------------------------------------


def read_tail(folder: Path) -> Tail:
    """How far the streams of ``folder`` may be read. Raises ``UsageError`` DPA803."""
    path = folder / COMMITS
    with reading(path):
        first, _, rest = path.read_bytes().partition(b"\n")
        names, commits = _names(path, first), _parse(path, rest)
    sizes = [_size(stream_path(folder, name)) for name in names]
    for back, commit in enumerate(reversed(commits)):
        if len(commit.ends) != len(names):
            raise unreadable(path, f"damaged (step {commit.step} names {len(commit.ends)} tables)")
        if all(end <= size for end, size in zip(commit.ends, sizes, strict=True)):
            return Tail(dict(zip(names, commit.ends, strict=True)), commit.step, dropped=back)
    return Tail(dict.fromkeys(names, 0), None, dropped=len(commits))


def _names(path: Path, first: bytes) -> list[str]:
    if not first:
        raise unreadable(path, "the file is empty")
    declared = json.loads(first)
    if not isinstance(declared, dict) or not isinstance(declared.get("tables"), list):
        raise unreadable(path, "damaged (its first line does not name the tables)")
    version = declared.get("schema")
    if not isinstance(version, int):
        raise unreadable(path, "damaged (its first line has no schema version)")
    if version > SCHEMA_VERSION:
        raise too_new(path, version)
    return [str(name) for name in declared["tables"]]


def _parse(path: Path, body: bytes) -> list[Commit]:
    """All whole lines. What follows the last good line is a torn tail, unless good lines follow."""
    commits: list[Commit] = []
    torn = False
    for line in body.splitlines(keepends=True):
        words = line.split()
        good = line.endswith(b"\n") and len(words) > 1 and all(word.isdigit() for word in words)
        if not good:
            torn = True
        elif torn:
            raise unreadable(path, f"damaged after step {commits[-1].step if commits else 0}")
        else:
            step, *ends = map(int, words)
            commits.append(Commit(step, tuple(ends)))
    return commits


def _size(path: Path) -> int:
    """Length of a stream in bytes; 0 when its Parquet file has taken its place."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # A table that is compacted already can be read whatever the log says about its stream.
        return 1 << 62 if path.with_suffix(".parquet").exists() else 0


# -- reading ---------------------------------------------------------------------------------------


def table_batches(folder: Path, spec: Table, tail: Tail | None) -> Iterator[pa.RecordBatch]:
    """The record batches of one table, from Parquet or the stream, checked and in our columns.

    ``tail`` is needed where streams exist. Raises ``UsageError`` DPA803.
    """
    source = parquet_path(folder, spec.name)
    if source.exists():
        batches = _parquet_batches(source)
    elif tail is None:
        raise unreadable(folder, f"the table {spec.name} is missing")
    else:
        source = stream_path(folder, spec.name)
        batches = _stream_batches(source, tail.ends.get(spec.name, 0))
    with reading(source):
        for batch in batches:
            batch.validate(full=True)
            same = batch.schema.equals(spec.arrow)
            yield batch if same else _conform(source, batch, spec)


def _stream_batches(path: Path, end: int) -> Iterator[pa.RecordBatch]:
    if end == 0:
        return
    # Read message by message, so that the torn tail behind ``end`` is never looked at.
    with (
        pa.OSFile(os.fspath(path), "rb") as file,
        pa.ipc.open_stream(file, options=_READ) as stream,
    ):
        _check_version(path, stream.schema)
        while file.tell() < end:
            try:
                batch = stream.read_next_batch()
            except StopIteration:  # an end-of-stream mark, which our streams do not have
                raise unreadable(path, f"damaged (the stream ends before byte {end})") from None
            yield batch
        if file.tell() != end:
            raise unreadable(path, f"damaged (a batch crosses the end of a step at byte {end})")


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        _check_version(path, file.schema_arrow)
        yield from file.iter_batches(batch_size=ROW_GROUP, use_threads=False)


def _check_version(path: Path, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(VERSION_KEY, b"")
    if not version.isdigit():
        raise unreadable(path, "not a table of this package (it has no schema version)")
    if int(version) > SCHEMA_VERSION:
        raise too_new(path, int(version))


def _conform(path: Path, batch: pa.RecordBatch, spec: Table) -> pa.RecordBatch:
    """``batch`` with exactly our columns; nullable ones that an older writer lacked are empty."""
    arrays = []
    for column in spec.columns:
        at = batch.schema.get_field_index(column.name)
        if at >= 0:
            array = batch.column(at)
        elif column.nullable:
            array = pa.nulls(batch.num_rows, column.arrow)
        else:
            raise unreadable(path, f"the column {column.name} is missing")
        if array.type != column.arrow:
            wanted = f"{array.type}, expected {column.arrow}"
            raise unreadable(path, f"the column {column.name} has the type {wanted}")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=spec.arrow)


def read_table(folder: Path, spec: Table, tail: Tail | None) -> pa.Table:
    """One table of ``folder`` in memory. Raises ``UsageError`` DPA803."""
    return pa.Table.from_batches(table_batches(folder, spec, tail), schema=spec.arrow)


# -- writing ---------------------------------------------------------------------------------------


def create_streams(folder: Path) -> Commit:
    """Start empty streams and the commit log; where they end."""
    for name, spec in TABLES.items():
        try:
            stream_path(folder, name).write_bytes(spec.schema_message)
        except OSError as error:
            raise storage_error(stream_path(folder, name), error) from error
    atomic_write_bytes(folder / COMMITS, header())  # last: without it the folder holds no run
    return Commit(0, tuple(len(spec.schema_message) for spec in TABLES.values()))


def compact(folder: Path) -> None:
    """Turn all streams into Parquet; also finishes a compaction that was cut short.

    Raises ``RunError`` DPA802 when the disk refuses and ``UsageError`` DPA803 when a stream is
    damaged; the streams stay in both cases. The caller holds the run's lock.
    """
    if not (folder / COMMITS).exists():
        return
    tail = read_tail(folder)
    for name, spec in TABLES.items():
        if not parquet_path(folder, name).exists():
            _write_parquet(parquet_path(folder, name), spec, table_batches(folder, spec, tail))
    try:
        for name in TABLES:
            stream_path(folder, name).unlink(missing_ok=True)
        (folder / COMMITS).unlink()
        fsync_folder(folder)
    except OSError as error:
        raise storage_error(folder, error) from error


def _write_parquet(path: Path, spec: Table, batches: Iterable[pa.RecordBatch]) -> None:
    import pyarrow.parquet as pq

    options = {
        "compression": "zstd" if pa.Codec.is_available("zstd") else "none",
        "use_dictionary": [c.name for c in spec.columns if c.repeats] or False,
        "write_page_checksum": True,
    }
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, spec.arrow, **options) as out:
        for group in _grouped(batches):
            out.write_table(group)


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Per-step batches joined to row groups; thousands of tiny groups would make reading slow."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= ROW_GROUP:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def reopen(folder: Path, *, after_step: int | None) -> Commit:
    """Make ``folder`` writable again with the steps up to ``after_step`` (None: all of them).

    Goes through Parquet, so that a kill at any point leaves every table readable: the streams are
    rebuilt beside the Parquet files, which win until they are deleted one by one at the end.
    Returns the last step that is there, 0 for none, and where the streams end.
    """
    if not (folder / COMMITS).exists() and not any(folder.glob("*.parquet")):
        return _start_again(folder)
    compact(folder)
    last, ends = 0, []
    for name, spec in TABLES.items():
        with (
            atomic_path(stream_path(folder, name)) as temporary,
            pa.OSFile(os.fspath(temporary), "wb") as file,
        ):
            file.write(spec.schema_message)
            for batch in table_batches(folder, spec, None):
                if after_step is not None:
                    batch = batch.filter(pc.less_equal(batch.column("step"), after_step))
                if batch.num_rows:
                    last = max(last, pc.max(batch.column("step")).as_py())
                    file.write(batch.serialize())
            ends.append(file.tell())
    commit = Commit(last, tuple(ends))
    atomic_write_bytes(folder / COMMITS, header() + commit.line())
    try:
        for name in TABLES:
            parquet_path(folder, name).unlink()
        fsync_folder(folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    return commit


def _start_again(folder: Path) -> Commit:
    """A run that was killed while it made its streams; anything more is damage, not to be lost."""
    for name, spec in TABLES.items():
        path = stream_path(folder, name)
        if path.exists() and path.stat().st_size > len(spec.schema_message):
            raise unreadable(folder / COMMITS, "the file is missing, and the streams hold rows")
    remove_tables(folder)
    return create_streams(folder)
