"""Checking saved files, and the answer as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.api import check, ordered
from dataproto_audit.checker.names import nothing_known
from dataproto_audit.checker.own_file import report_of
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import Saved, is_folder, read_batches, read_folder
from dataproto_audit.dump.readers.metric_logs import is_metric_log, read_history
from dataproto_audit.findings import Report
from dataproto_audit.policy import Policy
from dataproto_audit.reasons import SettingUnknown

UNTOLD = "not recomputed, as nothing says the estimator: give it, as in --config adv_estimator=grpo"
"""Said of advantages, which could be any numbers otherwise."""


@dataclass(frozen=True)
class Checked:
    """One batch of a file, and what the checks said. ``evidence_level`` is what they had to go by:
    ``text`` (no tokens), ``ids`` (token ids alone), ``full`` (masks, log-probs or other values of
    tokens), ``boundary`` (both sides), ``history`` or ``model`` (log-probs recomputed)."""

    label: str
    report: Report
    evidence_level: str
    notes: tuple[str, ...] = ()

    @property
    def untold(self) -> tuple[str, ...]:
        """What was not judged for want of a setting that one option would give."""
        lacking = any(
            one.kind == "not_checkable" and one.check == "advantage_inferred"
            and isinstance(one.reason, SettingUnknown) for one in self.report.outcomes
        )  # fmt: skip
        return (f"advantages: {UNTOLD}",) if lacking else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        said = {"path": self.label, **json.loads(self.report.to_json())}
        more = {"notes": list(self.notes), "untold": list(self.untold)}
        return {**said, "evidence_level": self.evidence_level, **more}


def check_file(
    path: str | PathLike[str],
    *,
    stage: str | None = None,
    before: str | PathLike[str] | None = None,
    history: str | PathLike[str] | None = None,
    model: str | None = None,
    config: str | None = None,
    policy: Policy | None = None,
) -> Iterator[Checked]:
    """Check every batch of a file or folder, as :func:`~dataproto_audit.check` does.

    ``before`` is a file with the batch as it was earlier, ``history`` the metrics of the steps
    before, in any form that :mod:`~dataproto_audit.dump.readers.metric_logs` reads; a ``path`` of
    such a form is checked as a history. Raises :class:`UsageError` for what cannot be read, or
    has not a single field that is known. Of a folder all else is checked first, and what holds
    other things (metrics, models) is passed over.
    """
    if _holds_metrics(Path(path)):
        yield check_history(path, config=config, policy=policy)
        return
    earlier = _only(before) if before is not None else None
    steps = read_history(history) if history is not None else None
    beside = "boundary" if earlier else "history" if steps else ""
    batches, unreadable = _batches(path)
    for saved in batches:
        report = check(
            saved, stage=stage, before=earlier, history=steps, model=model, config=config,
            policy=policy,
        )  # fmt: skip
        report.extend(report_of(saved, policy=policy))
        report.findings[:] = ordered(report.findings)
        notes = (*saved.notes, *(f"not opened: {name}" for name in saved.opaque))
        level = "model" if model else beside or evidence_level(saved)
        yield Checked(saved.label, report, level, notes)
    if unreadable:
        raise unreadable[0]


def _batches(path: str | PathLike[str]) -> tuple[list[Saved], tuple[UsageError, ...]]:
    """What can be checked of a file or folder, and what of a folder could not be read."""
    place = Path(path)
    folder = read_folder(place) if is_folder(place) else None
    found = read_batches(place) if folder is None else folder.saved
    unreadable = folder.unreadable if folder else ()
    known = [saved for saved in found if not nothing_known(BatchView.of(saved.batch))]
    if not known and not unreadable:
        [unknown, *_] = nothing_known(BatchView.of(found[0].batch))
        raise UsageError(
            "DPA857", f"{found[0].label} has no field of a batch, {unknown.actual}.",
            "Name a file of a batch; metrics of steps go to --history.",
        )  # fmt: skip
    return known, unreadable


def check_history(
    path: str | PathLike[str] | None, *, config: str | None = None, policy: Policy | None = None
) -> Checked:
    """Check the metrics of several steps, without a batch. Raises :class:`UsageError`."""
    report = check(None, history=read_history(path or ""), config=config, policy=policy)
    return Checked(str(path), report, "history")


def evidence_level(saved: Saved) -> str:
    """``text``, ``ids`` or ``full``: what a saved batch holds of its tokens."""
    ids = ("prompts", "responses", "input_ids")
    if any(name not in ids for name in saved.tensors):
        return "full"
    return "ids" if saved.tensors else "text"


def _holds_metrics(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_metric_log(file.read(1 << 16))
    except (OSError, ValueError):  # what cannot be read is explained where it is read as a batch
        return False


def _only(path: str | PathLike[str]) -> Saved:
    found = read_batches(path)
    if len(found) != 1:
        raise UsageError("DPA857", f"{path} holds {len(found)} batches.", "Name a file with one.")
    return found[0]


__all__ = ["Checked", "check_file", "check_history", "evidence_level", "read_history"]
