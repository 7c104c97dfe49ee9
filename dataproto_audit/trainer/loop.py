"""The training loop: one line a stage, every stage behind the auditor.

The order is that of verl's ``fit``: prompts, repeat and rollout, union, balance, reward, old
log-probs, reference log-probs, values, KL in the reward, advantage, critic update, actor update,
checkpoint, weight sync, validation. Weights are sent in every step, also while only the critic
learns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig

from dataproto_audit.auditor import Auditor
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from dataproto_audit.trainer.algorithms.kl import kl_per_token
from dataproto_audit.trainer.batching import balance
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.metrics import batch_metrics, kl_metrics
from dataproto_audit.trainer.sizes import data_parallel_size
from dataproto_audit.trainer.workers.spec import with_critic, with_reference

STAGES = (
    "prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob",
    "values", "kl_reward", "advantage", "update_critic", "update_actor", "sync_weights",
    "validation",
)  # fmt: skip

Work = Callable[[DataProto], DataProto]


def stages_of(config: DictConfig) -> tuple[str, ...]:
    """The stages of :data:`STAGES` that a run of ``config`` goes through."""
    trainer = config.trainer
    left_out = set() if with_reference(config) else {"ref_log_prob"}
    if not with_critic(config):
        left_out |= {"values", "update_critic"}
    if not config.algorithm.use_kl_in_reward:
        left_out.add("kl_reward")
    if trainer.critic_warmup > trainer.total_training_steps:
        left_out.add("update_actor")
    if trainer.test_freq <= 0 and not trainer.val_before_train:
        left_out.add("validation")
    return tuple(stage for stage in STAGES if stage not in left_out)


class Prompts(Protocol):
    """Batches of prompts, the same one for the same step."""

    def batch(self, step: int) -> DataProto:
        """The batch of ``step``."""
        ...

    def one_pass(self) -> Iterator[DataProto]:
        """Every row once, in batches."""
        ...


class Progress(Protocol):
    """Who is told how far the run is."""

    def stage(self, step: int, name: str) -> None:
        """``step`` enters the stage ``name``."""
        ...

    def step_done(
        self, step: int, metrics: Mapping[str, float], findings_count: Mapping[str, int]
    ) -> None:
        """``step`` is done; findings of the run so far by severity."""
        ...


@dataclass
class Parts:
    """What the loop drives. Every callable takes and returns a batch."""

    prompts: Prompts
    validation: Prompts | None
    generate: Callable[[DataProto, Mapping[str, Any], bool], DataProto]
    """Rows, changed sampling settings, and whether this is validation."""
    score: Work
    old_log_prob: Work
    ref_log_prob: Work | None
    values: Work | None
    update_critic: Callable[[DataProto, int], DataProto]
    update_actor: Callable[[DataProto, int], DataProto]
    export_weights: Callable[[], Any]
    load_weights: Callable[[Any, int], DataProto]
    save: Callable[[int], None]


@dataclass
class Loop:
    """One run. ``step`` is the last finished step, ``trained`` counts those of this process, and
    ``rewards`` holds the mean score of each step.

    A stage may leave ``meta_info["notes"]``: what it knows beside the batch (metrics, rank notes,
    loss terms). Notes are handed to the boundary as evidence and go no further.
    """

    config: DictConfig
    parts: Parts
    auditor: Auditor
    progress: Progress
    callbacks: Callbacks = field(default_factory=Callbacks)
    step: int = 0
    trained: int = 0
    rewards: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def fit(self) -> None:
        """Train from the step after ``step`` to the last configured one."""
        trainer = self.config.trainer
        last = int(trainer.total_training_steps)
        self.auditor.begin_step(self.step)
        self.sync(self.step)
        if trainer.val_before_train:
            self.validate(self.step)
        self.auditor.end_step(self.metrics)
        for step in range(self.step + 1, last + 1):
            self.auditor.begin_step(step)
            self.metrics = {}
            self.train_step(step)
            if trainer.save_freq > 0 and (step == last or step % trainer.save_freq == 0):
                with self.clock("save_checkpoint"):
                    self.parts.save(step)
            self.sync(step)
            if trainer.test_freq > 0 and (step == last or step % trainer.test_freq == 0):
                self.validate(step)
            self.auditor.end_step(self.metrics)
            self.step = step
            self.trained += 1
            self.progress.step_done(step, self.metrics, dict(self.auditor.severities))

    def train_step(self, step: int) -> None:
        """Sample, score and learn from one batch of prompts."""
        config, parts = self.config, self.parts
        n = int(config.actor_rollout_ref.rollout.n)
        prompts = self.run(
            "prompts", step, lambda _: self.with_uids(parts.prompts.batch(step), step)
        )
        rows = prompts.repeat(n, interleave=True)
        sampled = self.run("rollout", step, lambda _: self.generate(rows, step), prompts)
        batch = self.run("union", step, rows_without_ids(rows).union, sampled)
        if config.trainer.balance_batch:
            batch = self.run("balance", step, self.balance, batch)
        batch = self.run("reward", step, parts.score, batch)
        batch = self.run("old_log_prob", step, parts.old_log_prob, batch)
        if parts.ref_log_prob is not None:
            batch = self.run("ref_log_prob", step, parts.ref_log_prob, batch)
        if parts.values is not None:
            batch = self.run("values", step, parts.values, batch)
        if config.algorithm.use_kl_in_reward:
            batch = self.run("kl_reward", step, self.kl_reward, batch)
        batch = self.run("advantage", step, self.advantage, batch)
        if parts.values is not None:
            batch = self.run("update_critic", step, lambda b: parts.update_critic(b, step), batch)
        if step >= config.trainer.critic_warmup:
            batch = self.run("update_actor", step, lambda b: parts.update_actor(b, step), batch)
        self.metrics |= batch_metrics(batch)
        self.rewards.append(self.metrics["critic/score/mean"])

    def run(self, stage: str, step: int, work: Work, batch: DataProto | None = None) -> DataProto:
        """Do one stage between its two boundaries. What ``work`` returns joins ``batch``."""
        self.progress.stage(step, stage)
        if batch is not None:
            self.auditor.boundary(stage, batch, when="before")
        with self.clock(stage):
            out = work(DataProto() if batch is None else batch)
        for hook in self.callbacks.after_stage:
            hook(step, stage, out)
        notes = out.meta_info.pop("notes", {}) | self.callbacks.evidence_of(step, stage, out)
        self.metrics |= notes.get("metrics", {})
        self.auditor.boundary(stage, out, evidence=notes)
        return out

    # -- the stages that run on the driver ---------------------------------------------------------

    def with_uids(self, prompts: DataProto, step: int) -> DataProto:
        """One uid per prompt, the same ones when a step is repeated after a resume."""
        random = np.random.Generator(np.random.PCG64([int(self.config.trainer.seed), step]))
        uids = [str(uuid.UUID(bytes=random.bytes(16), version=4)) for _ in range(len(prompts))]
        prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        prompts.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return prompts

    def generate(self, rows: DataProto, step: int) -> DataProto:
        """Responses for ``rows``, sampled as configured."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling: dict[str, Any] = {
            "temperature": float(rollout.temperature),
            "top_p": float(rollout.top_p),
            "top_k": int(rollout.top_k),
        }
        for hook in self.callbacks.sampling:
            sampling = hook(step, sampling)
        rows.meta_info["global_steps"] = step
        return self.parts.generate(rows, sampling, False)

    def balance(self, batch: DataProto) -> DataProto:
        """Reorder rows so that the ranks' contiguous chunks hold about equally many tokens."""
        lengths = batch.batch["attention_mask"].sum(1)
        order = balance(lengths.numpy(), ranks=data_parallel_size(self.config))
        batch.reorder(torch.from_numpy(order))
        return batch

    def kl_reward(self, batch: DataProto) -> DataProto:
        """Rewards are the scores less the weighted KL to the reference model."""
        algorithm, tensors = self.config.algorithm, batch.batch
        kl = kl_per_token(
            tensors["old_log_probs"], tensors["ref_log_prob"], estimator=algorithm.kl_penalty
        )
        kl = torch.where(tensors["response_mask"] != 0, kl, 0.0)
        weight = float(algorithm.kl_ctrl.kl_coef)
        tensors["token_level_rewards"] = tensors["token_level_scores"] - weight * kl
        self.metrics |= kl_metrics(kl, tensors["response_mask"], weight)
        return batch

    def advantage(self, batch: DataProto) -> DataProto:
        """Rewards, the scores unless a KL was taken off, to advantages by the estimator."""
        algorithm, tensors = self.config.algorithm, batch.batch
        if not algorithm.use_kl_in_reward:
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        inputs = AdvantageInputs(
            token_level_rewards=tensors["token_level_rewards"],
            response_mask=tensors["response_mask"],
            uid=batch.non_tensor_batch["uid"],
            values=tensors.get("values"),
            options={
                "norm_adv_by_std_in_grpo": bool(algorithm.norm_adv_by_std_in_grpo),
                "gamma": float(algorithm.gamma),
                "lam": float(algorithm.lam),
            },
        )
        tensors["advantages"], tensors["returns"] = compute_advantages(
            algorithm.adv_estimator, inputs
        )
        return batch

    # -- weights and validation --------------------------------------------------------------------

    def sync(self, step: int) -> None:
        """Send the trainer's weights to the rollout engine."""
        with self.clock("export_weights"):
            weights = self.parts.export_weights()
        for hook in self.callbacks.before_sync:
            weights = hook(step, weights)
        self.run("sync_weights", step, lambda _: self.parts.load_weights(weights, step))

    def validate(self, step: int) -> None:
        """Score responses to held-out prompts, sampled as ``rollout.val_kwargs`` says."""
        if self.parts.validation is None:
            return
        n, scores = int(self.config.actor_rollout_ref.rollout.val_kwargs.n), []
        for prompts in self.parts.validation.one_pass():
            rows = prompts.repeat(n, interleave=True)
            rows.meta_info["global_steps"] = step

            def work(_: DataProto, rows: DataProto = rows) -> DataProto:
                answered = rows_without_ids(rows).union(self.parts.generate(rows, {}, True))
                return self.parts.score(answered)

            scored = self.run("validation", step, work)
            scores += scored.batch["token_level_scores"].sum(1).tolist()
        self.metrics["val-core/score/mean"] = sum(scores) / max(1, len(scores))

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to the step's ``timing_s`` and the run's total."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            key = f"timing_s/{name}"
            self.metrics[key] = self.metrics.get(key, 0.0) + spent
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def rows_without_ids(rows: DataProto) -> DataProto:
    """The prompt side of the union: non-tensor fields only; tensors come with the responses."""
    return DataProto(non_tensor_batch=rows.non_tensor_batch, meta_info=dict(rows.meta_info))
