"""The one place where a batch at a stage boundary is checked, measured and recorded.

::

    auditor = Auditor(Settings(n=8, temperature=1.0, ...), tables=writer)
    auditor.begin_step(1)
    auditor.boundary("rollout", batch)            # after the stage; when="before" for its input
    auditor.boundary("update_actor", batch, evidence={"losses": ..., "ranks": ...})
    auditor.end_step({"actor/grad_norm": 0.4})

Levels: ``off`` does nothing, ``shape`` checks declarations and row relations, ``full`` also runs
the probes. An error inside this package never reaches the training loop: it becomes a ``DPA9xx``
finding once, and the check that failed is switched off.
"""

from __future__ import annotations

import logging
import numbers
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.contracts.check import (
    Violation,
    missing_fields,
    unchecked,
    undeclared,
    wrong_fields,
)
from dataproto_audit.contracts.relations import RowViolation
from dataproto_audit.contracts.stages import STAGES, Stage
from dataproto_audit.contracts.trail import Crossing, Trail
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.findings import (
    AuditError,
    Finding,
    Outcome,
    OutcomeKind,
    Report,
    When,
    at_boundary,
)
from dataproto_audit.probes import PROBES, Context, Probe, Settings
from dataproto_audit.probes.recorder import StepRecorder
from dataproto_audit.probes.runner import Due, due_probes, run_probes

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


@lru_cache(maxsize=4096)
def _outcome(check: str, code: str, kind: OutcomeKind, reason: str = "") -> Outcome:
    """Outcomes are few and immutable: one object each."""
    return Outcome(check, code, kind, reason)


class Auditor:
    """Checks every boundary of a run and keeps its totals.

    ``tables`` receives the records of each step; without it nothing is written. ``on_fail`` decides
    what a finding of severity ``fail`` does: ``raise`` :class:`AuditError`, ``warn`` through
    :mod:`logging`, or ``record`` only.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        level: Level = "full",
        on_fail: OnFail = "raise",
        tables: TableWriter | None = None,
        probes: Mapping[str, Probe] | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.level: Level = level
        self.on_fail: OnFail = on_fail
        self.recorder = StepRecorder(tables)
        self.probes = dict(PROBES if probes is None else probes)
        self.history: dict[str, list[float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.severities: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.boundaries = 0
        self.stages: list[str] = []
        self.fired: set[str] = set()
        """Checks that ran to a verdict at least once."""
        self.undeclared: set[str] = set()
        """Fields that were met and that nothing declares; they are allowed."""
        self.cpu_s = 0.0
        self.step: int | None = None
        self._off: set[str] = set()
        self._plans: dict[tuple[Any, ...], Due] = {}
        self._reset()

    def _reset(self) -> None:
        self._trail = Trail(self.settings)
        self._reported: dict[str, str] = {}
        self._metrics: dict[str, float] = {}
        self._cache: dict[Any, Any] = {}

    # -- one step ----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Start a step: nothing is carried over but the history of metrics."""
        self.step = step
        self._reset()

    def end_step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Close the step: metrics join the history, and its tables are written."""
        start = time.thread_time()
        for name, value in (metrics or {}).items():
            if isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:
                self._metrics[name] = float(value)
        for name, number in self._metrics.items():
            values = self.history.setdefault(name, [])
            values.append(number)
            del values[:-HISTORY]
        self._write_step()
        self.cpu_s += time.thread_time() - start

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
    ) -> Report:
        """Check ``batch`` as it enters or leaves ``stage``.

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
                self._boundary(_declared(stage), BatchView.of(batch), when, evidence, report)
            failed = [f for f in report.findings if f.severity == "fail"]
            if failed and self.on_fail == "raise":
                self._write_step()
                raise AuditError(failed)
            if self.on_fail == "warn":
                for finding in failed:
                    log.warning("%s", finding)
        finally:
            self.cpu_s += time.thread_time() - start
        return report

    # -- checking ----------------------------------------------------------------------------------

    def _boundary(
        self,
        stage: type[Stage],
        view: BatchView,
        when: When,
        evidence: Mapping[str, Any] | None,
        report: Report,
    ) -> None:
        self.boundaries += 1
        if stage.name not in self.stages:
            self.stages.append(stage.name)
        context = Context(
            step=self.step,
            stage=stage.name,
            when=when,
            settings=self.settings,
            evidence={**view.meta, **(evidence or {})},
            history=self.history,
            metrics=self._metrics,
            cache=self._cache,
        )
        first = not self._trail.begun
        mark = f"contract:{stage.name}"
        crossing: Crossing | None = self._guarded(
            "DPA902", mark, report, self._contract, stage, view, when, context, report
        )
        if crossing is None:  # our own fault: what comes next has nothing to be compared with
            self._trail.lose()
        elif when == "after" and self.level == "full":
            self._guarded(
                "DPA901", "probes", report, self._probes, stage, context, report, crossing, first
            )
        keys = self._trail.keys(crossing.state) if crossing and report.findings else None
        report.findings[:] = [
            at_boundary(finding, step=self.step, when=when, row_keys=keys)
            for finding in report.findings
        ]
        if crossing is not None:
            self._guarded("DPA903", "tables", report, self.recorder.boundary, stage, crossing,
                          context, report)  # fmt: skip
        self._count(report)

    def _contract(
        self,
        stage: type[Stage],
        view: BatchView,
        when: When,
        context: Context,
        report: Report,
    ) -> Crossing:
        crossing = self._trail.cross(stage, view, when)
        view = crossing.state.view
        wrong = wrong_fields(view, factors=self.settings.factors())
        context.broken = {violation.field: f"is {violation.actual}" for violation in wrong}
        self._verdict(stage, "fields", "DPA103", [*missing_fields(stage, view, when=when), *wrong],
                      report)  # fmt: skip
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
        report.findings += [_finding(stage.name, name, violation) for violation in news]
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
        for ran in run_probes(self._due(stage, view, context, crossing, first), view, context):
            name, code = ran.probe.name, ran.probe.code
            if ran.error is not None:
                self._own_fault("DPA901", name, ran.error, report)
                continue
            if ran.kind in ("passed", "failed"):
                self.fired.add(name)
            report.findings += ran.findings
            self._outcome(report, name, code, ran.kind, ran.reason)

    def _due(
        self,
        stage: type[Stage],
        view: BatchView,
        context: Context,
        crossing: Crossing,
        first: bool,
    ) -> Due:
        """Probes at home here, those of fields that changed here, and at the first boundary of a
        step those of earlier stages; each with what the batch lacks for it."""
        changed = stage.changeable(self.settings)
        changed = crossing.changed & changed if changed else changed
        mark = (stage.name, view.names, first, changed)
        usual = not (context.broken or view.empty or view.layout == "jagged")
        due = self._plans.get(mark) if usual else None
        if due is None:
            chosen = [p for p in self.probes.values() if _is_due(p, stage, first, changed)]
            due = due_probes(chosen, view, context.broken)
            self.undeclared.update(undeclared(view))
            if usual and len(self._plans) < 1000:
                self._plans[mark] = due
        if self._off:
            off = "switched off after an error of its own"
            due = [(p, off if p.name in self._off else lacking) for p, lacking in due]
        return due

    # -- totals and own faults ---------------------------------------------------------------------

    def _outcome(
        self, report: Report, check: str, code: str, kind: OutcomeKind, reason: str = ""
    ) -> None:
        report.outcomes.append(_outcome(check, code, kind, reason))

    def _count(self, report: Report) -> None:
        self.outcomes.update([outcome.kind for outcome in report.outcomes])
        self.severities.update([finding.severity for finding in report.findings])
        self.findings += report.findings[: max(0, MAX_FINDINGS - len(self.findings))]

    def _guarded(
        self, code: str, name: str, report: Report, run: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a part of our own; its error is reported once and must not stop training."""
        if name in self._off:
            return None
        try:
            return run(*args)
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001 - fail-open by design; reported as DPA9xx
            self._own_fault(code, name, error, report)
            if code == "DPA903":
                self.recorder.give_up(self.step or 0)
            return None

    def _own_fault(self, code: str, name: str, error: Exception, report: Report) -> None:
        self._off.add(name)
        log.error("%s in %s, which is switched off from now on", code, name, exc_info=error)
        self._outcome(report, name, code, "not_checkable", type(error).__name__)
        report.findings.append(
            Finding(
                code=code,
                severity="warn",
                stage="",
                check=name,
                step=self.step,
                expected="no error inside this package",
                actual=f"{type(error).__name__}: {error}",
                hint="training goes on without this check",
            )
        )


def _declared(stage: str) -> type[Stage]:
    if stage not in STAGES:
        raise UsageError(
            "DPA851", f"unknown stage {stage!r}.", f"Declared are {', '.join(STAGES)}."
        )
    return STAGES[stage]


def _is_due(probe: Probe, stage: type[Stage], first: bool, changed: Iterable[str]) -> bool:
    if stage.name in probe.stages:
        return True
    if not probe.later:
        return False
    if first and not stage.fresh and probe.fields:
        names = list(STAGES)
        return any(names.index(home) <= names.index(stage.name) for home in probe.stages)
    return any(name in probe.fields for name in changed)


def _finding(stage: str, check: str, violation: Violation) -> Finding:
    rows = violation.rows if isinstance(violation, RowViolation) else ()
    columns = violation.columns if isinstance(violation, RowViolation) else {}
    return Finding(
        code=violation.code,
        severity="fail",
        stage=stage,
        check=check,
        field=violation.field,
        rows=tuple(rows),
        columns=columns,
        expected=violation.expected,
        actual=violation.actual,
        evidence=violation.evidence,
        causes=violation.causes,
    )
