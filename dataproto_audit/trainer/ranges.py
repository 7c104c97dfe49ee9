"""What each configuration key takes by itself: numbers in a range, words from a list.

What must hold *between* values is in :mod:`.validate`. Not covered: what only the model, the data
or an engine can say (a reward's range, the head sizes that vLLM knows).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

from dataproto_audit.auditor import LEVELS, ON_FAIL
from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.algorithms.losses import AGGREGATION_MODES
from dataproto_audit.trainer.backends.megatron.options import RECOMPUTE
from dataproto_audit.trainer.rates import INCREASES, STYLES, WSD_STYLES
from dataproto_audit.trainer.rates import KEY as OPTIM

CRITIC_OPTIM = "critic.optim"
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
DTYPES = ("float32", "bfloat16", "float16")
MAY_BE_NULL = (
    "actor_rollout_ref.ref.strategy",
    f"{OPTIM}.lr_decay_style",
    f"{CRITIC_OPTIM}.lr_decay_style",
    "critic.strategy",
    "critic.loss_agg_mode",
    "critic.megatron.recompute_granularity",
    "actor_rollout_ref.actor.megatron.recompute_granularity",
    "actor_rollout_ref.ref.megatron.recompute_granularity",
)
ENGINES = ("fsdp2", "megatron")
CHOICES: dict[str, tuple[str, ...]] = {
    "audit.level": LEVELS,
    "audit.on_fail": ON_FAIL,
    "data.truncation": ("error", "left", "right"),
    "data.prompt_style": ("verbatim", "expression"),
    "actor_rollout_ref.model.dtype": DTYPES,
    "actor_rollout_ref.model.attn_implementation": (
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    ),
    "actor_rollout_ref.model.tiny.architecture": ("qwen3",),
    "actor_rollout_ref.actor.strategy": ENGINES,
    "actor_rollout_ref.ref.strategy": ENGINES,
    "critic.strategy": ENGINES,
    "actor_rollout_ref.actor.megatron.recompute_granularity": RECOMPUTE,
    "actor_rollout_ref.ref.megatron.recompute_granularity": RECOMPUTE,
    "critic.megatron.recompute_granularity": RECOMPUTE,
    "actor_rollout_ref.actor.fsdp_config.wrap": ("root", "layer"),
    "actor_rollout_ref.actor.fsdp_config.param_dtype": DTYPES,
    **{
        f"{section}.{name}": choices
        for section in (OPTIM, CRITIC_OPTIM)
        for name, choices in (
            ("name", ("adamw", "sgd")),
            ("lr_decay_style", STYLES),
            ("lr_wsd_decay_style", WSD_STYLES),
            ("weight_decay_incr_style", INCREASES),
        )
    },
    "actor_rollout_ref.actor.kl_loss_type": (
        *KL_ESTIMATORS,
        *(f"{name}+" for name in KL_ESTIMATORS),
    ),
    "actor_rollout_ref.actor.loss_agg_mode": AGGREGATION_MODES,
    "critic.loss_agg_mode": AGGREGATION_MODES,
    "actor_rollout_ref.rollout.name": ("vllm", "hf"),
    "actor_rollout_ref.rollout.dtype": (*DTYPES, "float", "half"),
    "algorithm.adv_estimator": ("grpo", "gae"),
    "algorithm.kl_penalty": KL_ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed",),
    "trainer.resume_mode": ("disable", "auto", "path"),
}
LARGEST = 2**31 - 1
"""Counts end here: engines and numpy's indices take 32 bits."""
LARGEST_BYTES = 2**63 - 1
LARGEST_SEED = 2**32 - 1
"""numpy's legacy generator, which engines seed, takes 32 bits."""
RAY_STORE_BYTES = 75 * 2**20
"""Ray refuses a smaller object store (its OBJECT_STORE_MINIMUM_MEMORY_BYTES)."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both taken; ``above`` leaves ``low`` itself out."""

    low: float
    high: float = LARGEST
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the range."""
        enough = value > self.low if self.above else value >= self.low
        return enough and value <= self.high

    @property
    def bounds(self) -> str:
        """The range for a table: ``> 0, <= 1``."""
        low = f"{'>' if self.above else '>='} {self.low:.15g}"
        if self.high in (LARGEST, LARGEST_BYTES):
            return low
        return f"{low}, <= {self.high:.15g}"

    def remedy(self, value: float) -> str:
        """What to do about ``value``, which the range does not hold. Bounds that are only those of
        the machine's numbers are told where they are the reason."""
        if value > self.high:
            return f"Set it to {self.high:.15g} or less."
        if self.low in (0, 1) and self.high == LARGEST and self.above == (self.low == 0):
            return "It must be positive."
        low = f"above {self.low:.15g}" if self.above else f"{self.low:.15g} or more"
        if self.high == LARGEST:
            return f"Set it to {low}."
        return f"Set it to {low} and at most {self.high:.15g}."


COUNT = Range(1)
PARALLEL_SIZES = {
    "tensor_model_parallel_size": COUNT, "pipeline_model_parallel_size": COUNT,
    "virtual_pipeline_model_parallel_size": Range(2), "context_parallel_size": COUNT,
}  # fmt: skip
FROM_0 = Range(0)
POSITIVE = Range(0, above=True)
SEED = Range(0, LARGEST_SEED)
BYTES = Range(2**20, LARGEST_BYTES)
FREQUENCY = Range(-1)
SHARE = Range(0, 1, above=True)
DISCOUNT = Range(0, 1)
OPTIM_RANGES = {
    "lr": FROM_0, "lr_warmup_steps": FROM_0, "weight_decay": FROM_0, "eps": FROM_0,
    "lr_decay_steps": COUNT, "lr_warmup_init": FROM_0, "min_lr": FROM_0,
    "lr_wsd_decay_steps": COUNT, "start_weight_decay": FROM_0,
}  # fmt: skip

#: Null passes where the schema lets a key be null.
RANGES: dict[str, dict[str, Range]] = {
    "data": {
        "size": COUNT, "max_prompt_length": COUNT, "max_response_length": COUNT,
        "train_batch_size": COUNT, "val_batch_size": COUNT, "seed": SEED,
    },
    "actor_rollout_ref.model.tiny": {
        "hidden_size": COUNT, "intermediate_size": COUNT, "num_hidden_layers": COUNT,
        "num_attention_heads": COUNT, "num_key_value_heads": COUNT, "head_dim": Range(2),
        "max_position_embeddings": COUNT, "initializer_range": POSITIVE, "seed": SEED,
    },
    "actor_rollout_ref.actor": {
        "ppo_mini_batch_size": COUNT, "ppo_micro_batch_size_per_gpu": COUNT,
        "ppo_max_token_len_per_gpu": COUNT, "ulysses_sequence_parallel_size": COUNT,
        "ppo_epochs": COUNT, "clip_ratio": FROM_0,
        "clip_ratio_low": FROM_0, "clip_ratio_high": FROM_0, "clip_ratio_c": Range(1, above=True),
        "kl_loss_coef": FROM_0, "grad_clip": POSITIVE,
    },
    "actor_rollout_ref.actor.fsdp_config": {"fsdp_size": Range(-1)},
    "actor_rollout_ref.actor.megatron": PARALLEL_SIZES,
    "actor_rollout_ref.ref.megatron": PARALLEL_SIZES,
    OPTIM: OPTIM_RANGES,
    "actor_rollout_ref.ref": {
        "log_prob_micro_batch_size_per_gpu": COUNT, "log_prob_max_token_len_per_gpu": COUNT,
    },
    "actor_rollout_ref.rollout": {
        "n": COUNT, "top_p": SHARE, "top_k": FREQUENCY, "seed": SEED,
        "gpu_memory_utilization": SHARE, "max_num_seqs": COUNT, "max_num_batched_tokens": COUNT,
        "max_model_len": COUNT, "kv_cache_memory_bytes": BYTES,
        "log_prob_micro_batch_size_per_gpu": COUNT, "log_prob_max_token_len_per_gpu": COUNT,
    },
    "actor_rollout_ref.rollout.val_kwargs": {"temperature": FROM_0, "n": COUNT},
    "critic": {
        "ppo_mini_batch_size": COUNT, "ppo_micro_batch_size_per_gpu": COUNT,
        "forward_micro_batch_size_per_gpu": COUNT, "ppo_max_token_len_per_gpu": COUNT,
        "forward_max_token_len_per_gpu": COUNT, "ppo_epochs": COUNT, "cliprange_value": FROM_0,
        "grad_clip": POSITIVE,
    },
    CRITIC_OPTIM: OPTIM_RANGES,
    "critic.megatron": PARALLEL_SIZES,
    "algorithm": {"gamma": DISCOUNT, "lam": DISCOUNT},
    "algorithm.kl_ctrl": {"kl_coef": FROM_0},
    "warmup": {"steps": FROM_0, "batch_size": COUNT, "lr": FROM_0},
    "trainer": {
        "total_training_steps": COUNT, "nnodes": COUNT, "n_gpus_per_node": COUNT, "seed": SEED,
        "save_freq": FREQUENCY, "test_freq": FREQUENCY, "critic_warmup": FROM_0,
        "collective_timeout_s": Range(0, 10**7, above=True),
        "ray_object_store_bytes": Range(RAY_STORE_BYTES, LARGEST_BYTES),
    },
    "audit": {"sync_probe_every": COUNT},
}  # fmt: skip
BETAS = (f"{OPTIM}.betas", f"{CRITIC_OPTIM}.betas")


def check_each(config: DictConfig) -> None:
    """Raise DPA851 for the first value that its key does not take, with the key and the remedy."""
    for key, choices in CHOICES.items():
        value = value_of(config, key)
        if value not in choices and not (value is None and key in MAY_BE_NULL):
            raise UsageError(
                "DPA851", f"{key} is {value!r}.", f"Choose one of: {', '.join(choices)}."
            )
    for key, value in _numbers(config):
        if not math.isfinite(value):
            raise UsageError("DPA851", f"{key} is {value}.", "It must be a finite number.")
    for section, ranges in RANGES.items():
        node = value_of(config, section)
        for name, allowed in ranges.items():
            value = getattr(node, name)
            if value is not None and not allowed.holds(value):
                raise UsageError("DPA851", f"{section}.{name} is {value}.", allowed.remedy(value))
    for key in BETAS:
        betas = list(value_of(config, key))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(
                "DPA851", f"{key} is {betas}.", "Give two numbers from 0 to below 1: [0.9, 0.999]."
            )


def taken(key: str) -> str:
    """What a dotted key takes, for a table; "" where only its type says."""
    if key in CHOICES:
        return ", ".join((*CHOICES[key], *(("null",) if key in MAY_BE_NULL else ())))
    if key in BETAS:
        return "two numbers, >= 0, < 1"
    section, _, name = key.rpartition(".")
    allowed = RANGES.get(section, {}).get(name)
    return allowed.bounds if allowed else ""


def value_of(config: DictConfig, key: str) -> Any:
    """The value under a dotted key that the schema has."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _numbers(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every float under ``node`` but for the generator's own arguments, which are its business."""
    for name in node:
        key, value = f"{prefix}{name}", node[name]
        if key == "data.generator_args":
            continue
        if isinstance(value, DictConfig):
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, ListConfig):
            yield from ((key, item) for item in value if isinstance(item, float))
        elif isinstance(value, float):
            yield key, value
