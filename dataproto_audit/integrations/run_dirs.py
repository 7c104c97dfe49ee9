"""Where an attached run writes: the folder that was asked for, or a fresh one beside it.

A job that was restarted, or resumed from a checkpoint, usually comes with the same ``run_dir``.
What the run before it wrote, a crash's trace among it, is what its user needs then: it is kept, and
the new run gets the first free of ``run_dir-2``, ``run_dir-3``... Steps of both are told apart by
their folder. Nothing is ever continued or overwritten here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataproto_audit.atomic import storage_error
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.run_folder import RunFolder, run_files
from dataproto_audit.dump.trace import TRACE_DIR

MOST = 1000
"""Folders that are tried."""
REMEDY = "Name another folder by run_dir= or the variable DATAPROTO_AUDIT_RUN_DIR."


def fresh_folder(path: Path, *, config: Mapping[str, Any]) -> tuple[RunFolder, str]:
    """A folder of a run's own, and why it is not ``path`` itself ('' where it is).

    Raises ``RunError`` DPA802 where the disk refuses, and ``UsageError`` DPA801 where all of
    ``MOST`` folders are taken.
    """
    why = ""
    for place in _places(path):
        if _recorded(place) and not run_files(place):
            why = why or f"{place}: the folder holds a trace."
            continue
        try:
            return RunFolder.create(place, config=config), why
        except UsageError as error:
            if error.code != "DPA801":
                raise
            why = why or error.message
    raise UsageError("DPA801", f"{path}: {MOST} folders of this name are taken.", REMEDY)


def free_folder(path: Path) -> Path:
    """A folder without a run or a trace in it, made if need be: ``path``, or the first one beside.

    Raises ``RunError`` DPA802 where the disk refuses, and ``UsageError`` DPA801 where all of
    ``MOST`` folders are taken.
    """
    for place in _places(path):
        if run_files(place) or _recorded(place):
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            continue  # a file
        except OSError as error:
            raise storage_error(place, error) from error
        return place
    raise UsageError("DPA801", f"{path}: {MOST} folders of this name are taken.", REMEDY)


def _places(path: Path) -> Iterator[Path]:
    if "\0" in str(path):
        raise RunError("DPA802", f"{str(path)!r} is no name of a folder.", REMEDY)
    path = path if path.name else path.absolute()
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in range(2, MOST + 1))


def _recorded(place: Path) -> bool:
    """True for a folder with a trace: of a run without tables nothing else is there."""
    return (place / TRACE_DIR).is_dir()
