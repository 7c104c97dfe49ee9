"""What would turn checks on that this configuration leaves ``not_checkable``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dataproto_audit.doctor.defects import several_turns
from dataproto_audit.doctor.planned import ACTOR, ROLLOUT, Planned
from dataproto_audit.probes import PROBES


@dataclass(frozen=True)
class Advice:
    """``key=value`` to set, why, and the codes of the checks that it turns on."""

    setting: str
    text: str
    codes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"codes": list(self.codes)}

    def __str__(self) -> str:
        return f"{self.setting}: {self.text} ({', '.join(self.codes)})"


def needing(need: str) -> tuple[str, ...]:
    """Codes of the registered checks that declare a need."""
    return tuple(sorted({probe.code for probe in PROBES.values() if need in probe.needs}))


def advice(p: Planned) -> Iterator[Advice]:
    """Keys that this configuration could set, most useful first."""
    if not p.get(f"{ROLLOUT}.calculate_log_probs"):
        yield Advice(
            f"{ROLLOUT}.calculate_log_probs=True",
            "keeps the log-probs of sampling beside those of the trainer",
            needing("rollout_log_probs"),
        )
    if not p.reference:
        yield Advice(
            f"{ACTOR}.use_kl_loss=True",
            f"computes reference log-probs; with {ACTOR}.kl_loss_coef=0 the loss stays the same",
            needing("ref_log_prob"),
        )
    yield Advice(
        "DATAPROTO_AUDIT_WORKERS=1",
        "looks into the workers: micro-batches, limits, the loss recomputed",
        tuple(sorted({*needing("evidence.ranks"), *needing("evidence.losses")})),
    )
    if several_turns(p):
        yield Advice(
            "tool_ids", "names the ids that only tools write (a setting of check, not of verl)",
            needing("settings.tool_ids"),
        )  # fmt: skip
