"""The one place where a batch at a stage boundary is checked, measured and recorded.

::

    auditor = Auditor(Settings(n=8, temperature=1.0, ...), tables=writer)
    auditor.begin_step(1)
    auditor.boundary("rollout", batch)            # after the stage; when="before" for its input
    auditor.boundary("update_actor", batch, evidence={"losses": ..., "ranks": ...})
    auditor.end_step({"actor/grad_norm": 0.4})

Levels: ``off`` checks nothing (metrics are still written), ``shape`` checks declarations and row
relations, ``full`` also runs the probes. An error inside this package never reaches the training
loop: it becomes a ``DPA9xx`` finding once and switches off the check.
"""

from __future__ import annotations

import logging
import numbers
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import RunError
from dataproto_audit.contracts.check import (
    Violation,
    missing_fields,
    unchecked,
    unreadable,
    wrong_fields,
)
from dataproto_audit.contracts.stages import Stage, declared
from dataproto_audit.contracts.trail import Crossing, Trail
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.findings import (
    AuditError,
    Finding,
    OutcomeKind,
    Report,
    When,
    at_boundary,
)
from dataproto_audit.policy import Policy
from dataproto_audit.probes import PROBES, Context, Probe, Settings
from dataproto_audit.probes.recorder import StepRecorder
from dataproto_audit.probes.registry import AT_END
from dataproto_audit.probes.runner import Due, run_probes
from dataproto_audit.probes.schedule import Schedule
from dataproto_audit.verdicts import finding_of, outcome_of, own_fault

Level = Literal["off", "shape", "full"]
OnFail = Literal["raise", "warn", "record"]

LEVELS: tuple[Level, ...] = ("off", "shape", "full")
ON_FAIL: tuple[OnFail, ...] = ("raise", "warn", "record")
HISTORY = 200
"""Steps of each metric kept for probes that look back."""
MAX_FINDINGS = 1000
"""Findings kept as objects; all of them are counted, and written to the tables."""

__all__ = ["LEVELS", "ON_FAIL", "Auditor", "Level", "OnFail", "Settings"]

log = logging.getLogger("dataproto_audit")


class Auditor:
    """Checks every boundary of a run and keeps its totals.

    ``tables`` receives the records of each step and ``trace`` its batches; without them nothing is
    written. ``on_fail`` says what a finding of severity ``fail`` does: ``raise`` AuditError,
    ``warn`` through logging, or ``record``. ``policy`` leaves out codes and sets severities.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        level: Level = "full",
        on_fail: OnFail = "raise",
        tables: TableWriter | None = None,
        trace: TraceWriter | None = None,
        probes: Mapping[str, Probe] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self.settings, told = settings or Settings(), self.policy.tolerances
        if told:
            self.settings = replace(
                self.settings,
                log_prob_token=told.get("log_prob_token", self.settings.log_prob_token),
                log_prob_mean=told.get("log_prob_mean", self.settings.log_prob_mean),
            )
        self.level: Level = level
        self.on_fail: OnFail = on_fail
        self.recorder = StepRecorder(tables, trace)
        self.probes = dict(PROBES if probes is None else probes)
        self.history: dict[str, list[float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.severities: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.boundaries = 0
        self.stages: list[str] = []
        self.fired: set[str] = set()
        """Checks that ran to a verdict at least once."""
        self.cpu_s = 0.0
        self.step: int | None = None
        self.model: Any = False
        """A model, or the folder of one, that probes may recompute log-probs with."""
        self._off: set[str] = set()
        self._schedule = Schedule(self.probes)
        self._reset()

    def _reset(self) -> None:
        self._trail = Trail(self.settings)
        self._reported: dict[str, str] = {}
        self._metrics: dict[str, float] = {}
        self._cache: dict[Any, Any] = {}

    @property
    def undeclared(self) -> set[str]:
        """Fields that were met and that nothing declares; they are allowed."""
        return self._schedule.undeclared

    # -- one step ----------------------------------------------------------------------------------

    def begin_step(self, step: int | None) -> None:
        """Start a step: nothing is carried over but the history of metrics."""
        self.step = step
        self._reset()

    def end_step(self, metrics: Mapping[str, Any] | None = None) -> Report:
        """Close the step: its metrics are checked and join the history, its tables are written.

        Raises :class:`AuditError` as :meth:`boundary` does.
        """
        start = time.thread_time()
        report = Report()
        for name, value in (metrics or {}).items():
            if isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:
                self._metrics[name] = float(value)
        if self.level == "full":
            told = {**self._metrics, **(metrics or {})}
            context = self._context(AT_END, "after", {"metrics": told})
            due, nothing = self._schedule.at_end(self._off), BatchView({}, {}, {})
            self._guarded("DPA901", "probes", report, self._run, due, nothing, context, report)
            self.policy.apply(report)
            report.findings[:] = [replace(f, step=self.step) for f in report.findings]
            self._guarded("DPA903", "tables", report, self.recorder.said, AT_END, "after", report)
            self._count(report)
        for name, number in self._metrics.items():
            values = self.history.setdefault(name, [])
            values.append(number)
            del values[:-HISTORY]
        self._write_step()
        self._traced(self.recorder.end_trace, report, self._metrics)
        self.cpu_s += time.thread_time() - start
        self._react(report)
        return report

    def unseen(self) -> None:
        """A stage was left out: nothing is compared across it, what follows is looked at anew."""
        self._trail.state, self._trail.begun = None, False
        self.recorder.unseen()

    def judge(self, stage: str, check: str, code: str, violations: Sequence[Violation]) -> Report:
        """Report what was compared elsewhere: a merge before it happens, meta entries."""
        report = Report()
        report.findings += [finding_of(stage, check, violation) for violation in violations]
        self._outcome(report, check, code, "failed" if violations else "passed")
        self.policy.apply(report)
        self._count(report)
        self._react(report)
        return report

    def _write_step(self) -> None:
        report = Report()
        try:
            self._guarded("DPA903", "tables", report, self.recorder.write, self.step or 0,
                          self._metrics, self._cache, self._trail.keys)  # fmt: skip
        except RunError as error:  # the disk refuses: the writer keeps the step and tries again
            if "disk" not in self._off:
                self._own_fault("DPA903", "disk", error, report)
        self._count(report)

    def boundary(
        self,
        stage: str,
        batch: Any,
        *,
        when: When = "after",
        evidence: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> Report:
        """Check ``batch`` as it enters or leaves ``stage``.

        What a ``partial`` batch lacks is missing knowledge, and no finding.

        ``evidence`` is what the producer knows beside the batch (rank notes, loss terms...); the
        batch's meta entries count as evidence too. Raises :class:`AuditError` when a finding
        has severity ``fail`` and ``on_fail`` is ``raise``, and :class:`UsageError` for a stage that
        nothing declares or a batch of no known form.
        """
        report = Report()
        if self.level == "off":
            return report
        start = time.thread_time()
        try:
            with np.errstate(all="ignore"):  # a NaN is a finding, not a line on stderr
                view = BatchView.of(batch)
                if self.policy.aliases:
                    view = view.under(self.policy.renamed())
                self._boundary(declared(stage), view, when, evidence, report, partial)
            if report.findings:
                self._react(report)
        finally:
            self.cpu_s += time.thread_time() - start
        return report

    def _react(self, report: Report) -> None:
        """Raise or warn for findings of severity ``fail``, as ``on_fail`` says."""
        failed = [f for f in report.findings if f.severity == "fail"]
        if failed and self.on_fail == "raise":
            self._write_step()
            raise AuditError(failed)
        if self.on_fail == "warn":
            for finding in failed:
                log.warning("%s", finding)

    def _boundary(
        self,
        stage: type[Stage],
        view: BatchView,
        when: When,
        evidence: Mapping[str, Any] | None,
        report: Report,
        partial: bool,
    ) -> None:
        self.boundaries += 1
        if stage.name not in self.stages:
            self.stages.append(stage.name)
        context = self._context(stage.name, when, {**view.meta, **(evidence or {})})
        first = not self._trail.begun
        mark = f"contract:{stage.name}"
        crossing: Crossing | None = self._guarded(
            "DPA902", mark, report, self._contract, stage, view, when, context, report, partial
        )
        if crossing is None:  # our own fault: what comes next has nothing to be compared with
            self._trail.lose()
            self.recorder.unseen()
        elif when == "after" and self.level == "full":
            self._guarded(
                "DPA901", "probes", report, self._probes, stage, context, report, crossing, first
            )
        self.policy.apply(report)
        keys = self._trail.keys(crossing.state) if crossing and report.findings else None
        report.findings[:] = [
            at_boundary(finding, step=self.step, when=when, row_keys=keys)
            for finding in report.findings
        ]
        if crossing is not None:
            self._guarded("DPA903", "tables", report, self.recorder.boundary, stage, crossing,
                          context, report)  # fmt: skip
            self._traced(self.recorder.trace, stage, crossing, context, report, self._trail.later)
        self._count(report)

    def _traced(self, record: Callable[..., Any], *args: Any) -> None:
        report = Report()
        self._guarded("DPA905", "trace", report, record, *args)
        self._count(report)

    def _context(self, stage: str, when: When, evidence: Mapping[str, Any]) -> Context:
        return Context(
            step=self.step,
            stage=stage,
            when=when,
            settings=self.settings,
            evidence=evidence,
            history=self.history,
            metrics=self._metrics,
            cache=self._cache,
            model=self.model,
        )

    def _contract(
        self,
        stage: type[Stage],
        view: BatchView,
        when: When,
        context: Context,
        report: Report,
        partial: bool,
    ) -> Crossing:
        crossing = self._trail.cross(stage, view, when)
        view = crossing.state.view
        wrong = wrong_fields(view, factors=self.settings.factors())
        context.broken = unreadable(view, wrong)
        missing = missing_fields(stage, view, when=when)
        if partial and missing:
            absent = f"field not in the batch: {', '.join(v.field for v in missing)}"
            self._outcome(report, f"{stage.name}.complete", "DPA101", "not_checkable", absent)
            missing = []
        self._verdict(stage, "fields", "DPA103", [*missing, *wrong], report)
        unbound = unchecked(view) if None in (view.prompt, view.response) else {}
        if unbound:
            axes = ", ".join(f"{axis} of {name}" for name, axis in unbound.items())
            self._outcome(report, f"{stage.name}.sizes", "DPA103", "not_checkable",
                          f"size unknown: {axes}")  # fmt: skip
        if crossing.reason:
            self._outcome(report, f"{stage.name}.{crossing.check}", crossing.code, crossing.kind,
                          crossing.reason)  # fmt: skip
        else:
            self._verdict(stage, crossing.check, crossing.code, crossing.violations, report)
        return crossing

    def _verdict(
        self,
        stage: type[Stage],
        check: str,
        code: str,
        violations: Sequence[Violation],
        report: Report,
    ) -> None:
        """Report violations, each only where it is met first in a step."""
        name = f"{stage.name}.{check}"
        self.fired.add(name)
        news = [v for v in violations if not v.field or self._reported.get(v.field) != v.actual]
        self._reported.update({v.field: v.actual for v in news if v.field})
        report.findings += [finding_of(stage.name, name, violation) for violation in news]
        if news or not violations:
            self._outcome(report, name, code, "failed" if news else "passed")
        else:
            known = ", ".join(v.field for v in violations)
            self._outcome(report, name, code, "not_checkable", f"reported before: {known}")

    def _probes(
        self,
        stage: type[Stage],
        context: Context,
        report: Report,
        crossing: Crossing,
        first: bool,
    ) -> None:
        view = crossing.state.view
        changed = stage.changeable(self.settings)
        changed = crossing.changed & changed if changed else changed
        due = self._schedule.due(stage, view, context, changed, first=first, off=self._off)
        self._run(due, view, context, report)

    def _run(self, due: Due, view: BatchView, context: Context, report: Report) -> None:
        for ran in run_probes(due, view, context):
            name, code = ran.probe.name, ran.probe.code
            if ran.error is not None:
                self._own_fault("DPA901", name, ran.error, report)
                continue
            if ran.kind in ("passed", "failed"):
                self.fired.add(name)
            report.findings += ran.findings
            self._outcome(report, name, code, ran.kind, ran.reason)

    # -- totals and own faults ---------------------------------------------------------------------

    def _outcome(
        self, report: Report, check: str, code: str, kind: OutcomeKind, reason: str = ""
    ) -> None:
        report.outcomes.append(outcome_of(check, code, kind, reason))

    def _count(self, report: Report) -> None:
        for outcome in report.outcomes:
            self.outcomes[outcome.kind] += 1
        for finding in report.findings:
            self.severities[finding.severity] += 1
        self.findings += report.findings[: max(0, MAX_FINDINGS - len(self.findings))]

    def _guarded(
        self, code: str, name: str, report: Report, run: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a part of our own; its error is reported once and must not stop training."""
        if name in self._off:
            return None
        try:
            return run(*args)
        except Exception as error:  # fail-open by design; reported as DPA9xx
            if isinstance(error, RunError) and code != "DPA905":
                raise
            self._own_fault(code, name, error, report)
            if code == "DPA903":
                self.recorder.give_up(self.step or 0)
            return None

    def _own_fault(self, code: str, name: str, error: Exception, report: Report) -> None:
        self._off.add(name)
        log.error("%s in %s, which is switched off from now on", code, name, exc_info=error)
        self._outcome(report, name, code, "not_checkable", type(error).__name__)
        report.findings.append(own_fault(code, name, self.step, error))
