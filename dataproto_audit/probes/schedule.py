"""Which probes are due at a boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.check import undeclared
from dataproto_audit.contracts.stages import STAGES, Stage
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import AT_END, Probe
from dataproto_audit.probes.runner import Due, due_probes

MAX_PLANS = 1000
_OFF = "switched off after an error of its own"


class Schedule:
    """Plans by signature of the batch, so that a boundary seen before costs nothing."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self.probes = probes
        self.undeclared: set[str] = set()
        """Fields that were met and that nothing declares."""
        self._plans: dict[tuple[Any, ...], Due] = {}

    def due(
        self,
        stage: type[Stage],
        view: BatchView,
        context: Context,
        changed: frozenset[str],
        *,
        first: bool,
        off: Iterable[str],
    ) -> Due:
        """Probes at home here, those of fields that changed here, and at the ``first`` boundary of
        a step those of earlier stages; each with what the batch lacks for it."""
        mark = (stage.name, view.names, first, changed)
        usual = not (context.broken or view.empty or view.layout == "jagged")
        due = self._plans.get(mark) if usual else None
        if due is None:
            chosen = [p for p in self.probes.values() if _is_due(p, stage, first, changed)]
            chosen.sort(key=lambda p: not p.basic)
            due = due_probes(chosen, view, context.broken)
            self.undeclared.update(undeclared(view))
            if usual and len(self._plans) < MAX_PLANS:
                self._plans[mark] = due
        return without(due, off)

    def at_end(self, off: Iterable[str] = ()) -> Due:
        """Probes of the metrics of a whole step."""
        return without([(p, "") for p in self.probes.values() if AT_END in p.stages], off)


def without(due: Due, off: Iterable[str]) -> Due:
    """``due`` with the probes ``off`` marked as not checkable."""
    if not off:
        return due
    return [(probe, _OFF if probe.name in off else lacking) for probe, lacking in due]


def _is_due(probe: Probe, stage: type[Stage], first: bool, changed: Iterable[str]) -> bool:
    if stage.name in probe.stages:
        return True
    if not probe.later or AT_END in probe.stages:
        return False
    if first and not stage.fresh and probe.fields:
        names = list(STAGES)
        return any(names.index(home) <= names.index(stage.name) for home in probe.stages)
    return any(name in probe.fields for name in changed)
