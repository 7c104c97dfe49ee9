"""What ``shrink`` leaves in its folder: the batch, a test, the configuration and the answer."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dataproto_audit.atomic import atomic_write_bytes
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.portable import write_portable
from dataproto_audit.dump.trace import write_step
from dataproto_audit.findings import plain
from dataproto_audit.replay.example import test_source
from dataproto_audit.replay.recording import PARTIAL, Recording
from dataproto_audit.replay.shrink import Shrunk

FILES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".json", ".jsonl", ".py",
                   ".zip", ".parquet", ".md"})  # fmt: skip
BATCH, ANSWER, CONFIG = "batch.safetensors", "shrink.json", "config.json"


def write_shrunk(shrunk: Shrunk, folder: Path) -> dict[str, Any]:
    """Write the shrunk recording and what belongs to it; returns the answer of ``shrink --json``.

    A recording with boundaries becomes a trace, a batch of its own safetensors and JSON. Raises
    :class:`UsageError` for a folder that holds something, ``RunError`` where the disk refuses.
    """
    make_folder(folder)
    answer: dict[str, Any] = {**answer_of(shrunk), "out_dir": str(folder), "test_file": None}
    write_recording(shrunk.recording, folder)
    if shrunk.finding is not None:
        # a stage is a text of the file: it may be long, too
        name = f"test_{re.sub(r'[^a-z0-9]+', '_', _title(shrunk).lower()).strip('_')[:80]}.py"
        atomic_write_bytes(folder / name, test_source(shrunk, name=name).encode())
        answer["test_file"] = str(folder / name)
    write_json(folder / ANSWER, answer)
    return answer


def _title(shrunk: Shrunk) -> str:
    assert shrunk.finding is not None
    return f"{shrunk.finding.code} {shrunk.finding.stage}"


def answer_of(shrunk: Shrunk) -> dict[str, Any]:
    """The stable keys of ``shrink --json``, without where it was written."""
    finding = shrunk.finding
    return {
        "code": finding.code if finding else None,
        "stage": finding.stage if finding else None,
        "field": finding.field if finding else None,
        **shrunk.sizes,
        "predicate_calls": shrunk.calls,
        "minimal": shrunk.minimal,
        "before": shrunk.before,
        "boundaries": [f"{p.when} {p.stage}" for p in shrunk.recording.pieces if p.stage],
        "healthy_twin": shrunk.twin,
        "cpu_s": round(shrunk.cpu_s, 3),
        "finding": finding.to_dict() if finding else None,
    }


def make_folder(folder: Path) -> None:
    """Make an empty folder; raises :class:`UsageError` where it is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unmade(folder, error) from error
    refuse_taken(folder)


def refuse_taken(folder: Path) -> None:
    """Raise as :func:`make_folder` would, and make nothing: for the time before any work.

    A file, and a name with the suffix of one, are no folders: nobody asks for ``batch.pkl/``.
    """
    if folder.is_file() or (folder.suffix in FILES and not folder.exists()):
        what = "is a file" if folder.is_file() else "is the name of a file"
        raise UsageError(
            "DPA851", f"{folder} {what}, and what is written here is a folder.",
            "Name a new folder.",
        )  # fmt: skip
    try:
        above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        taken = next(folder.iterdir(), None) if folder.exists() else None
    except OSError as error:
        raise _unmade(folder, error) from error
    if taken is not None:
        raise UsageError(
            "DPA851", f"{folder} is not empty: it holds {taken.name}.", "Name a new folder."
        )


def _unmade(folder: Path, error: OSError) -> RunError:
    return RunError("DPA802", f"{folder} cannot be made: {error.strerror}.", "Name another folder.")


def refuse_no_parent(target: Path) -> None:
    """Raise :class:`UsageError` where the folder that a file is to be in is not there."""
    if not target.absolute().parent.is_dir():
        raise UsageError("DPA851", f"there is no folder {target.parent}.", "Make it first.")


def write_recording(recording: Recording, folder: Path) -> None:
    """The batches and the settings of a recording."""
    settings = {k: v for k, v in asdict(recording.settings).items() if v is not None}
    write_json(folder / CONFIG, settings)
    if recording.lone:
        for number, piece in enumerate(recording.pieces):
            early = number < len(recording.pieces) - 1
            write_portable(folder / (f"before.{BATCH}" if early else BATCH), piece.batch)
        return
    steps: dict[int, list[Any]] = {}
    for piece in recording.pieces:
        partial = {PARTIAL: True} if recording.partial else {}
        options = {"when": piece.when, "evidence": {**piece.evidence, **partial},
                   "gap": piece.gap}  # fmt: skip
        steps.setdefault(piece.step or 0, []).append((piece.stage, piece.batch, options))
    last = recording.pieces[-1].step or 0
    for step, batches in steps.items():
        told = recording.metrics if step == last else {}
        write_step(folder / "trace", step, batches, settings=settings, metrics=told)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, atomically; numbers that JSON lacks become null."""
    atomic_write_bytes(path, json.dumps(_finite(plain(value)), indent=1).encode() + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
