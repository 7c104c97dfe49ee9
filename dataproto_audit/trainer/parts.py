"""The stages of the loop as functions of a batch, on top of the worker group and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.cpu import CpuMeter
from dataproto_audit.trainer.loop import Parts
from dataproto_audit.trainer.prompts import PromptData
from dataproto_audit.trainer.rollout.group import Rollout
from dataproto_audit.trainer.workers.group import WorkerGroup

NOTES = ("metrics", "losses", "ranks")


def build_parts(
    config: DictConfig,
    *,
    workers: WorkerGroup,
    rollout: Rollout,
    prompts: PromptData,
    validation: PromptData | None,
    score: Callable[[DataProto], DataProto],
    checkpoints: Path,
    rewards: list[float],
    meter: CpuMeter,
    made_with: Mapping[str, Any],
) -> Parts:
    """The loop's parts. ``rewards``, what the data is and ``made_with``, what the model is, are
    saved with each checkpoint.

    At audit level ``full`` a weight sync carries checksums of both sides; ``meter`` is told what
    they cost in the ranks and in the engine.
    """
    checksums = config.audit.level == "full"

    def old_log_prob(batch: DataProto) -> DataProto:
        return joined(batch, workers.compute_log_prob(batch))

    def ref_log_prob(batch: DataProto) -> DataProto:
        return joined(batch, workers.compute_ref_log_prob(batch))

    def values(batch: DataProto) -> DataProto:
        return joined(batch, workers.compute_values(batch))

    def update_critic(batch: DataProto, step: int) -> DataProto:
        return joined(batch, workers.update_critic(batch, step=step - 1))

    def update_actor(batch: DataProto, step: int) -> DataProto:
        first = max(1, int(config.trainer.critic_warmup))
        return joined(batch, workers.update_actor(batch, step=step - first))

    def generate(rows: DataProto, sampling: Mapping[str, Any], validate: bool) -> DataProto:
        return rollout.generate(rows, sampling=sampling, validate=validate)

    def load_weights(weights: Any, step: int) -> DataProto:
        result = rollout.sync_weights(weights, checksum=checksums)
        meter.audit_s += result.evidence_cpu_s
        notes: dict[str, Any] = {
            "engine_checksum": result.checksum,
            "engine_stale": list(result.stale),
            "engine_unreadable": list(result.unreadable),
            "engine_prefix_cache_reset": result.prefix_cache_reset,
        }
        if workers.exported is not None:
            meter.audit_s += workers.exported.cpu_s
            notes["trainer_checksum"] = workers.exported.checksums
        return DataProto(meta_info={"notes": notes})

    def save(step: int) -> None:
        folder = checkpoints / f"step_{step:06d}"
        extra = {"rewards": list(rewards), "data": prompts.identity(), "model": made_with}
        workers.save_checkpoint(folder, step=step, extra=extra)

    return Parts(
        prompts=prompts,
        validation=validation,
        generate=generate,
        score=score,
        old_log_prob=old_log_prob,
        ref_log_prob=ref_log_prob if workers.spec.with_reference else None,
        values=values if workers.spec.critic is not None else None,
        update_critic=update_critic,
        update_actor=update_actor,
        export_weights=lambda: workers.export_weights(checksums=checksums),
        load_weights=load_weights,
        save=save,
    )


def joined(batch: DataProto, out: DataProto) -> DataProto:
    """``out`` merged into ``batch``; what it says about the call becomes the stage's notes."""
    notes = {name: out.meta_info[name] for name in NOTES if name in out.meta_info}
    out.meta_info = {}
    batch.union(out)
    batch.meta_info["notes"] = notes
    return batch
