"""A step with a fault of the catalogue, boundary by boundary, and the healthy one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataproto_audit.probes.context import Settings
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.bench import Seeding
from dataproto_audit.testing.faults import Fault, Truth
from dataproto_audit.testing.healthy import Boundary, boundaries
from dataproto_audit.testing.options import Options


@dataclass
class Faulty:
    """``bad`` and ``good`` are (step, boundary), equally many; metrics are those of the last step.

    Stages behind the fault that died of it are in neither.
    """

    settings: Settings
    bad: list[tuple[int, Boundary]] = field(default_factory=list)
    good: list[tuple[int, Boundary]] = field(default_factory=list)
    bad_metrics: dict[str, Any] = field(default_factory=dict)
    good_metrics: dict[str, Any] = field(default_factory=dict)
    truth: Truth | None = None
    died: bool = False


def faulty_step(
    fault: Fault, base: str | None = None, *, changed: Mapping[str, Any] | None = None
) -> Faulty:
    """The step of ``fault`` on ``base`` (default: its first), with options ``changed``."""
    name = base or fault.bases[0]
    options: Options = replace(BASES[name], **{**fault.options, **(changed or {})})
    made, seeding = Faulty(options.settings()), Seeding(fault)
    for turn in range(-fault.lead, fault.lasts):
        step = replace(options, step=options.step + fault.lead + turn)
        healthy = list(boundaries(step))
        bad: list[Boundary] = []
        try:
            for boundary in seeding.step(step, turn) if turn >= 0 else healthy:
                bad.append(boundary)
        except Exception:  # noqa: BLE001 - a loud fault: the stages behind it die of it
            made.died = True
        sides = ((bad, made.bad, made.bad_metrics), (healthy, made.good, made.good_metrics))
        for found, into, metrics in sides:
            for boundary in found[: len(bad)]:
                into.append((step.step, boundary))
                metrics.update(boundary.evidence.get("metrics", {}))
    made.truth = seeding.truth
    return made
