"""What ``replay`` says of a path, as plain data: each step of a trace, or each batch of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.api import check, ordered
from dataproto_audit.checker.config import settings_from
from dataproto_audit.checker.names import nothing_known
from dataproto_audit.checker.own_file import report_of
from dataproto_audit.checker.reached import stages_reached
from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.dump.readers import Saved, is_folder, read_batches, read_folder
from dataproto_audit.dump.trace import Trace, is_trace
from dataproto_audit.dump.trace_delta import own_keys
from dataproto_audit.findings import Report
from dataproto_audit.policy import Policy
from dataproto_audit.probes import Settings
from dataproto_audit.replay.recompute import recomputed
from dataproto_audit.replay.replay import Replay, Replayed, Seen
from dataproto_audit.replay.scorers import Scorers, scorer_of


@dataclass(frozen=True)
class Wanted:
    """How to replay. Everything in it can be sent to another process."""

    recompute: bool = False
    model: str | None = None
    ref_model: str | None = None
    sample: int | None = None
    config: str | None = None
    policy: Policy = field(default_factory=Policy)

    def scorers(self) -> Scorers:
        """The models at hand, loaded once a process."""
        made = Scorers(sample=self.sample)
        if self.model:
            made.policy = scorer_of(self.model)
        if self.ref_model:
            made.reference = scorer_of(self.ref_model)
        return made


@dataclass(frozen=True)
class Work:
    """A part of a path: some steps of a trace, a whole file, or what cannot be read of it."""

    path: str
    steps: tuple[int, ...] | None = None
    errors: tuple[CodedError, ...] = ()


def work_of(path: str | Path, steps: Sequence[int] | None = None, *, parts: int = 1) -> list[Work]:
    """``path`` cut into at most ``parts`` pieces: runs of steps, or the files of a folder."""
    if is_trace(path):
        trace = Trace(path)
        numbers = tuple(steps) if steps else tuple(trace.steps or trace.torn)
        size = max(1, -(-len(numbers) // max(1, parts)))
        cut = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        return [Work(str(path), part) for part in cut]
    if steps:
        raise UsageError("DPA820", f"{path} is no trace.", "--step names steps of a trace.")
    if parts > 1 and is_folder(Path(path)):
        folder = read_folder(path)
        files = dict.fromkeys(str(saved.path) for saved in folder.saved)
        lost = [Work(str(path), errors=folder.unreadable)] if folder.unreadable else []
        return [*(Work(file) for file in files), *lost]
    return [Work(str(path))]


def answers(work: Work, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """One answer a step or batch, one in memory at a time. Raises :class:`UsageError`."""
    for told in attempts(work, wanted):
        if isinstance(told, CodedError):
            raise told
        yield told


def attempts(work: Work, wanted: Wanted) -> Iterator[dict[str, Any] | CodedError]:
    """As :func:`answers`, with what cannot be read told and not raised, after all the others."""
    try:
        yield from _attempts(work, wanted)
    except CodedError as error:
        yield error


def _attempts(work: Work, wanted: Wanted) -> Iterator[dict[str, Any] | CodedError]:
    if work.errors:
        yield from work.errors
        return
    if work.steps is None:
        yield from _of_file(work.path, wanted)
        return
    config = None if wanted.config is None else settings_from(wanted.config, {})[0]
    trace, again = Trace(work.path), Replay(config=config, policy=wanted.policy)
    scorers = wanted.scorers() if wanted.recompute else None
    for number in work.steps:
        made = again.step(trace.step(number))
        yield _told(work.path, made, made.report, scorers, step=number)
        made.step.forget()


def _told(
    path: str, made: Replayed, report: Report, scorers: Scorers | None, **more: Any
) -> dict[str, Any]:
    report = replace(report, findings=ordered(report.findings))
    said = {"path": path, **more, **json.loads(report.to_json())}
    if scorers is None:
        return said
    before = scorers.calls
    compared = recomputed(made, scorers)
    differ = [c for c in compared if c.verdict == "differs"]
    said["ok"] = said["ok"] and not differ
    said["recomputed"] = [c.to_dict() for c in compared]
    said["recomputations"] = scorers.calls - before
    said["missing"] = list(dict.fromkeys(c.missing for c in compared if c.missing))
    return said


# -- files that are no traces ----------------------------------------------------------------------


@dataclass(frozen=True)
class Lone:
    """Stands for the boundary of a stage in a file that holds one batch."""

    stage: str
    row_keys: tuple[str, ...]
    evidence: dict[str, Any]
    when: str = "after"
    part: str = ""
    gap: bool = False
    name: str = ""


def _of_file(path: str, wanted: Wanted) -> Iterator[dict[str, Any] | CodedError]:
    place = Path(path)
    folder = read_folder(place) if is_folder(place) else None
    batches: Sequence[Saved] = read_batches(place) if folder is None else folder.saved
    known = [saved for saved in batches if not nothing_known(BatchView.of(saved.batch))]
    if not known and not (folder and folder.unreadable):
        raise UsageError(
            "DPA857", f"{path} has no field of a batch.", "Name a file of a batch, or a trace."
        )
    scorers = wanted.scorers() if wanted.recompute else None
    for saved in known:
        report = check(saved, config=wanted.config, policy=wanted.policy)
        report.extend(report_of(saved, policy=wanted.policy))
        made = of_batch(saved, wanted.config) if scorers else None
        yield _told(saved.label, made, report, scorers)  # type: ignore[arg-type] # with scorers
    if folder:
        yield from folder.unreadable


def of_batch(saved: Saved, config: Any = None) -> Replayed:
    """One batch as a step that holds every stage which it shows to have passed."""
    view = BatchView.of(saved.batch)
    settings: Settings = settings_from(config, view.meta)[0]
    made = Replayed(None, settings)  # type: ignore[arg-type] # there is no step
    keys = tuple(own_keys(view)())
    for stage in stages_reached(view, settings):
        boundary: Any = Lone(stage, keys, dict(view.meta))
        made.seen.append(Seen(boundary, view, Report()))
    return made


def summed(
    path: str, parts: Sequence[dict[str, Any]], *, unreadable: Sequence[str] = ()
) -> dict[str, Any]:
    """The answers of one path as one document; with ``unreadable`` parts it is not ok."""
    counts: dict[str, int] = {}
    for part in parts:
        for kind, number in part["outcomes"].items():
            counts[kind] = counts.get(kind, 0) + number
    return {
        "path": path,
        "ok": all(part["ok"] for part in parts) and not unreadable,
        "outcomes": counts,
        "steps": len(parts),
        "answers": list(parts),
        **({"unreadable": list(unreadable)} if unreadable else {}),
    }
