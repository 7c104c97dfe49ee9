"""Configuration: verl's key names as OmegaConf YAML, with ``key=value`` overrides.

Every key is declared here with its type and default; an unknown key is an error that names the
nearest one. A ready configuration is given by name (``quickstart``) or a YAML file by path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dataproto_audit.codes import UsageError


@dataclass
class DataConfig:
    """Where prompts come from. ``generator`` is a reasoning-gym data set by name."""

    generator: str | None = None
    generator_args: dict[str, Any] = field(default_factory=dict)
    size: int = 100_000
    prompt_style: str = "verbatim"
    train_files: Any = None
    val_files: Any = None
    prompt_key: str = "prompt"
    apply_chat_template: bool = False
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 64
    val_batch_size: int = 256
    filter_overlong_prompts: bool = False
    truncation: str = "error"
    shuffle: bool = True
    seed: int = 1


@dataclass
class TinyModelConfig:
    """The model that is made on the spot where ``model.path`` is null."""

    architecture: str = "qwen3"
    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    charset: str = "ascii"
    seed: int = 1


@dataclass
class ModelConfig:
    """A local Hugging Face folder, or the tiny model."""

    path: str | None = None
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    attn_implementation: str = "sdpa"
    dtype: str = "float32"


@dataclass
class OptimConfig:
    """Optimizer and its linear warm-up."""

    name: str = "adamw"
    lr: float = 1e-6
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8


@dataclass
class FsdpConfig:
    """How FSDP2 wraps the model: the root only, or every decoder layer."""

    wrap: str = "layer"
    reshard_after_forward: bool = True
    param_dtype: str = "float32"


@dataclass
class ActorConfig:
    """The policy update. Mini-batch sizes count prompts, micro-batch sizes rows, as in verl."""

    strategy: str = "fsdp2"
    ppo_mini_batch_size: int = 32
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int | None = None
    ppo_epochs: int = 1
    shuffle: bool = True
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    grad_clip: float = 1.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class RefConfig:
    """Log-prob pass of the reference model."""

    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int | None = None


@dataclass
class ValSamplingConfig:
    """Sampling of validation responses."""

    temperature: float = 0.0
    n: int = 1


@dataclass
class RolloutConfig:
    """The rollout engine, and the policy's own log-prob pass over its responses."""

    name: str = "vllm"
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    dtype: str = "float32"
    seed: int = 1
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 512
    max_num_batched_tokens: int | None = 8192
    max_model_len: int | None = None
    kv_cache_memory_bytes: int | None = 64 * 2**20
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int | None = None
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class ActorRolloutRefConfig:
    """The three roles that share a model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class AlgorithmConfig:
    """The advantage estimator."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True


@dataclass
class RewardFunctionConfig:
    """A Python file with ``compute_score(data_source, solution_str, ground_truth, extra_info)``,
    or with ``path: null`` a built-in scorer by name.
    """

    path: str | None = None
    name: str = "compute_score"


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)


@dataclass
class WarmupConfig:
    """Supervised steps on answers before the first RL step; ``steps: 0`` for none."""

    steps: int = 0
    batch_size: int = 64
    lr: float = 1e-3


@dataclass
class TrainerConfig:
    """The run as a whole."""

    total_training_steps: int = MISSING
    nnodes: int = 1
    n_gpus_per_node: int = 2
    balance_batch: bool = True
    seed: int = 1
    experiment_name: str = "run"
    run_dir: str | None = None
    overwrite: bool = False
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = False
    resume_mode: str = "disable"
    resume_from_path: str | None = None
    collective_timeout_s: float = 300.0
    ray_object_store_bytes: int = 128 * 2**20


@dataclass
class AuditConfig:
    """What the auditor does. ``sync_probe_every`` is the k of the log-prob probe of the sync."""

    level: str = "full"
    on_fail: str = "raise"
    inject: str | None = None
    policy: str | None = None
    sync_probe_every: int = 20


@dataclass
class Config:
    """The whole configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)


def ready_configs() -> list[str]:
    """Names of the configurations that come with the package."""
    folder = resources.files("dataproto_audit") / "configs"
    return sorted(
        p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")
    )


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration with overrides applied, typed and complete.

    Another ``data.generator`` starts without arguments: give its ``data.generator_args`` with it.

    Raises:
        UsageError: no such configuration (DPA851), unknown key with the nearest one (DPA850), a
            value of the wrong type (DPA851).
    """
    schema = OmegaConf.structured(Config)
    known = list(_keys(schema))
    merged = schema
    source = _read(name_or_path)
    _refuse_unknown(source, known, name_or_path)
    # A generator comes before its arguments, in whatever order they are given.
    parts = list(_dotlist(overrides, known))
    parts.sort(key=lambda part: not _names_generator(part[0]))
    for part, origin in ((source, name_or_path), *parts):
        try:
            if part is not source and _names_generator(part):
                merged.data.generator_args = {}  # they belong to the generator before
            merged = OmegaConf.merge(merged, part)
        except OmegaConfBaseException as error:
            raise _refused(error, origin) from error
    if merged.audit.level == "False":  # YAML reads a bare `off` as a boolean
        merged.audit.level = "off"
    try:
        OmegaConf.resolve(merged)  # a value may refer to another key: ${data.seed}
    except OmegaConfBaseException as error:
        raise _refused(error, name_or_path) from error
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise UsageError("DPA851", f"{name_or_path} does not set {', '.join(missing)}.", "Set it.")
    if not isinstance(merged, DictConfig):
        raise UsageError("DPA851", f"{name_or_path} is not a mapping.", "Write key: value pairs.")
    return merged


def _names_generator(part: DictConfig) -> bool:
    data = None if OmegaConf.is_interpolation(part, "data") else part.get("data")
    return isinstance(data, DictConfig) and "generator" in data


def _refused(error: OmegaConfBaseException, origin: str) -> UsageError:
    key = getattr(error, "full_key", None) or origin
    text = _line(getattr(error, "msg", None) or error)
    return UsageError("DPA851", f"{origin}: {key}: {text}.", "Correct the value.")


def _line(error: object) -> str:
    """The first line of what a library says, short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _read(name_or_path: str) -> DictConfig:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError("DPA851", f"there is no file {path}.", "Check the path.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                "DPA851", f"{path} cannot be read: {_line(error)}.", "Give a UTF-8 text file."
            ) from error
    else:
        names = ready_configs()
        if name_or_path not in names:
            near = difflib.get_close_matches(name_or_path, names, 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Or name a .yaml file."
            listed = ", ".join(names)
            raise UsageError("DPA851", f"no configuration {name_or_path!r}; ready: {listed}.", hint)
        folder = resources.files("dataproto_audit") / "configs"
        text = (folder / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    try:
        read = OmegaConf.create(text)
    except Exception as error:
        where = str(error).replace("\n", " ")[:400]
        raise UsageError(
            "DPA851", f"{name_or_path} is no valid YAML: {where}.", "Mend it."
        ) from error
    if not isinstance(read, DictConfig):
        raise UsageError("DPA851", f"{name_or_path} is not a mapping.", "Write key: value pairs.")
    return read


def _dotlist(overrides: Sequence[str], known: list[str]) -> Iterator[tuple[DictConfig, str]]:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise UsageError("DPA851", f"{override!r} is no override.", "Write key=value.")
        try:
            part = OmegaConf.from_dotlist([override])
        except Exception as error:  # YAML's errors and OmegaConf's, a RecursionError too
            raise UsageError(
                "DPA851", f"{override[:200]!r} is no override: {_line(error)}.", "Write key=value."
            ) from error
        _refuse_unknown(part, known, "the command line")
        yield part, override


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        full = f"{prefix}{key}"
        yield full
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        if isinstance(node[key], DictConfig):
            yield from _keys(node[key], f"{full}.")


def _refuse_unknown(part: DictConfig, known: list[str], origin: str) -> None:
    for key in _keys(part):
        if key in known or key.startswith("data.generator_args."):
            continue
        near = difflib.get_close_matches(key, known, 1, 0.5)
        if not near:
            last = {k.rsplit(".", 1)[-1]: k for k in known}
            near = [last[k] for k in difflib.get_close_matches(key.rsplit(".", 1)[-1], last, 1)]
        hint = f"Did you mean {near[0]}?" if near else "See docs/configuration.md."
        raise UsageError("DPA850", f"unknown configuration key {key} in {origin}.", hint)
