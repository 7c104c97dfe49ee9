"""Healthy steps to test against: one simulated step, boundary by boundary.

::

    for b in boundaries(Options(prompts=4, n=4, ranks=2)):
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)

Every number is consistent (:mod:`.simulated`). A batch may be changed between two boundaries, to
seed a fault: the stages that follow go on from the changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.findings import When
from dataproto_audit.probes.context import Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.simulated import SimulatedStep

__all__ = ["Boundary", "Options", "boundaries", "healthy_step"]


@dataclass
class Boundary:
    """One boundary of the step, ready for ``Auditor.boundary``."""

    stage: str
    when: When
    batch: DataProto
    evidence: Mapping[str, Any] = field(default_factory=dict)


def healthy_step(options: Options | None = None) -> tuple[Settings, list[Boundary]]:
    """Settings and all boundaries of one step."""
    options = options or Options()
    return options.settings(), list(boundaries(options))


def boundaries(
    options: Options | None = None,
    *,
    sampling: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    sent: Callable[[Any, Any], Any] | None = None,
    prepared: Callable[[SimulatedStep], Any] | None = None,
) -> Iterator[Boundary]:
    """The boundaries of one step in the order of the loop, each made when it is asked for.

    ``sampling`` may change the settings that the engine is asked for, ``sent`` the weights that
    are sent to it, given those of the step before, and ``prepared`` the simulation itself.
    """
    options = options or Options()
    run = SimulatedStep(options, sampling or (lambda settings: settings))
    if prepared:
        prepared(run)
    now = Boundary("prompts", "after", run.prompts())
    yield now
    prompts = now.batch
    for stage, work in run.stages(prompts):
        now = Boundary(stage, "before", now.batch)
        yield now
        batch = _copied(now.batch)
        evidence = work(batch)
        now = Boundary(stage, "after", batch, evidence)
        yield now
    yield Boundary("sync_weights", "after", DataProto(), run.sync(sent or (lambda new, old: new)))
    yield Boundary("validation", "after", run.validation())


def _copied(batch: DataProto) -> DataProto:
    """A batch of its own with the same tensors and arrays."""
    tensors = None if batch.batch is None else batch.batch.clone(recurse=False)
    return DataProto(tensors, dict(batch.non_tensor_batch), dict(batch.meta_info))
