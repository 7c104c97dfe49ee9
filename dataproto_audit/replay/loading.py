"""Recordings from what is on disk: traces, run folders, saved batches of any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.config import settings_from
from dataproto_audit.checker.own_file import report_of
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.trace import Boundary, Trace, is_trace
from dataproto_audit.dump.trace_read import intact
from dataproto_audit.probes import Settings
from dataproto_audit.replay.recording import (
    LONE,
    PARTIAL,
    Piece,
    Recording,
    audit,
    find,
    names_of,
    no_such,
    piece_of,
)
from dataproto_audit.replay.replay import settings_of


def recordings(path: str | PathLike[str], *, config: Any = None) -> Iterator[Recording]:
    """One recording for each step of a trace, or for each batch of a file or folder.

    ``config`` wins over what was recorded. Raises :class:`UsageError` for what cannot be read.
    """
    place = Path(path)
    if is_trace(place):
        trace = Trace(place)
        for number in trace.steps or trace.torn:
            step = trace.step(number)
            pieces = [
                piece_of(_checked(b), b.stage, when=b.when, step=number, place=b.name, gap=b.gap,
                         evidence={k: v for k, v in b.evidence.items() if k not in (LONE, PARTIAL)})
                for b in step.boundaries if not b.part
            ]  # fmt: skip
            partial = any(b.evidence.get(PARTIAL) is True for b in step.boundaries)
            lone = any(b.evidence.get(LONE) is True for b in step.boundaries)
            if not pieces:
                continue
            known = step.boundaries[0].settings
            settings = settings_from(config, {})[0] if config is not None else settings_of(known)
            metrics: dict[str, Any] = {}
            for piece in pieces:
                told = piece.evidence.get("metrics")
                metrics |= told if isinstance(told, dict) else {}
            metrics |= step.metrics
            if lone:
                pieces = [replace(pieces[-1], stage=None, evidence={})]
            yield Recording(tuple(pieces), settings, metrics, lone=lone, partial=partial)
            step.forget()
        return
    for saved in read_batches(place):
        settings = settings_from(config, saved.meta)[0] if config is not None else Settings()
        piece = Piece(None, "after", saved.batch, {}, saved.hint.step, saved.label)
        yield Recording((piece,), settings, lone=True)


def _checked(boundary: Boundary) -> BatchView:
    """The batch of a boundary, whose fields have the fingerprints that they were recorded with."""
    view = boundary.view()
    intact(boundary, view)
    return view


def first_of(path: str | PathLike[str], *, config: Any = None) -> Recording:
    """The first recording of ``path``. Raises :class:`UsageError` (``DPA851``) where none is."""
    found = next(recordings(path, config=config), None)
    if found is None:
        raise UsageError("DPA851", f"{path} holds no batch.", "Name a file that holds one.")
    return found


def one_of(path: str | PathLike[str], option: str) -> Recording:
    """The only recording of ``path``. Raises :class:`UsageError` (``DPA851``) for none or more."""
    found = list(islice(recordings(path), 2))
    if len(found) != 1:
        many = "several batches" if found else "no batch"
        raise UsageError(
            "DPA851", f"{option} {path} holds {many}.", "Name a file that holds one batch."
        )
    return found[0]


def recording_with(
    path: str | PathLike[str],
    *,
    code: str | None,
    stage: str | None,
    config: Any = None,
    before: str | PathLike[str] | None = None,
) -> Recording:
    """The first recording of ``path`` that shows the finding; of several batches, the first one.

    Without a code, the first that shows any loud finding. ``before`` is a file with the batch at an
    earlier boundary. Raises :class:`UsageError` (``DPA851``) where none does.
    """
    seen: list[str] = []
    for recording in recordings(path, config=config):
        if before is not None and not recording.lone:
            raise UsageError(
                "DPA851", f"--before {before} goes with a saved batch, and {path} is a trace.",
                "Leave --before out: a trace has its earlier boundaries itself.",
            )  # fmt: skip
        if before is not None:
            earlier = one_of(before, "--before")
            recording = replace(recording, pieces=(*earlier.pieces, *recording.pieces))
        found = audit(recording)
        if find(found, code, stage) is not None:
            return recording
        seen += names_of(found)
    _refuse_of_file(path, code)
    raise no_such(seen, code, stage, of=str(path))


def _refuse_of_file(path: str | PathLike[str], code: str | None) -> None:
    """Raise DPA851 where what ``check`` finds is of the file itself, of which no part can be cut:
    it says how rows of a file compare, and the tokens of a row are not in it."""
    if is_trace(Path(path)):
        return
    found = {f.code for saved in read_batches(path) for f in report_of(saved).findings}
    if found and code in (None, *found):
        raise UsageError(
            "DPA851", f"{path} has {', '.join(sorted(found))}, which is of the file as a whole and "
            "cannot be shrunk.", "See `dataproto-audit check` for its rows.",
        )  # fmt: skip


def predicate_of(function: Callable[[Any], Any]) -> Callable[[Recording], bool]:
    """A predicate on recordings from one on the last batch, in the plain form of the readers."""
    return lambda recording: bool(function(recording.pieces[-1].batch))
