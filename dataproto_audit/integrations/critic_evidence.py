"""What the engine's critic told of its update, in the words of the checks of our own critic.

In 0.7.1 the loss is a mean of each micro-batch, summed, and the engine's count of tokens is not
used (D11); it is the count of the loss that is meant, so the loss itself shows it.

Not covered: legacy critics, Megatron's, other aggregations than ``token-mean``, whose count no
micro-batch holds, and a critic in half precision beside an actor in float32, whose precision is the
one that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataproto_audit.integrations.verl_settings import at, computed_in
from dataproto_audit.integrations.worker_files import Answer
from dataproto_audit.probes.noise import FULL
from dataproto_audit.reference.losses import TOKEN_MEAN

FLOAT32 = 2.0**-23


def looks_at_critics(config: Mapping[str, Any]) -> bool:
    """True for engine workers over FSDP: those of 0.9.1, and of 0.7.1 without the legacy ones."""
    legacy = at(config, "trainer.use_legacy_worker_impl")
    backend = str(at(config, "critic.strategy") or "fsdp")
    return legacy in (None, "disable") and backend.startswith("fsdp")


def critic_losses(
    config: Mapping[str, Any], answers: Sequence[Answer]
) -> tuple[list[dict[str, Any]], str]:
    """One entry a mini-batch, its loss the mean over ranks; or none, and why."""
    critic = at(config, "critic") or {}
    mode, clip = critic.get("loss_agg_mode") or TOKEN_MEAN, critic.get("cliprange_value")
    told = [answer.told["losses"] for answer in answers]
    if not all(told) or len({len(losses) for losses in told}) > 1:
        return [], "the critic's workers did not tell of the same mini-batches"
    if mode != TOKEN_MEAN:
        return [], f"the critic's loss is a {mode}, whose count no micro-batch holds"
    if critic.get("loss_scale_factor"):
        return [], "critic.loss_scale_factor is set, and the scaled loss is not recomputed"
    if clip is None:
        return [], "critic.cliprange_value is not set, and the loss is clipped by it"
    full = str(computed_in(at(config, "actor_rollout_ref") or {})).removeprefix("torch.") in FULL
    if full and max(part["eps"] for losses in told for part in losses) > FLOAT32:
        return [], "the critic computes in half precision and the actor does not"
    entries = []
    for number, parts in enumerate(zip(*told, strict=True)):
        entry = {
            "mini_batch": number,
            "vf_loss": sum(part["total"] for part in parts) / len(parts),
            "cliprange_value": float(clip),
            "loss_agg_mode": mode,
        }
        if all("tokens" in part for part in parts):
            entry["normaliser"] = parts[0]["tokens"]
        entries.append(entry)
    return entries, ""
