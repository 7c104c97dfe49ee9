"""The fault bench: every fault on its bases, every healthy configuration, and the score.

A fault counts as detected (or as having its stage, field... right) only where that holds on every
base it is tried on. ``row_right`` and ``column_right`` also count faults whose rows or columns are
not defined, so that ``row_right / faults`` is a share of all faults.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataproto_audit.auditor import Auditor, Settings
from dataproto_audit.checker import check
from dataproto_audit.findings import Finding, Report
from dataproto_audit.probes import PROBES
from dataproto_audit.testing.bases import BASES, Healthy, healthy_configurations
from dataproto_audit.testing.faults import CATALOGUE, Fault, Truth
from dataproto_audit.testing.faults.scene import Scene
from dataproto_audit.testing.healthy import Boundary, boundaries
from dataproto_audit.testing.layouts import jagged
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.scoring import MEASURES, Score, Sighting, score
from dataproto_audit.testing.toy_model import ToyModel
from dataproto_audit.testing.toy_policy import ToyPolicy

SEEDS = 3
"""Seeds of each healthy configuration; runs of ``LONG`` steps have one."""
LONG = 20


@dataclass(frozen=True)
class FaultRun:
    """One fault on one base."""

    fault: Fault
    base: str
    score: Score
    crash: str = ""
    """What the stages behind the fault died of, if they did: a loud fault."""


@dataclass
class HealthyRuns:
    """Totals over the healthy batches."""

    batches: int = 0
    checks: int = 0
    executed: Counter[str] = field(default_factory=Counter)
    alarms: list[tuple[str, Finding]] = field(default_factory=list)
    """Findings of severity fail or warn, with the name of the configuration."""

    def count(self, severity: str) -> int:
        """Alarms of that severity."""
        return sum(finding.severity == severity for _, finding in self.alarms)


@dataclass
class BenchResult:
    """Everything the bench found out; :meth:`to_dict` is what ``selftest --json`` prints."""

    runs: list[FaultRun]
    healthy: HealthyRuns

    def by_fault(self) -> dict[str, list[FaultRun]]:
        """Runs of each fault."""
        out: dict[str, list[FaultRun]] = {}
        for run in self.runs:
            out.setdefault(run.fault.name, []).append(run)
        return out

    def right(self, measure: str) -> list[str]:
        """Names of the faults for which ``measure`` holds on every base."""
        return [name for name, runs in self.by_fault().items()
                if all(getattr(run.score, measure) for run in runs)]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Counts, with those of the untouched faults apart."""
        names = list(self.by_fault())
        return {
            **self._counts(names),
            "healthy_batches": self.healthy.batches,
            "healthy_checks": self.healthy.checks,
            "false_fail": self.healthy.count("fail"),
            "false_warn": self.healthy.count("warn"),
            "untouched": self._counts([name for name in names if not CATALOGUE[name].tuned]),
        }

    def _counts(self, names: Sequence[str]) -> dict[str, int]:
        chosen = set(names)
        counts = {m: sum(name in chosen for name in self.right(m)) for m in MEASURES}
        return {"faults": len(chosen), **counts}

    def probes(self) -> list[tuple[str, int, int, float]]:
        """Name, executions on healthy data, false alarms, upper bound of their rate."""
        alarms = Counter(finding.check for _, finding in self.healthy.alarms)
        ran = self.healthy.executed
        return [(name, ran[name], alarms[name], clopper_pearson(alarms[name], ran[name])[1])
                for name in PROBES]  # fmt: skip


def run_bench(
    seed: int = 0,
    bases: Iterable[str] | None = None,
    *,
    faults: Iterable[str] | None = None,
    healthy: Sequence[Healthy] | None = None,
) -> BenchResult:
    """Run ``faults`` (default: all) on those of their bases that are among ``bases`` (default:
    all), and the healthy configurations; ``seed`` is added to that of every batch.
    """
    allowed = set(BASES if bases is None else bases)
    chosen = [CATALOGUE[name] for name in (CATALOGUE if faults is None else faults)]
    runs = [run_fault(fault, base, seed=seed)
            for fault in chosen for base in fault.bases if base in allowed]  # fmt: skip
    configurations = healthy_configurations() if healthy is None else healthy
    return BenchResult(runs, run_healthy(configurations, seed=seed))


# -- healthy batches -------------------------------------------------------------------------------


def run_healthy(configurations: Iterable[Healthy], *, seed: int = 0) -> HealthyRuns:
    """Audit every configuration with several seeds, each seed in a run of its own."""
    total = HealthyRuns()
    for one in configurations:
        for extra in range(SEEDS if one.steps < LONG else 1):
            options = replace(one.options, seed=one.options.seed + seed + 101 * extra)
            told = Settings() if one.untold else options.settings()
            auditor = Auditor(told, on_fail="record")
            for step in range(options.step, options.step + one.steps):
                if one.recomputed:
                    auditor.model = model_at(options, step)
                at_step = replace(options, step=step)
                made = (
                    [_saved(told, at_step, total)]
                    if one.saved
                    else _audited(auditor, at_step, total)
                )
                for report in made:
                    total.alarms += [(one.name, f) for f in report if f.severity != "info"]
    return total


def model_at(options: Options, step: int) -> ToyModel:
    """The policy that samples and scores the rows of a step, as a module."""
    policy = ToyPolicy(options.vocab, reserved=options.reserved)
    return ToyModel(policy.at(options.step_drift * (step - 1)))


def _audited(auditor: Auditor, options: Options, total: HealthyRuns) -> Iterator[Report]:
    auditor.begin_step(options.step)
    metrics: dict[str, Any] = {}
    total.batches += 1
    for b in boundaries(options):
        batch = jagged(b.batch) if options.layout == "jagged" else b.batch
        yield _counted(auditor.boundary(b.stage, batch, when=b.when, evidence=b.evidence), total)
        metrics |= b.evidence.get("metrics", {})
    yield _counted(auditor.end_step(metrics), total)


def _saved(told: Settings, options: Options, total: HealthyRuns) -> Report:
    """The batch as it left the update, with its evidence as meta entries: checked in one piece,
    every stage seen in what later ones have written."""
    total.batches += 1
    meta: dict[str, Any] = {}
    for b in boundaries(options):
        meta |= b.evidence if b.when == "after" else {}
        if (b.stage, b.when) == ("update_actor", "after"):
            break
    whole = {"batch": dict(b.batch.batch.items()), "non_tensor_batch": b.batch.non_tensor_batch,
             "meta_info": {**b.batch.meta_info, **meta, "global_steps": options.step}}  # fmt: skip
    return _counted(check(whole, config=told), total)


def _counted(report: Report, total: HealthyRuns) -> Report:
    ran = [o.check for o in report.outcomes if o.kind in ("passed", "failed")]
    total.checks += len(ran)
    total.executed.update(ran)
    return report


# -- faults ----------------------------------------------------------------------------------------


def run_fault(fault: Fault, base: str, *, seed: int = 0) -> FaultRun:
    """Audit the healthy steps before the fault, and those with it, and score what was found."""
    options = replace(BASES[base], **fault.options)
    options = replace(options, seed=options.seed + seed)
    auditor = Auditor(options.settings(), on_fail="record")
    seeding = Seeding(fault)
    sightings: list[Sighting] = []
    crash, number = "", 0
    for turn in range(-fault.lead, fault.lasts):
        step = replace(options, step=options.step + fault.lead + turn)
        metrics: dict[str, Any] = {}
        auditor.begin_step(step.step)
        made = seeding.step(step, turn) if turn >= 0 else boundaries(step)
        try:
            for b in made:
                report = auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
                sightings += [Sighting(number, finding, (b.stage, b.when)) for finding in report]
                metrics |= b.evidence.get("metrics", {})
                number += 1
        except Exception as error:  # noqa: BLE001 - a loud fault: the stages behind it die of it
            crash = f"{type(error).__name__}: {error}"
        ended = auditor.end_step(metrics)
        sightings += [Sighting(number, finding, ("end", "after")) for finding in ended]
        if crash:
            break
    return FaultRun(fault, base, score(fault, seeding.truth, sightings, moved=seeding.moved), crash)


class Seeding:
    """Makes the fault at its place in a step and remembers the truth."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.truth: Truth | None = None
        self.run: Any = None

    def step(self, options: Options, turn: int) -> Iterator[Boundary]:
        """The boundaries of a step with the fault."""
        fault, hooks = self.fault, dict[str, Any]()
        if fault.where in ("sampling", "before_sync"):
            hooks["sampling" if fault.where == "sampling" else "sent"] = fault.apply
        when = {"after_stage": "after", "before_stage": "before"}.get(fault.where, "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what NaN and infinity do to the stages behind
            for b in boundaries(options, prepared=lambda run: self._prepare(run, turn), **hooks):
                if (b.stage, b.when) == (fault.stage, when):
                    self.truth = fault.apply(Scene(self.run, b, turn))
                yield b

    def _prepare(self, run: Any, turn: int) -> None:
        self.run = run
        if self.fault.where == "start":
            self.truth = self.fault.apply(Scene(run, None, turn))

    def moved(self, row: int, sighting: Sighting) -> int:
        """Where a row is after balancing, if the fault was made before and found after it."""
        before = ("prompts", "rollout", "union")
        order, (stage, when) = self.run.order, sighting.place
        if self.fault.stage not in before or stage in before or order is None:
            return row
        if (stage, when) == ("balance", "before"):
            return row
        with contextlib.suppress(IndexError):
            return int(np.flatnonzero(order == row)[0])
        return row


# -- the interval ----------------------------------------------------------------------------------


def clopper_pearson(hits: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a rate: the rates at which ``hits`` or fewer, or more, are too unlikely.

    Source: Clopper and Pearson, Biometrika 26 (1934). Found by bisection on the binomial tail.
    """
    if trials <= 0:
        return 0.0, 1.0
    tail = (1.0 - level) / 2
    low = 0.0 if hits == 0 else _bisect(lambda p: 1.0 - _at_most(hits - 1, trials, p) - tail)
    high = 1.0 if hits == trials else _bisect(lambda p: tail - _at_most(hits, trials, p))
    return low, high


def _bisect(rising: Any) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def _at_most(hits: int, trials: int, rate: float) -> float:
    """Probability of at most ``hits`` in ``trials``."""
    if rate <= 0.0 or rate >= 1.0:
        return float(rate <= 0.0 or hits >= trials)
    from math import exp, lgamma, log

    whole = lgamma(trials + 1)
    logs = [whole - lgamma(k + 1) - lgamma(trials - k + 1) + k * log(rate)
            + (trials - k) * log(1 - rate) for k in range(hits + 1)]  # fmt: skip
    return min(1.0, sum(exp(value) for value in logs))


def counts_line(counts: Mapping[str, int]) -> str:
    """``detected 130/132 98.5%``, one measure after the other."""
    total = counts["faults"]
    return ", ".join(f"{m} {counts[m]}/{total} {counts[m] / max(1, total):.1%}" for m in MEASURES)
