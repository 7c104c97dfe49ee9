"""What must hold between configuration values, checked before anything starts."""

from __future__ import annotations

from omegaconf import DictConfig

from dataproto_audit.auditor import LEVELS, ON_FAIL
from dataproto_audit.codes import UsageError

CHOICES: dict[str, tuple[str, ...]] = {
    "audit.level": LEVELS,
    "audit.on_fail": ON_FAIL,
    "data.truncation": ("error", "left", "right"),
    "data.prompt_style": ("verbatim", "expression"),
    "actor_rollout_ref.actor.strategy": ("fsdp2",),
    "actor_rollout_ref.actor.fsdp_config.wrap": ("root", "layer"),
    "actor_rollout_ref.actor.optim.name": ("adamw", "sgd"),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "actor_rollout_ref.rollout.name": ("vllm", "hf"),
    "algorithm.adv_estimator": ("grpo",),
    "trainer.resume_mode": ("disable", "auto", "path"),
}
GROUP_RELATIVE = ("grpo",)


def validate(config: DictConfig) -> None:
    """Raise :class:`UsageError` for the first value that cannot work, naming keys and numbers."""
    _choices(config)
    _positive(config)
    _groups(config)
    _divisible(config)
    _token_limits(config)
    _resume(config)


def world_size(config: DictConfig) -> int:
    """Training ranks of the run."""
    return int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)


def _value(config: DictConfig, key: str) -> object:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _choices(config: DictConfig) -> None:
    for key, choices in CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            listed = ", ".join(choices)
            raise UsageError("DPA851", f"{key} is {value!r}.", f"Choose one of: {listed}.")


def _positive(config: DictConfig) -> None:
    for key in (
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_epochs",
        "trainer.total_training_steps",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.collective_timeout_s",
    ):
        value = _value(config, key)
        if not isinstance(value, (int, float)) or value <= 0:
            raise UsageError("DPA851", f"{key} is {value}.", "It must be positive.")
    if config.trainer.nnodes != 1:
        raise UsageError(
            "DPA851",
            f"trainer.nnodes is {config.trainer.nnodes}; this trainer runs on one machine.",
            "Set it to 1. Runs over several nodes: attach to verl (docs/attaching.md).",
        )
    if config.actor_rollout_ref.rollout.temperature <= 0:
        raise UsageError(
            "DPA851",
            "actor_rollout_ref.rollout.temperature is 0 or less: training samples need chance.",
            "Set it above 0; validation has val_kwargs.temperature of its own.",
        )


def _groups(config: DictConfig) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_RELATIVE and n < 2:
        raise UsageError(
            "DPA855",
            f"algorithm.adv_estimator={estimator} compares the samples of a prompt, but "
            f"actor_rollout_ref.rollout.n is {n}.",
            "Set rollout.n to 2 or more.",
        )


def _divisible(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    prompts, n, world = (
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        world_size(config),
    )
    mini = actor.ppo_mini_batch_size
    if prompts % mini:
        raise UsageError(
            "DPA854",
            f"data.train_batch_size={prompts} prompts do not divide into mini-batches of "
            f"actor.ppo_mini_batch_size={mini}.",
            f"Choose a divisor of {prompts}.",
        )
    if (mini * n) % world:
        raise UsageError(
            "DPA854",
            f"a mini-batch of {mini} prompts x n={n} is {mini * n} rows, which do not divide over "
            f"{world} ranks.",
            "Change ppo_mini_batch_size, rollout.n or n_gpus_per_node.",
        )
    micro = actor.ppo_micro_batch_size_per_gpu
    if micro and not actor.use_dynamic_bsz and (mini * n // world) % micro:
        raise UsageError(
            "DPA854",
            f"{mini * n // world} rows of a mini-batch on each rank do not divide into "
            f"micro-batches of actor.ppo_micro_batch_size_per_gpu={micro}.",
            f"Choose a divisor of {mini * n // world}.",
        )


def _token_limits(config: DictConfig) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    roles = config.actor_rollout_ref
    for key, on, limit in (
        ("actor.ppo_max_token_len_per_gpu", roles.actor.use_dynamic_bsz,
         roles.actor.ppo_max_token_len_per_gpu),
        ("rollout.log_prob_max_token_len_per_gpu", roles.rollout.log_prob_use_dynamic_bsz,
         roles.rollout.log_prob_max_token_len_per_gpu),
        ("ref.log_prob_max_token_len_per_gpu", roles.ref.log_prob_use_dynamic_bsz,
         roles.ref.log_prob_max_token_len_per_gpu),
    ):  # fmt: skip
        if not on:
            continue
        if limit is None:
            raise UsageError("DPA851", f"{key} is not set.", "Dynamic micro-batches need a limit.")
        if limit < longest:
            raise UsageError(
                "DPA856",
                f"{key}={limit} is below the longest possible row of {longest} tokens "
                f"(max_prompt_length + max_response_length).",
                f"Set it to {longest} or more; a row cannot be split.",
            )


def _resume(config: DictConfig) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "path" and not trainer.resume_from_path:
        raise UsageError(
            "DPA851", "trainer.resume_mode=path needs a folder.", "Set trainer.resume_from_path."
        )
