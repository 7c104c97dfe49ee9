"""One training run from configuration to summary: starts everything, drives the loop, stops it all.

Start-up overlaps: the engine and the ranks import their libraries side by side, and the supervised
warm-up runs while the engine still loads.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataproto_audit.auditor import Auditor
from dataproto_audit.codes import RunError
from dataproto_audit.dump.layout import MEAN_OVER
from dataproto_audit.dump.run_folder import RunFolder
from dataproto_audit.dump.trace import TRACE_DIR, TraceWriter
from dataproto_audit.findings import OUTCOME_KINDS, SEVERITIES, AuditError
from dataproto_audit.render.terminal import Progress
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.cpu import CpuMeter
from dataproto_audit.trainer.data import warmup_batch
from dataproto_audit.trainer.evidence import SyncProbe, audit_settings
from dataproto_audit.trainer.interrupts import Interrupts
from dataproto_audit.trainer.lineage import lineage
from dataproto_audit.trainer.loop import Loop, stages_of
from dataproto_audit.trainer.parts import build_parts
from dataproto_audit.trainer.preflight import Inputs, prepare, settle_model
from dataproto_audit.trainer.remedies import real_remedies
from dataproto_audit.trainer.resume import CHECKPOINTS, MODEL, Resumed
from dataproto_audit.trainer.rollout.group import Rollout
from dataproto_audit.trainer.sizes import data_parallel_size, world_size
from dataproto_audit.trainer.workers import hang
from dataproto_audit.trainer.workers.cluster import cluster, ray_options
from dataproto_audit.trainer.workers.group import WorkerGroup
from dataproto_audit.trainer.workers.spec import strategy_of, with_critic, worker_spec

log = logging.getLogger("dataproto_audit")


@dataclass
class Result:
    """The summary of a run, and the finding that stopped it, if one did."""

    summary: dict[str, Any]
    stopped_by: AuditError | None = None


def run(config: DictConfig, *, callbacks: Callbacks | None = None) -> Result:
    """Train as configured; ``summary.json`` in the run folder holds the summary too.

    Raises:
        UsageError: the configuration cannot work; nothing was started.
        RunError: a worker, the engine, the reward function or the disk failed. Tables and
            checkpoints up to the last finished step are kept, and no process is left.
    """
    callbacks = callbacks or Callbacks()
    began = time.monotonic()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        with tempfile.TemporaryDirectory(prefix="dpa-") as scratch:
            prepared = prepare(config, Path(scratch))
            place, inputs = prepared.place, prepared.inputs
            checkpoint = place.checkpoint
            folder = stack.enter_context(
                RunFolder.create(
                    place.run_dir,
                    config=OmegaConf.to_yaml(config),
                    existing=place.existing,
                    resume_after=checkpoint.step if checkpoint else None,
                    also_owned=(TRACE_DIR, CHECKPOINTS, MODEL),
                )
            )
            settle_model(config, inputs, folder.path)
        saved = folder.path / CHECKPOINTS
        stack.enter_context(real_remedies(saved, save_freq=int(config.trainer.save_freq)))
        progress = stack.enter_context(Progress())
        for warning in prepared.warnings:
            progress.message(f"warning: {warning}")
        settings = audit_settings(config, inputs.model.tokenizer, inputs.model.vocab_size)
        trace = _trace(config, folder.path, asdict(settings), checkpoint)
        if trace is not None:
            stack.callback(_close, trace)
        auditor = Auditor(
            settings,
            level=config.audit.level,
            on_fail=config.audit.on_fail,
            tables=folder.tables,
            trace=trace,
            policy=prepared.policy,
        )
        stack.enter_context(cluster(**ray_options(config)))
        interrupts.take()  # Ray has set a handler of its own
        workers, rollout = _start(config, inputs, stack, progress, checkpoint)
        if threading.current_thread() is threading.main_thread():
            hang.report_on_signal(workers.notes)
        meter = CpuMeter()
        loop = _loop(config, inputs, workers, rollout, auditor, callbacks, progress, meter, folder)
        if checkpoint:
            loop.step = checkpoint.step
            workers.load_checkpoint(checkpoint.path)
            loop.rewards += checkpoint.extra["rewards"]
        meter.start([os.getpid(), *workers.pids, int((rollout.info or {})["pid"])])
        total, stages = int(config.trainer.total_training_steps), stages_of(config)
        progress.start(total, stages, first_step=loop.step + 1)
        folder.begin()  # nothing of an earlier run is lost while this one may fail to start
        stopped_by: AuditError | None = None
        try:
            loop.fit()
        except AuditError as error:
            stopped_by = AuditError(error.findings, str(folder.path))
        progress.stop()
        if trace is not None:
            _close(trace)
            auditor.cpu_s += trace.cpu_s
        summary = _summary(config, loop, auditor, meter, folder, time.monotonic() - began)
        if stopped_by:
            summary["stopped_by"] = stopped_by.findings[0].to_dict()
        folder.finish(summary)
    return Result(summary, stopped_by)


def _trace(
    config: DictConfig, folder: Path, settings: dict[str, Any], resumed: Resumed | None
) -> TraceWriter | None:
    """The recorder of boundaries, as ``audit.trace`` says."""
    if "off" in (config.audit.trace, config.audit.level):
        return None
    after = resumed.step if resumed else None
    return TraceWriter(
        folder / TRACE_DIR, retention=config.audit.trace, settings=settings, after=after
    )


def _close(trace: TraceWriter) -> None:
    """Finish the trace; a disk that refuses is reported and harms nothing else."""
    try:
        trace.close()
    except RunError as error:
        log.error("DPA905 the trace is not complete: %s", error)


def plan(config: DictConfig) -> dict[str, Any]:
    """What a run would do, after checking all that can be checked without starting anything."""
    with tempfile.TemporaryDirectory(prefix="dpa-") as scratch:
        prepared = prepare(config, Path(scratch))
        inputs = prepared.inputs
        first = inputs.prompts.batch(1)
    roles, world = config.actor_rollout_ref, world_size(config)
    chunks = data_parallel_size(config)
    rows = config.data.train_batch_size * roles.rollout.n
    mini = roles.actor.ppo_mini_batch_size * roles.rollout.n
    return {
        "model": {
            "path": roles.model.path or "made on the spot",
            "vocab_size": inputs.model.vocab_size,
            "stop_ids": list(inputs.model.tokenizer.stop_ids),
        },
        "data": {
            "rows": len(inputs.prompts),
            "overlong_prompts_left_out": inputs.prompts.overlong,
            "first_prompt": str(first.non_tensor_batch["raw_prompt"][0]),
        },
        "ranks": world,
        "rows_per_step": rows,
        "rows_per_rank": rows // chunks,
        "mini_batches_per_step": rows // mini * roles.actor.ppo_epochs,
        "rows_per_mini_batch_and_rank": mini // chunks,
        "engine": roles.rollout.name,
        "stages": list(stages_of(config)),
        **({"critic": _critic_plan(config)} if with_critic(config) else {}),
        "steps": config.trainer.total_training_steps,
        **_resume_plan(prepared.place.checkpoint),
        "warnings": list(prepared.warnings),
        "audit": {"level": config.audit.level, "on_fail": config.audit.on_fail},
    }


def _resume_plan(checkpoint: Resumed | None) -> dict[str, Any]:
    """What a run goes on from, and newer checkpoints that cannot be read."""
    if checkpoint is None:
        return {"resumes_after": None}
    plan: dict[str, Any] = {
        "resumes_after": checkpoint.step,
        "resumes_from": str(checkpoint.path),
        "checkpoints_passed_over": [str(passed) for passed in checkpoint.passed],
    }
    return plan


def _critic_plan(config: DictConfig) -> dict[str, Any]:
    """What the critic of a run would do."""
    spec = worker_spec(config, model_path="")
    assert spec.critic is not None, "asked for with a critic only"
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    update = spec.critic.update
    return {
        "strategy": strategy_of(spec, "critic"),
        "mini_batches_per_step": rows // update.mini_batch_size * update.epochs,
        "steps_before_the_policy_learns": max(0, config.trainer.critic_warmup - 1),
    }


def _start(
    config: DictConfig,
    inputs: Inputs,
    stack: ExitStack,
    progress: Progress,
    checkpoint: Resumed | None,
) -> tuple[WorkerGroup, Rollout]:
    """Ranks and engine, loaded, the policy warmed up. Stopped when the stack unwinds."""
    path, data = str(inputs.model.path.absolute()), config.data
    rollout = Rollout.start(
        config.actor_rollout_ref.rollout,
        path,
        tokenizer=inputs.model.tokenizer,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        attn_implementation=config.actor_rollout_ref.model.attn_implementation,
    )
    stack.callback(rollout.shutdown)
    workers = WorkerGroup(worker_spec(config, model_path=path), world_size=world_size(config))
    stack.callback(workers.shutdown)
    ranks = world_size(config)
    progress.message(
        f"starting {ranks} {'rank' if ranks == 1 else 'ranks'} and "
        f"{config.actor_rollout_ref.rollout.name}, "
        "which takes about half a minute"
    )
    warmup = config.warmup
    supervised = None
    if warmup.steps and not checkpoint:
        supervised = warmup_batch(
            data, inputs.model.tokenizer, steps=warmup.steps, batch_size=warmup.batch_size
        )
    if checkpoint:
        progress.message(str(checkpoint))
    workers.build()
    if supervised is not None:
        losses = workers.warmup(supervised, steps=warmup.steps, lr=warmup.lr)
        progress.message(
            f"{warmup.steps} supervised steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
    rollout.ready()
    return workers, rollout


def _loop(
    config: DictConfig,
    inputs: Inputs,
    workers: WorkerGroup,
    rollout: Rollout,
    auditor: Auditor,
    callbacks: Callbacks,
    progress: Progress,
    meter: CpuMeter,
    folder: RunFolder,
) -> Loop:
    if config.audit.level == "full":
        temperature = float(config.actor_rollout_ref.rollout.temperature)
        every = int(config.audit.sync_probe_every)
        SyncProbe(workers, rollout, meter, temperature, every).register(callbacks)
    rewards: list[float] = []
    parts = build_parts(
        config,
        workers=workers,
        rollout=rollout,
        prompts=inputs.prompts,
        validation=inputs.validation,
        score=inputs.score,
        checkpoints=folder.path / CHECKPOINTS,
        made_with=lineage(config, inputs.model),
        rewards=rewards,
        meter=meter,
    )
    return Loop(config, parts, auditor, progress, callbacks, rewards=rewards)


def _summary(
    config: DictConfig,
    loop: Loop,
    auditor: Auditor,
    meter: CpuMeter,
    folder: RunFolder,
    wall_s: float,
) -> dict[str, Any]:
    """The documented keys, and what a person asks next."""
    rewards, spent = loop.rewards, meter.spent_s()
    audit_s = auditor.cpu_s + meter.audit_s
    steps = max(1, loop.trained)
    first, last = rewards[:MEAN_OVER], rewards[-MEAN_OVER:]
    every = {probe.name: probe.every for probe in auditor.probes.values() if probe.every > 1}
    if config.audit.level == "full" and config.audit.sync_probe_every > 1:
        every["engine_scores_alike"] = int(config.audit.sync_probe_every)
    return {
        "run_dir": str(folder.path),
        "steps": loop.step,
        "resumed_after": loop.step - loop.trained or None,
        "reward_mean_over": min(MEAN_OVER, len(rewards)),
        "reward_first": sum(first) / len(first) if first else None,
        "reward_last": sum(last) / len(last) if last else None,
        "boundaries": auditor.boundaries,
        "outcomes": {kind: auditor.outcomes[kind] for kind in OUTCOME_KINDS},
        "findings": {severity: auditor.severities[severity] for severity in SEVERITIES},
        "audit_cpu_share": audit_s / spent if spent > 0 else 0.0,
        "audit_cpu_ms_per_step": 1e3 * audit_s / steps,
        "audit_cpu_s": {"checks_and_tables": auditor.cpu_s, "evidence": meter.audit_s},
        "cpu_ms_per_step": 1e3 * spent / steps,
        "cpu_s": meter.total_s(),
        "samples_per_cpu_s": steps
        * config.data.train_batch_size
        * config.actor_rollout_ref.rollout.n
        / max(spent, 1e-9),
        "undeclared_fields": sorted(auditor.undeclared),
        "stages": list(auditor.stages),
        "stage_wall_s": dict(loop.seconds),
        "every": every,
        "backend": config.actor_rollout_ref.actor.strategy,
        "world_size": world_size(config),
        "wall_s": wall_s,
        "tables": str(folder.path / "tables"),
    }
