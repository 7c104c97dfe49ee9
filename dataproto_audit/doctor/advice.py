"""What would turn checks on that this configuration leaves ``not_checkable``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dataproto_audit.doctor.defects import several_turns
from dataproto_audit.doctor.planned import ACTOR, MODEL, REF, ROLLOUT, Planned
from dataproto_audit.probes import PROBES

LIMIT, PACKED, ATTENDED = "DPA704", "DPA706", "DPA707"
OF_ENGINES = (PACKED, ATTENDED)
"""Checks of what only engine workers tell of a rank."""


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


def _workers(p: Planned) -> Advice:
    """What looking into the workers of this configuration brings (docs/attaching.md)."""
    codes = set(needing("evidence.ranks")) - set(OF_ENGINES)
    codes -= set() if p.get(f"{ACTOR}.use_dynamic_bsz") else {LIMIT}
    if p.megatron:
        text = "looks into the Megatron workers: micro-batches and limits, no losses"
        return Advice("DATAPROTO_AUDIT_WORKERS=1", text, tuple(sorted(codes)))
    codes |= set(needing("update_log_probs"))
    if not p.engine:
        text = "looks into the legacy actor: micro-batches, limits, its loss recomputed"
        return Advice("DATAPROTO_AUDIT_WORKERS=1", text, tuple(sorted(codes)))
    packed = bool(p.get(f"{MODEL}.use_remove_padding"))
    of_critic = set(needing("update_values"))
    codes |= set(needing("evidence.losses")) - of_critic
    codes |= {PACKED if packed else ATTENDED} | ({ATTENDED} if p.ulysses > 1 else set())
    codes |= of_critic if p.critic else set()
    whose = "V1 trainer" if p.v1 else "V0 trainer"
    roles = "actor and critic" if p.critic else "the actor"
    text = f"looks into the engine workers of the {whose}: micro-batches, limits, the loss of " \
           f"{roles} recomputed"  # fmt: skip
    return Advice("DATAPROTO_AUDIT_WORKERS=1", text, tuple(sorted(codes)))


def advice(p: Planned) -> Iterator[Advice]:
    """Keys that this configuration could set, most useful first."""
    if not p.get(f"{ROLLOUT}.calculate_log_probs"):
        yield Advice(
            f"{ROLLOUT}.calculate_log_probs=True",
            "keeps the log-probs of sampling beside those of the trainer",
            needing("rollout_log_probs"),
        )
    if not p.reference:
        size = f"{REF}.log_prob_micro_batch_size_per_gpu"
        sized = p.get(size) or p.get(f"{REF}.log_prob_use_dynamic_bsz")
        yield Advice(
            f"{ACTOR}.use_kl_loss=True",
            f"computes reference log-probs; with {ACTOR}.kl_loss_coef=0 the loss stays the same"
            + ("" if sized else f"; {size} is needed, too"),
            needing("ref_log_prob"),
        )
    yield _workers(p)
    if several_turns(p):
        yield Advice(
            "tool_ids", "names the ids that only tools write (a setting of check, not of verl)",
            needing("settings.tool_ids"),
        )  # fmt: skip
