"""What must hold between configuration values, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.retention import Retention
from dataproto_audit.trainer.critic import check_critic
from dataproto_audit.trainer.idle import check_engines
from dataproto_audit.trainer.ranges import check_each
from dataproto_audit.trainer.rate_keys import check_rates
from dataproto_audit.trainer.rates import KEY as OPTIM
from dataproto_audit.trainer.sizes import (
    check_limit,
    check_rows,
    data_parallel_size,
    refuse_limit,
    world_size,
)
from dataproto_audit.trainer.workers.spec import with_critic, with_reference

GROUP_RELATIVE = ("grpo",)


def validate(config: DictConfig) -> None:
    """Raise :class:`UsageError` for the first value that cannot work, naming keys and numbers.

    Nothing is opened and nothing started; what the data, the model and the run folder say comes
    after. There is one path: ``run`` and ``plan`` call :func:`.preflight.prepare`, which begins
    here, so that callers from Python are checked too. The command ``train`` calls this by itself
    once before, to answer a wrong value without the imports that a run needs.
    """
    check_each(config)
    check_engines(config)
    if config.audit.trace != "off":
        Retention.parse(config.audit.trace, key="audit.trace")
    _one_machine(config)
    _temperature(config)
    _names(config)
    _files(config.data)
    _groups(config)
    _fsdp(config)
    check_rates(config.actor_rollout_ref.actor.optim, config.trainer, key=OPTIM)
    _divisible(config)
    _token_limits(config)
    _lengths(config)
    check_critic(config)
    _resume(config)


def _one_machine(config: DictConfig) -> None:
    if config.trainer.nnodes != 1:
        raise UsageError(
            "DPA851",
            f"trainer.nnodes is {config.trainer.nnodes}; this trainer runs on one machine.",
            "Set it to 1. Runs over several nodes: attach to verl (docs/attaching.md).",
        )


def _temperature(config: DictConfig) -> None:
    if config.actor_rollout_ref.rollout.temperature <= 0:
        raise UsageError(
            "DPA851",
            "actor_rollout_ref.rollout.temperature is 0 or less: training samples need chance.",
            "Set it above 0; validation has val_kwargs.temperature of its own.",
        )


def _names(config: DictConfig) -> None:
    name = config.trainer.experiment_name
    if not name.strip() or "/" in name or "\\" in name or not name.isprintable():
        raise UsageError(
            "DPA851",
            f"trainer.experiment_name is {name!r}; it names the run, not a folder.",
            "Use letters, digits, dots and dashes; trainer.run_dir takes a path.",
        )
    if not config.actor_rollout_ref.model.tiny.charset:
        raise UsageError(
            "DPA851",
            "actor_rollout_ref.model.tiny.charset is empty.",
            "Use digits, arithmetic, ascii, or the characters themselves.",
        )


def _files(data: Any) -> None:
    for key in ("train_files", "val_files"):
        files = data[key]
        listed: Any = [files] if isinstance(files, str) else files
        if listed is None or listed == [""]:
            continue
        if not isinstance(listed, Sequence) or not all(isinstance(f, str) for f in listed):
            raise UsageError(
                "DPA851", f"data.{key} is {files!r}.", "Give the path of a file, or a list of them."
            )
        for file in listed:
            if not Path(file).is_file():
                raise UsageError("DPA857", f"{file}: no such file.", f"Check data.{key}.")


def _groups(config: DictConfig) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_RELATIVE and n < 2:
        raise UsageError(
            "DPA855",
            f"algorithm.adv_estimator={estimator} compares the samples of a prompt, but "
            f"actor_rollout_ref.rollout.n is {n}.",
            "Set rollout.n to 2 or more.",
        )


def _fsdp(config: DictConfig) -> None:
    roles = config.actor_rollout_ref
    if "fsdp2" not in (roles.actor.strategy, roles.ref.strategy, config.critic.strategy):
        return
    from dataproto_audit.trainer.backends.device import training_device
    from dataproto_audit.trainer.backends.fsdp_limits import check_layout
    from dataproto_audit.trainer.workers.spec import fsdp_options, model_spec

    check_layout(
        model_spec(config, model_path=""),
        fsdp_options(config),
        world_size=world_size(config),
        device=training_device().type,
    )


def _divisible(config: DictConfig) -> None:
    there = {"actor": True, "ref": with_reference(config), "critic": with_critic(config)}
    for role in (role for role, held in there.items() if held):
        check_rows(config, role)
    world, warmup = data_parallel_size(config), config.warmup
    if warmup.steps and warmup.batch_size % world:
        raise UsageError(
            "DPA854",
            f"warmup.batch_size={warmup.batch_size} rows do not divide over {world} ranks.",
            "Make warmup.batch_size a multiple of the number of ranks.",
        )


def _token_limits(config: DictConfig) -> None:
    roles = config.actor_rollout_ref
    for role, switch, name in (
        ("actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
        ("rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        ("ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    ):
        key, limit = f"actor_rollout_ref.{role}.{name}", roles[role][name]
        if roles[role][switch]:
            check_limit(key, limit, config.data)
        else:
            refuse_limit(key, limit, switch=f"actor_rollout_ref.{role}.{switch}")


def _lengths(config: DictConfig) -> None:
    """Prompt and response together fit into what the engine and the tiny model take."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    roles, key = config.actor_rollout_ref, "actor_rollout_ref.rollout.max_model_len"
    limit = roles.rollout.max_model_len
    if limit is not None and limit < longest:
        raise UsageError(
            "DPA851",
            f"{key} is {limit}, less than {what}.",
            f"Set it to {longest} or more, or leave it empty.",
        )
    tiny = "actor_rollout_ref.model.tiny.max_position_embeddings"
    most = roles.model.tiny.max_position_embeddings
    if roles.model.path:
        return
    if most < longest:
        raise UsageError(
            "DPA851", f"{tiny} is {most}, less than {what}.", f"Set it to {longest} or more."
        )
    if limit is not None and limit > most:
        raise UsageError(
            "DPA851", f"{key} is {limit}, more than {tiny}, {most}.", "Lower it, or raise that."
        )


def _resume(config: DictConfig) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "path" and not trainer.resume_from_path:
        raise UsageError(
            "DPA851", "trainer.resume_mode=path needs a folder.", "Set trainer.resume_from_path."
        )
    if trainer.resume_mode == "auto" and not trainer.run_dir:
        raise UsageError(
            "DPA851",
            "trainer.resume_mode=auto looks into trainer.run_dir, which is not set.",
            "Set trainer.run_dir to the folder of the run to go on with.",
        )
