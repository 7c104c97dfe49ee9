"""Reading a run folder: ``open_run(path)``, while the run writes, after a kill, or at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dataproto_audit.codes import UsageError
from dataproto_audit.dump import frames, streams
from dataproto_audit.dump.layout import CONFIG, ENVIRONMENT, SUMMARY, TABLES_DIR
from dataproto_audit.dump.lock import holder_of
from dataproto_audit.dump.schema import SCHEMA_VERSION, TABLES
from dataproto_audit.findings import Finding

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """A run folder, read-only. Tables are read when asked for and kept.

    ``notes`` says in words what a reader should know: that the run did not finish, still runs, or
    lost steps to a power cut.
    """

    def __init__(self, path: Path, tail: streams.Tail | None) -> None:
        self.path = path
        self.tables: Mapping[str, pd.DataFrame] = _Tables(self)
        self._tail = tail
        self._frames: dict[str, pd.DataFrame] = {}
        self._json: dict[str, dict[str, Any]] = {}
        self.notes = self._notes()

    def table(self, name: str, *, validate: bool = True) -> pd.DataFrame:
        """One of the nine tables as pandas, checked by pandera unless told otherwise.

        Raises ``UsageError`` DPA803 for an unknown name or a damaged file.
        """
        if name not in self._frames:
            frame = frames.to_pandas(self.arrow(name), TABLES[name])
            if validate:
                frames.validate(frame, TABLES[name], self.path)
            self._frames[name] = frame
        return self._frames[name]

    def arrow(self, name: str) -> pa.Table:
        """One of the nine tables as arrow, without the checks of pandera."""
        if name not in TABLES:
            raise streams.unreadable(
                self.path, f"no table {name!r}", f"The tables are {', '.join(TABLES)}."
            )
        folder = self.path / TABLES_DIR
        try:
            return streams.read_table(folder, TABLES[name], self._tail)
        except UsageError:
            # The run may have closed, and turned its streams into Parquet, since we looked.
            if not streams.parquet_path(folder, name).exists():
                raise
            return streams.read_table(folder, TABLES[name], None)

    def metric(self, name: str) -> pd.Series:
        """One metric over the steps, indexed by step; empty when it was never written."""
        steps = self.table("steps")
        return steps[steps["metric"] == name].set_index("step")["value"]

    def findings(self) -> list[Finding]:
        """The findings as objects again."""
        return [_finding(row) for row in self.arrow("findings").to_pylist()]

    @property
    def ok(self) -> bool:
        """True when no finding has severity ``fail``."""
        return "fail" not in self.arrow("findings").column("severity").to_pylist()

    @property
    def finished(self) -> bool:
        """True when the run wrote its summary, and no process is going on with it."""
        if not (self.path / SUMMARY).exists():
            return False
        holder = holder_of(self.path)
        return holder is None or holder.alive is False

    @property
    def last_step(self) -> int:
        """The last step in the tables; 0 when there is none."""
        if self._tail is not None and self._tail.last_step is not None:
            return self._tail.last_step
        return max(self.arrow("steps").column("step").to_pylist(), default=0)

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty when the run did not finish."""
        return self._read(SUMMARY) if self.finished else {}

    @property
    def environment(self) -> dict[str, Any]:
        """``environment.json``: versions and machine kind."""
        return self._read(ENVIRONMENT)

    @property
    def config(self) -> dict[str, Any]:
        """``config.yaml`` as written, interpolations not resolved."""
        return self._read(CONFIG)

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._json:
            import yaml

            path = self.path / name
            with streams.reading(path):
                text = path.read_text(encoding="utf-8")
                try:
                    value = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
                except yaml.YAMLError as error:
                    raise streams.unreadable(path, f"not YAML ({error})") from error
                if not isinstance(value, dict):
                    raise streams.unreadable(path, "damaged (a mapping is expected)")
            self._json[name] = value
        return self._json[name]

    def _notes(self) -> list[str]:
        notes = []
        holder = holder_of(self.path)
        if not self.finished:
            running = holder is not None and holder.alive is not False
            notes.append("the run is still going" if running else "the run did not finish")
        if self._tail is not None and self._tail.dropped:
            notes.append(f"the last {self._tail.dropped} steps are not wholly on disk")
        return notes

    def __repr__(self) -> str:
        notes = "".join(f", {note}" for note in self.notes)
        return f"Run({os.fspath(self.path)!r}, step {self.last_step}{notes})"


class _Tables(Mapping[str, "pd.DataFrame"]):
    """The tables of a run by name, read on demand."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in TABLES:
            raise KeyError(name)
        return self._run.table(name)

    def __iter__(self) -> Iterator[str]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder for reading.

    Raises ``UsageError`` DPA803 when the folder is missing, empty, damaged or written by a newer
    version; tables are read, and checked, only when asked for.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "a file, not a run folder" if folder.exists() else "there is no such folder"
        raise streams.unreadable(folder, what)
    tables = folder / TABLES_DIR
    if not streams.has_tables(tables):
        raise _no_run(folder)
    log = tables / streams.COMMITS
    streaming = log.exists()
    try:
        tail = _look(tables, streaming)
    except UsageError:
        if not streaming or log.exists():
            raise
        tail = _look(tables, False)  # the run closed while we looked
    run = Run(folder, tail)
    if (folder / ENVIRONMENT).exists():
        version = run.environment.get("schema", 0)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise streams.too_new(folder / ENVIRONMENT, version)
    return run


def _look(tables: Path, streaming: bool) -> streams.Tail | None:
    """Read the head of each table: is it there, is it ours, is it of a version that we know?"""
    tail = streams.read_tail(tables) if streaming else None
    for spec in TABLES.values():
        next(streams.table_batches(tables, spec, tail), None)
    return tail


def _no_run(folder: Path) -> UsageError:
    runs = sorted(p.name for p in folder.iterdir() if streams.has_tables(p / TABLES_DIR))
    if runs:
        shown = ", ".join(runs[-3:])
        remedy = f"Name one of the {len(runs)} runs in it: {shown}."
        return streams.unreadable(folder, "this folder holds runs but is none", remedy)
    what = "no run in this folder" if any(folder.iterdir()) else "the folder is empty"
    return streams.unreadable(folder, what)


def _finding(row: Mapping[str, Any]) -> Finding:
    columns = {int(r): tuple(c) for r, c in json.loads(row["columns"]).items()}
    return Finding(
        code=row["code"],
        severity=row["severity"],
        stage=row["stage"],
        check=row["check"],
        field=row["field"],
        step=row["step"],
        when=row["when"],
        rows=tuple(json.loads(row["rows"])),
        row_keys=tuple(json.loads(row["row_keys"])),
        columns=columns,
        expected=row["expected"],
        actual=row["actual"],
        evidence=json.loads(row["evidence"]),
        causes=tuple(json.loads(row["causes"])),
        hint=row["hint"],
    )
