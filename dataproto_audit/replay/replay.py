"""Recorded boundaries checked again, by the auditor that checks a live run.

A trace is replayed step by step with the settings that were recorded with it; the history of
metrics goes on from step to step. Every field that is read whole is compared with the fingerprint
that it had when it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.checker import check, check_union
from dataproto_audit.checker.config import settings_from
from dataproto_audit.checker.entering import check_entering
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.trace import Boundary, Step, Trace
from dataproto_audit.dump.trace_read import broken, intact
from dataproto_audit.findings import Finding, Report
from dataproto_audit.policy import Policy
from dataproto_audit.probes import Settings
from dataproto_audit.replay.of_file import said_of_file
from dataproto_audit.replay.recording import LONE, PARTIAL


@dataclass(frozen=True)
class Seen:
    """One boundary and what the checks said of it."""

    boundary: Boundary
    view: BatchView
    report: Report


@dataclass
class Replayed:
    """One step: its boundaries, what was said at its end, and the settings it was checked with."""

    step: Step
    settings: Settings
    seen: list[Seen] = field(default_factory=list)
    ended: Report = field(default_factory=Report)

    @property
    def report(self) -> Report:
        """Everything that was said of the step."""
        whole = Report()
        for one in self.seen:
            whole.extend(one.report)
        whole.extend(self.ended)
        return whole

    def sighted(self) -> Iterator[tuple[int, Finding]]:
        """Findings with the number of the boundary they were made at."""
        for number, one in enumerate(self.seen):
            yield from ((number, finding) for finding in one.report.findings)
        yield from ((len(self.seen), finding) for finding in self.ended.findings)

    def after(self, stage: str) -> Seen | None:
        """What left ``stage``."""
        return self._find(stage, "after")

    def before(self, stage: str) -> Seen | None:
        """What entered ``stage``: its own boundary, else what left the stage before it.

        Parts, and stages that nobody declared, are beside the chain: they enter nothing.
        """
        own = self._find(stage, "before")
        if own is not None:
            return own
        earlier = None
        for one in self.seen:
            if one.boundary.gap:
                earlier = None
            if one.boundary.stage == stage:
                break
            declared = STAGES.get(one.boundary.stage)
            if declared is not None and not declared.own_input and not one.boundary.part:
                earlier = one
        return earlier

    def _find(self, stage: str, when: str) -> Seen | None:
        found = (s for s in self.seen if (s.boundary.stage, s.boundary.when) == (stage, when))
        return next((s for s in found if not s.boundary.part), None)


def settings_of(recorded: Mapping[str, Any]) -> Settings:
    """Settings as they were recorded; names that this version does not know are left out.

    Raises :class:`UsageError` for a value of a wrong kind.
    """
    return settings_from({k: v for k, v in recorded.items() if k in Settings.known()}, {})[0]


class Replay:
    """Replays the steps of one run in order; keeps the history of metrics between them."""

    def __init__(
        self,
        *,
        config: Settings | None = None,
        policy: Policy | None = None,
        model: Any = None,
    ) -> None:
        self.config = config
        self.policy = replace(policy or Policy(), aliases={})  # recorded fields bear our names
        self.model = model
        self._auditor: Auditor | None = None
        self._hash = ""

    def anew(self) -> Replay:
        """Another one that has seen no step yet."""
        return Replay(config=self.config, policy=self.policy, model=self.model)

    def step(self, step: Step) -> Replayed:
        """Check every boundary of ``step``. Raises :class:`UsageError` for what cannot be read."""
        boundaries = step.boundaries
        if not boundaries:
            raise broken(step.folder, "it holds no boundary")
        hashes = {str(boundary.head.get("config_hash")) for boundary in boundaries}
        if len(hashes) > 1:
            raise broken(step.folder, "boundaries of two runs with other settings are mixed in it")
        auditor = self._of(boundaries[0], hashes.pop())
        made = Replayed(step, auditor.settings)
        auditor.begin_step(step.number)
        metrics: dict[str, Any] = {}
        for boundary in boundaries:
            view = boundary.view()
            lone = boundary.evidence.get(LONE) is True
            if boundary.part or lone or boundary.stage not in STAGES:
                intact(boundary, view)
                alone = self._alone(made, boundary, view)
                alone.extend(said_of_file(boundary, self.policy))
                made.seen.append(Seen(boundary, view, alone))
                continue
            partial = boundary.evidence.get(PARTIAL) is True
            if partial or boundary.gap:  # what happened in between is not known
                auditor.unseen()
            report = auditor.boundary(
                boundary.stage, view, when=boundary.when, evidence=boundary.evidence,
                partial=partial,
            )  # fmt: skip
            intact(boundary, view)
            report.extend(said_of_file(boundary, self.policy))
            made.seen.append(Seen(boundary, view, report))
            told = boundary.evidence.get("metrics")
            metrics |= told if isinstance(told, dict) else {}
        made.ended = auditor.end_step({**metrics, **step.metrics})
        return made

    def _alone(self, made: Replayed, boundary: Boundary, view: BatchView) -> Report:
        """A batch beside the chain: a side of a union, the input of a stage that raised, a file."""
        sides = [s for s in made.seen if s.boundary.part == "left"]
        if boundary.part == "right" and sides:
            return check_union(sides[-1].view, view, config=made.settings)
        if boundary.part == "left":
            return Report()
        if boundary.when == "before":
            stage = boundary.stage
            return check_entering(stage, view, settings=made.settings, policy=self.policy)
        return check(view, config=made.settings, policy=self.policy)

    def _of(self, first: Boundary, mark: str) -> Auditor:
        if self._auditor is None or mark != self._hash:
            settings = self.config or settings_of(first.settings)
            self._auditor = Auditor(settings, on_fail="record", policy=self.policy)
            self._auditor.model = self.model if self.model is not None else False
            self._hash = mark
        return self._auditor


def replay(
    path: str | Path,
    *,
    steps: Sequence[int] | None = None,
    config: Settings | None = None,
    policy: Policy | None = None,
    model: Any = None,
) -> Iterator[Replayed]:
    """Replay the steps of a trace, one in memory at a time. Raises :class:`UsageError`."""
    trace = Trace(path)
    again = Replay(config=config, policy=policy, model=model)
    wanted = trace.steps or trace.torn if steps is None else steps
    if not wanted:
        raise UsageError("DPA820", f"{path} has no step to replay.", "Record one.")
    for number in wanted:
        step = trace.step(number)
        yield again.step(step)
        step.forget()
