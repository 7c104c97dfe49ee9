"""Runs the probes that are due at a boundary: verdicts first, one scan for all, then the probes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding, OutcomeKind
from dataproto_audit.probes.context import Context, NotChecked
from dataproto_audit.probes.registry import Probe
from dataproto_audit.probes.scan import scan

Due = Sequence[tuple[Probe, str]]
"""Probes, each with what the batch lacks for it ('' for nothing)."""


@dataclass
class Ran:
    """What one probe did. ``error`` is set when it failed by itself; then there is no verdict."""

    probe: Probe
    kind: OutcomeKind = "passed"
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)
    error: Exception | None = None


def due_probes(probes: Iterable[Probe], view: BatchView, broken: Mapping[str, str]) -> Due:
    """``probes``, each with the fields that it misses in this batch."""
    return [(probe, probe.without_fields(view, broken)) for probe in probes]


def run_probes(due: Due, view: BatchView, ctx: Context) -> list[Ran]:
    """One :class:`Ran` for each due probe, in order. Errors of a probe stay with that probe."""
    done = [Ran(probe) for probe, _ in due]
    ready = []
    for ran, (probe, lacking) in zip(done, due, strict=True):
        try:
            if _verdict_without_run(ran, probe, lacking, view, ctx):
                ready.append(ran)
        except Exception as error:  # noqa: BLE001 - the caller reports it as DPA901
            ran.error = error
    stats = _scanned(ready, view)
    for ran in ready:
        _run(ran, stats, view, ctx)
    return done


def _verdict_without_run(
    ran: Ran, probe: Probe, lacking: str, view: BatchView, ctx: Context
) -> bool:
    """Settle what needs no look at values; True when the probe has to run."""
    if probe.every > 1 and ((ctx.step or 1) - 1) % probe.every:
        ran.kind, ran.reason = "not_applicable", f"runs every {probe.every} steps"
    elif (probe.applies and (reason := probe.applies(ctx))) or (
        lacking and probe.absent and (reason := probe.absent(view, ctx))
    ):
        ran.kind, ran.reason = "not_applicable", reason
    elif reason := lacking or probe.without_knowledge(ctx):
        ran.kind, ran.reason = "not_checkable", reason
    else:
        return True
    return False


def _scanned(ready: Sequence[Ran], view: BatchView) -> dict[str, Any] | None:
    """All statistics that the probes need, in one pass; None when one of them failed."""
    wanted = {stat.name: stat for ran in ready for stat in ran.probe.stats}
    try:
        return scan(view, wanted.values())
    except Exception:  # noqa: BLE001 - scanned again by each probe, so that the culprit is named
        return None


def _run(ran: Ran, stats: Mapping[str, Any] | None, view: BatchView, ctx: Context) -> None:
    probe = ran.probe
    ctx.check, ctx.code, ctx.severity = probe.name, probe.code, probe.severity
    try:
        own = scan(view, probe.stats) if stats is None else stats
        ran.findings = list(probe.run(view, own, ctx))
        ran.kind = "failed" if ran.findings else "passed"
    except NotChecked as verdict:
        ran.kind, ran.reason = verdict.kind, verdict.reason
    except Exception as error:  # noqa: BLE001 - the caller reports it as DPA901
        ran.error = error
