"""What the trainer tells the auditor beside the batch: its settings, and a sample scored twice.

The sample is a hook of :mod:`.callbacks`; the loop runs the same with or without it. What it costs
in any process is metered as auditing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.auditor import Settings
from dataproto_audit.checker.config import settings_from
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.cpu import CpuMeter
from dataproto_audit.trainer.rollout.group import Rollout
from dataproto_audit.trainer.sizes import data_parallel_size
from dataproto_audit.trainer.tokenizer import Tokenizer
from dataproto_audit.trainer.workers.group import WorkerGroup

PROBED_ROWS = 8
"""Rows that engine and trainer both score after a sync; rounded up to a multiple of the ranks."""


def audit_settings(config: DictConfig, tokenizer: Tokenizer, vocab_size: int) -> Settings:
    """What the run is configured to do, in the words of the probes."""
    roles = config.actor_rollout_ref
    compute = roles.actor.fsdp_config.param_dtype
    known, _ = settings_from(config, {})
    return replace(
        known,
        multi_turn=False,
        rejection=False,
        stop_ids=tuple(tokenizer.stop_ids),
        pad_id=tokenizer.pad_id,
        vocab_size=vocab_size,
        world_size=data_parallel_size(config),
        trainer_dtype=compute if compute != "float32" else roles.model.dtype,
        ref_from_actor=True,
        on_policy=True,
    )


@dataclass
class SyncProbe:
    """Log-probs of a few rows by trainer and engine, after the sync of every ``every``-th step."""

    workers: WorkerGroup
    rollout: Rollout
    meter: CpuMeter
    temperature: float
    every: int
    batch: DataProto | None = None

    def register(self, callbacks: Callbacks) -> None:
        """Listen to the loop."""
        callbacks.after_stage.append(self._remember)
        callbacks.evidence.setdefault("sync_weights", []).append(self)

    def _remember(self, step: int, stage: str, batch: DataProto) -> None:
        if stage == "advantage":
            self.batch = batch

    def __call__(self, step: int, batch: DataProto) -> Mapping[str, Any]:
        """Evidence for the boundary after the sync of ``step``."""
        if self.batch is None:
            return {"sync_probe_skipped": "no batch yet whose rows could be scored"}
        if self.every <= 0 or (step - 1) % self.every:
            return {"sync_probe_skipped": f"scored every {self.every} steps"}
        with self.meter.auditing():
            return {"sync_probe": self._score(self.batch)}

    def _score(self, batch: DataProto) -> dict[str, Any]:
        world = self.workers.dp_size
        rows = min(len(batch), -(-PROBED_ROWS // world) * world)
        sample = batch.select_idxs(list(range(rows)))
        mask = sample.batch["response_mask"] != 0
        trainer = self.workers.compute_log_prob(sample, entropy=False).batch["old_log_probs"]
        engine = self.rollout.score(sample, temperature=self.temperature)
        return {"trainer": trainer[mask].numpy(), "engine": engine[mask].numpy()}
