"""One audited run of a trainer of others: its auditor, its tables, its gates.

Nothing here may harm the training: every call of our own runs guarded, random generators are put
back, an error is logged once with its code and switches off the part that made it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from dataproto_audit.auditor import Auditor
from dataproto_audit.codes import CodedError, RunError
from dataproto_audit.dump.layout import TABLES_DIR
from dataproto_audit.dump.run_folder import RunFolder, default_run_dir
from dataproto_audit.dump.streams import has_tables
from dataproto_audit.dump.trace import TRACE_DIR, TraceWriter
from dataproto_audit.dump.trace_disk import versions
from dataproto_audit.dump.trace_format import step_name
from dataproto_audit.findings import OUTCOME_KINDS, SEVERITIES, AuditError, Finding, When
from dataproto_audit.integrations import flight
from dataproto_audit.integrations.announce import Faults, say
from dataproto_audit.integrations.cpu import CpuClock
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.preserved import preserved_rng
from dataproto_audit.integrations.run_dirs import REMEDY, free_folder, fresh_folder
from dataproto_audit.integrations.samples import RowSample
from dataproto_audit.integrations.verl_settings import of_some_rows
from dataproto_audit.policy import Policy, load_policy
from dataproto_audit.probes import Settings

log = logging.getLogger("dataproto_audit")
T = TypeVar("T")
TOLD_OFF = 3
"""Parts switched off that the last line names; the summary has all."""


class Session:
    """Boundaries of one run, from the first to :meth:`finish`."""

    def __init__(
        self, options: Options, settings: Settings, *, experiment: str, config: Mapping[str, Any]
    ) -> None:
        self.options = options
        self.settings = of_some_rows(settings) if options.rows else settings
        self.sample = RowSample(options.rows, settings.n)
        self.observed: Counter[str] = Counter()
        """Boundaries by ``stage.when``."""
        self.off: dict[str, str] = {}
        """Parts of our own that failed and are switched off, with their error."""
        self._faults = Faults()
        self.cpu_s, self._depth = 0.0, 0
        self.workers_cpu_s = 0.0
        """What the hooks in workers took, as these tell."""
        self.steps = 0
        self._experiment, self._refused = experiment, False
        self._kept: Path | None = None
        """Where a batch was kept of a run without tables."""
        self.folder = self._folder(experiment, config) if options.tables else None
        self.trace = self._trace(self.folder) if self.folder and options.trace != "off" else None
        self.auditor = Auditor(
            self.settings,
            level=options.level,  # type: ignore[arg-type] # one of LEVELS: options checked it
            on_fail=options.on_fail,  # type: ignore[arg-type] # the same
            tables=self.folder.tables if self.folder else None,
            trace=self.trace,
            policy=self.guarded("policy", self._policy, Policy()),
        )
        self._began, self._clock = time.monotonic(), CpuClock()
        self._step: int | None = None
        self._from_prompts = self._nan_kept = False

    def _asked_for(self, experiment: str) -> Path:
        return Path(self.options.run_dir) if self.options.run_dir else default_run_dir(experiment)

    def keeps_in(self) -> Path | None:
        """The folder in which a batch is kept; with ``tables=False`` it is made when it is needed.

        None where the disk refuses, which is logged once.
        """
        if self.folder is not None or self.options.tables or self._refused:
            return self.folder.path if self.folder is not None else None
        if self._kept is None:
            try:
                self._kept = free_folder(self._asked_for(self._experiment))
            except CodedError as error:
                self._refused = True
                log.error("%s %s Nothing can be kept. %s", error.code, error.message, REMEDY)
        return self._kept

    def _policy(self) -> Policy:
        return load_policy(self.options.policy) if self.options.policy else Policy()

    def _folder(self, experiment: str, config: Mapping[str, Any]) -> RunFolder | None:
        try:
            folder, why = fresh_folder(self._asked_for(experiment), config=config)
        except CodedError as error:  # not writable: checks go on without tables
            log.error("%s %s NOTHING of this run is written, no tables and no trace; the checks "
                      "go on. %s", error.code, error.message, REMEDY)  # fmt: skip
            return None
        if why:
            log.warning("%s It is kept as it is; this run is written into %s.", why, folder.path)
        return folder

    def _trace(self, folder: RunFolder) -> TraceWriter:
        return TraceWriter(
            folder.path / TRACE_DIR,
            retention=self.options.trace,
            settings=asdict(self.settings),
        )

    def _traced(self, work: Callable[[TraceWriter], None]) -> None:
        if self.trace is not None:
            try:
                work(self.trace)
            except RunError as error:  # it costs the trace, not the run
                log.error("DPA905 the trace is not complete: %s", error)

    def started(self, what: str) -> None:
        """Say once that the audit of ``what`` begins, how, and where it is written."""
        options = self.options
        told = [f"level {self.auditor.level}", f"on_fail {options.on_fail}"]
        told += [f"every {options.every_n_steps} steps"] if options.every_n_steps > 1 else []
        told += [f"stages {', '.join(options.stages)}"] if options.stages else []
        told += [f"about {options.rows} rows a step"] if options.rows else []
        told += ["workers, too"] if options.workers else []
        version = versions().get("dataproto-audit", "(not installed)")
        say(f"{version} audits {what}: {', '.join(told)}; {self._written()}")

    def _written(self) -> str:
        if self.folder is not None:
            return f"tables in {self.folder.path}"
        return "NOTHING is written" if self.options.tables else "no tables, as asked for"

    # -- steps and boundaries ----------------------------------------------------------------------

    @property
    def looking(self) -> bool:
        """True while a step is open that is audited."""
        return self._step is not None and self.options.looks_at(self._step)

    def wants(self, stage: str) -> bool:
        """True where ``stage`` of the open step is audited."""
        return self.looking and (not self.options.stages or stage in self.options.stages)

    def open_step(self, step: int) -> None:
        """Begin ``step`` unless it is open already; one that was never closed is closed first."""
        if self._step == step:
            return
        self.close_step(self._step, {})
        self._step, self._from_prompts = step, False
        self.auditor.begin_step(step)

    def close_step(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """End ``step`` with what the trainer measured in it."""
        if step is None or self._step != step:
            return
        self._step = None
        self.steps = max(self.steps, step)
        self.guarded("end_step", lambda: self.auditor.end_step(metrics), None)

    def boundary(
        self,
        stage: str,
        batch: Any,
        when: When = "after",
        evidence: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand a boundary of the open step to the auditor, as far as the gates let it through."""
        if not self.looking:
            return
        begins = stage == "prompts"  # later stages are compared with it, whatever is left out
        left_out = not self.wants(stage) and not begins
        unrooted = stage == "rollout" and when == "before" and not self._from_prompts
        if left_out or unrooted:
            self.auditor.unseen()
            return
        self._from_prompts |= begins
        self.observed[f"{stage}.{when}"] += 1
        self.guarded(f"boundary {stage}.{when}", lambda: self._judge(stage, batch, when, evidence),
                     None)  # fmt: skip

    def _judge(
        self, stage: str, batch: Any, when: When, evidence: Mapping[str, Any] | None
    ) -> None:
        part = self.sample.of(stage, when, batch)
        try:
            found = self.auditor.boundary(stage, part, when=when, evidence=evidence).findings
        except AuditError as error:
            self._keep_first_nan(stage, batch, error.findings)
            raise
        self._keep_first_nan(stage, batch, found)

    def _keep_first_nan(self, stage: str, batch: Any, found: Iterable[Finding]) -> None:
        """Save the first batch in which a value is not finite; what comes later follows from it."""
        news = any("non_finite" in finding.causes for finding in found)
        if not (news and self.options.flight_recorder) or self._nan_kept:
            return
        folder = self.keeps_in()
        if folder is None:
            return
        self._nan_kept, step = True, self._step or 0
        paths: list[Path] = []
        if self.trace is not None:  # it is recorded already, in a step that is kept from now on
            if self.trace.mark(step):
                paths = [folder / TRACE_DIR / step_name(step)]
        else:
            paths = flight.keep(folder, step, stage, {"not_finite": batch}, settings=self.settings)
        kept = f"is kept: {', '.join(map(str, paths))}" if paths else "could not be kept"
        log.error("first values that are not finite, at %s of step %s; the batch %s",
                  stage, self._step, kept)  # fmt: skip

    def guarded(self, name: str, work: Callable[[], T], default: T) -> T:
        """Run a part of our own; only :class:`AuditError`, which was asked for, gets out."""
        if name in self.off:
            return default
        start, self._depth = time.thread_time(), self._depth + 1
        try:
            with preserved_rng():
                return work()
        except AuditError:
            raise
        except Exception as error:  # fail-open by design
            self.off[name] = flight.brief(error)
            if self._faults.are_news(error):
                log.error(
                    "DPA904 %s failed inside dataproto-audit and is switched off; training goes "
                    "on. Further parts that fail so are counted when the run ends.", name,
                    exc_info=error,
                )  # fmt: skip
            if hasattr(self, "auditor"):
                self.auditor.unseen()
            return default
        finally:
            self._depth -= 1
            if not self._depth:
                self.cpu_s += time.thread_time() - start

    # -- results -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """For the trainer's own tracker: totals of the run so far."""
        auditor = self.auditor
        return {
            **{f"audit/findings_{name}": float(auditor.severities[name]) for name in SEVERITIES},
            **{f"audit/{kind}": float(auditor.outcomes[kind]) for kind in OUTCOME_KINDS},
            "audit/boundaries": float(auditor.boundaries),
            "audit/cpu_s": self.cpu_s,
        }

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says of an attached run."""
        auditor = self.auditor
        return {
            "run_dir": str(self.folder.path) if self.folder else None,
            "steps": self.steps,
            "boundaries": auditor.boundaries,
            "outcomes": {kind: auditor.outcomes[kind] for kind in OUTCOME_KINDS},
            "findings": {name: auditor.severities[name] for name in SEVERITIES},
            "stages": list(auditor.stages),
            "observed": dict(self.observed),
            "undeclared_fields": sorted(auditor.undeclared),
            "switched_off": dict(self.off),
            **self._cpu(),
            "wall_s": time.monotonic() - self._began,
        }

    def _cpu(self) -> dict[str, float]:
        """CPU seconds of the audit, here and in workers, and their share of those of the run."""
        traced = self.trace.cpu_s if self.trace is not None else 0.0
        audit, spent = self.cpu_s + traced + self.workers_cpu_s, self._clock.spent_s()
        return {
            "audit_cpu_s": audit,
            "run_cpu_s": spent,
            "audit_cpu_share": audit / spent if spent > 0 else 0.0,
            "audit_cpu_ms_per_step": 1e3 * audit / max(1, self.steps),
        }

    def finish(self, more: Mapping[str, Any]) -> None:
        """Close the step and the tables and write the summary."""
        if self._step is not None:
            self._traced(lambda trace: trace.end_step(ended="broken_off"))
        with suppress(AuditError):  # it has been raised, or has nobody left to stop
            self.close_step(self._step, {})
        summary, where = {**self.summary(), **more}, None
        if self.folder is not None:
            folder, self.folder = self.folder, None
            self._traced(lambda trace: trace.close())
            summary |= self._cpu()  # the last steps were written just now
            summary["wall_s"] = time.monotonic() - self._began
            try:
                folder.finish(summary)
            except (RunError, OSError) as error:
                log.error("DPA903 the tables could not be closed: %s", error)
            where = folder.path
        written = where is not None and has_tables(where / TABLES_DIR)
        say(_last_line(summary, written=written, kept=self._kept))


def _last_line(summary: Mapping[str, Any], *, written: bool, kept: Path | None = None) -> str:
    """What a run that ended was, in one line; ``written``: there are tables; ``kept``: the folder
    of a batch that was kept without them."""
    outcomes = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in summary["outcomes"].items())
    findings = ", ".join(f"{n} {severity}" for severity, n in summary["findings"].items())
    told = f"{summary['steps']} steps, {summary['boundaries']} boundaries; checks: {outcomes}; " \
           f"findings: {findings}; {100 * summary['audit_cpu_share']:.1f} % of the run's CPU " \
           "time"  # fmt: skip
    off = list(summary["switched_off"])
    if off:
        more = f" and {len(off) - TOLD_OFF} more" if len(off) > TOLD_OFF else ""
        told += f"; switched off after an error of ours: {', '.join(off[:TOLD_OFF])}{more}"
    where = summary["run_dir"]
    if where and not written:
        return f"{told}; NO tables are in {where}"
    if kept is not None:
        return f"{told}; no tables, as asked for; a batch is kept in {kept}"
    return f"{told}; " + (f"tables in {where}" if where else "nothing was written")
