"""What shrinking works on: the boundaries of a step, or one batch, with what was known beside them.

A recording of ``lone`` batches is checked as :func:`dataproto_audit.check` does, which leads each
batch through the stages that it has passed. Any other is audited boundary by boundary, as a live
run is. Batches are in the plain form of the readers: the keys ``batch``, ``non_tensor_batch`` and
``meta_info``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.checker.api import check
from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding, When
from dataproto_audit.probes import Settings

Parts = dict[str, Any]
PARTIAL = "partial"
"""Name in a boundary's evidence: what the batch lacks is missing knowledge, and no finding."""
LONE = "lone"
"""The same: a saved batch on its own, which is led through every stage that it has passed."""
Target = tuple[str, str, str]
"""Code, stage and field: what makes a finding the same one."""


@dataclass(frozen=True)
class Piece:
    """One boundary. ``place`` says where it lies in the file that it comes from."""

    stage: str | None
    when: When
    batch: Parts = field(repr=False)
    evidence: Mapping[str, Any] = field(default_factory=dict, repr=False)
    step: int | None = None
    place: str = ""
    gap: bool = False
    """True where what lies between this boundary and the one before was not seen."""


@dataclass(frozen=True)
class Recording:
    """Boundaries in the order of the run. ``metrics`` are those of the last step, ``partial``
    says that fields may have been left out."""

    pieces: tuple[Piece, ...]
    settings: Settings = field(default_factory=Settings)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    lone: bool = False
    partial: bool = False

    @property
    def view(self) -> BatchView:
        """The batch with the most rows, the last of several: the one that sizes are told of."""
        views = [BatchView.of(piece.batch) for piece in self.pieces]
        return max(reversed(views), key=lambda view: view.rows)


@dataclass(frozen=True)
class Sighting:
    """A finding and the number of the piece that it was made at."""

    piece: int
    finding: Finding

    @property
    def target(self) -> Target:
        """Code, stage and field."""
        return target_of(self.finding)


def target_of(finding: Finding) -> Target:
    """Code, stage and field of a finding."""
    return finding.code, finding.stage, finding.field


def audit(recording: Recording) -> list[Sighting]:
    """Everything that the checks say about a recording, in its order."""
    if recording.lone:
        return _checked(recording)
    auditor = Auditor(recording.settings, on_fail="record")
    found: list[Sighting] = []
    step: Any = object()
    for number, piece in enumerate(recording.pieces):
        if piece.step != step:
            step = piece.step
            auditor.begin_step(step)
        if piece.gap:
            auditor.unseen()
        report = auditor.boundary(
            piece.stage or "rollout", piece.batch, when=piece.when, evidence=piece.evidence,
            partial=recording.partial,
        )  # fmt: skip
        found += [Sighting(number, finding) for finding in report]
    ended = auditor.end_step(recording.metrics)
    return found + [Sighting(len(recording.pieces) - 1, finding) for finding in ended]


def _checked(recording: Recording) -> list[Sighting]:
    """The last batch, with the one before it as the other side of a boundary."""
    *earlier, last = recording.pieces
    before = earlier[-1].batch if earlier else None
    report = check(last.batch, stage=last.stage, before=before, config=recording.settings)
    return [Sighting(len(recording.pieces) - 1, finding) for finding in report]


def piece_of(
    batch: Any,
    stage: str | None = None,
    *,
    when: When = "after",
    evidence: Mapping[str, Any] | None = None,
    step: int | None = None,
    place: str = "",
    gap: bool = False,
) -> Piece:
    """A piece of any form of batch."""
    view = BatchView.of(batch)
    parts = {"batch": dict(view.tensors), "non_tensor_batch": dict(view.arrays),
             "meta_info": dict(view.meta)}  # fmt: skip
    return Piece(stage, when, parts, dict(evidence or {}), step, place, gap)


def loud(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Those of severity fail or warn."""
    return [one for one in sightings if one.finding.severity != "info"]


def find(sightings: Sequence[Sighting], code: str | None, stage: str | None) -> Sighting | None:
    """The first finding with this code, at this stage if one is named; loud ones first.

    Without a code, the first loud one.
    """
    quiet = sightings if code else ()
    hits = [
        one for one in (*loud(sightings), *quiet)
        if code in (None, one.finding.code) and stage in (None, one.finding.stage)
    ]  # fmt: skip
    return hits[0] if hits else None


def names_of(sightings: Iterable[Sighting]) -> list[str]:
    """``DPA302 at old_log_prob`` for each finding."""
    return [f"{one.finding.code} at {one.finding.stage}" for one in sightings]


def no_such(there: Iterable[str], code: str | None, stage: str | None, *, of: str) -> UsageError:
    """The error for a finding that ``of`` does not have; ``there`` are those that it has."""
    wanted = f"no finding {code}" if code else "no finding of severity fail or warn"
    at = f" at stage {stage}" if stage else ""
    listed = ", ".join(sorted(set(there)))
    said = f"Found are {listed}." if listed else "The checks find nothing in it."
    return UsageError("DPA851", f"{of} has {wanted}{at}. {said}", "Name one that it has.")


def with_settings(recording: Recording, **changed: Any) -> Recording:
    """The same recording under other settings."""
    return replace(recording, settings=replace(recording.settings, **changed))
