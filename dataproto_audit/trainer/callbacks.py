"""Hooks that the loop offers to anyone: to experiments, to recorders, to seeded faults.

The loop itself does not know who listens. Every hook is a list and is called in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.protocol import DataProto

AfterStage = Callable[[int, str, DataProto], None]
"""``(step, stage, batch)``: may look at, or change, what a stage hands on."""
SamplingHook = Callable[[int, dict[str, Any]], dict[str, Any]]
"""``(step, settings)`` to the settings that the engine is asked for."""
WeightsHook = Callable[[int, Any], Any]
"""``(step, weights)`` to the weights that are sent to the engine."""
EvidenceHook = Callable[[int, DataProto], Mapping[str, Any]]
"""``(step, batch)`` to what is known beside the batch at a boundary."""


@dataclass
class Callbacks:
    """The hooks of one run. ``evidence`` is by stage."""

    after_stage: list[AfterStage] = field(default_factory=list)
    sampling: list[SamplingHook] = field(default_factory=list)
    before_sync: list[WeightsHook] = field(default_factory=list)
    evidence: dict[str, list[EvidenceHook]] = field(default_factory=dict)

    def evidence_of(self, step: int, stage: str, batch: DataProto) -> dict[str, Any]:
        """Everything that the stage's evidence hooks know."""
        known: dict[str, Any] = {}
        for hook in self.evidence.get(stage, ()):
            known.update(hook(step, batch))
        return known
