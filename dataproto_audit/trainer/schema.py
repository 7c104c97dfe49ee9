"""Every configuration key with its type and default, under verl's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dataproto_audit.trainer.schema_critic import CriticConfig, KlCtrlConfig
from dataproto_audit.trainer.schema_megatron import MegatronConfig, RoleMegatronConfig
from dataproto_audit.trainer.schema_optim import OptimConfig


@dataclass
class DataConfig:
    """Where prompts come from. ``generator`` is a reasoning-gym data set by name."""

    generator: str | None = None
    """Name of a reasoning-gym data set; null reads `train_files`."""
    generator_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator, as reasoning-gym takes them."""
    size: int = 100_000
    """Items that the generator makes before it begins anew."""
    prompt_style: str = "verbatim"
    """`verbatim` asks the generator's question, `expression` only its sum (`5+3=`)."""
    train_files: Any = None
    """Parquet or JSONL in verl's schema: one path or a list."""
    val_files: Any = None
    """The same for validation; null validates on the generator, other items."""
    prompt_key: str = "prompt"
    """Column of the files that holds the prompt."""
    apply_chat_template: bool = False
    """Put the prompt through the tokenizer's chat template."""
    max_prompt_length: int = 512
    """Prompt width in tokens; shorter prompts are padded on the left."""
    max_response_length: int = 512
    """Response width in tokens; sampling stops there."""
    train_batch_size: int = 64
    """Prompts of a step (rows are n times as many)."""
    val_batch_size: int = 256
    """Prompts of a validation."""
    filter_overlong_prompts: bool = False
    """Leave out prompts above `max_prompt_length`."""
    truncation: str = "error"
    """What happens to an over-long prompt that is not filtered."""
    shuffle: bool = True
    """Draw prompts in an order given by `seed`, anew in each epoch."""
    seed: int = 1
    """Seed of the order and of the generator."""


@dataclass
class TinyModelConfig:
    """The model that is made on the spot where ``model.path`` is null."""

    architecture: str = "qwen3"
    """Transformers model type."""
    hidden_size: int = 64
    """Width of the residual stream."""
    intermediate_size: int = 192
    """Width of the MLP."""
    num_hidden_layers: int = 2
    """Decoder layers."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 2
    """Key and value heads, shared by groups of query heads."""
    head_dim: int = 32
    """Width of a head; vLLM on CPU takes 32, 64, 80, 96, 112, 128 and some above."""
    max_position_embeddings: int = 1024
    """Longest row in tokens."""
    tie_word_embeddings: bool = False
    """Use the embedding as output layer, too."""
    initializer_range: float = 0.02
    """Standard deviation of the first weights."""
    charset: str = "ascii"
    """Characters of the tokenizer, one token each."""
    seed: int = 1
    """Seed of the first weights."""


@dataclass
class ModelConfig:
    """A local Hugging Face folder, or the tiny model."""

    path: str | None = None
    """Local folder in Hugging Face layout; null makes the tiny model."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    attn_implementation: str = "sdpa"
    """Transformers' attention kernel."""
    dtype: str = "float32"
    """Precision of the weights."""
    use_remove_padding: bool = False
    """Compute packed rows without their padding."""
    use_fused_kernels: bool = False
    """Log-probs and entropy without logits of the whole vocabulary in memory."""


@dataclass
class FsdpConfig:
    """How FSDP2 wraps the model: the root only, or every decoder layer. ``fsdp_size`` ranks share
    a copy of the weights (-1: all); ``reshard_after_forward`` takes a number of ranks, too."""

    wrap: str = "layer"
    """What is gathered at once: the whole model (`root`) or a decoder layer (`layer`)."""
    reshard_after_forward: Any = True
    """Free gathered weights between forward and backward."""
    param_dtype: str = "float32"
    """Precision of compute; weights keep `model.dtype`."""
    fsdp_size: int = -1
    """Ranks that share one copy of the weights; -1 for all."""
    offload_policy: bool = False
    """Keep weights and optimizer state in host memory."""


@dataclass
class ActorConfig:
    """The policy update. Mini-batch sizes count prompts, micro-batch sizes rows, as in verl."""

    strategy: str = "fsdp2"
    """Training engine."""
    ppo_mini_batch_size: int = 32
    """Prompts of an optimizer step (rows are n times as many)."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows of one forward and backward pass of a rank."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of rows."""
    ppo_max_token_len_per_gpu: int | None = None
    """Most attended tokens of a micro-batch, with `use_dynamic_bsz`."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share each row's tokens."""
    ppo_epochs: int = 1
    """Passes over the batch of a step."""
    shuffle: bool = True
    """Draw mini-batches in random order."""
    clip_ratio: float = 0.2
    """PPO's clip range of the ratio."""
    clip_ratio_low: float | None = None
    """Lower range; null takes `clip_ratio`."""
    clip_ratio_high: float | None = None
    """Upper range; null takes `clip_ratio`."""
    clip_ratio_c: float = 3.0
    """Bound of the loss where the advantage is negative (dual clip)."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number, over the whole mini-batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference model to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Estimator of that KL."""
    grad_clip: float = 1.0
    """Largest gradient norm, under either engine (verl's Megatron has `optim.clip_grad`)."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class RefConfig:
    """The reference model and its log-prob pass. ``strategy`` null takes the actor's."""

    strategy: str | None = None
    """Engine of the reference; null takes the actor's."""
    megatron: RoleMegatronConfig = field(default_factory=RoleMegatronConfig)
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows of one forward pass of a rank."""
    log_prob_use_dynamic_bsz: bool = False
    """Fill those by tokens instead of rows."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Most attended tokens of such a pass, with dynamic sizes."""


@dataclass
class ValSamplingConfig:
    """Sampling of validation responses."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    n: int = 1
    """Samples of a prompt."""


@dataclass
class RolloutConfig:
    """The rollout engine, and the policy's own log-prob pass over its responses."""

    name: str = "vllm"
    """Engine: vLLM, or transformers' `generate` for machines without it."""
    n: int = 1
    """Samples of a prompt; GRPO compares them."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at it everywhere."""
    top_p: float = 1.0
    """Nucleus sampling; 1 for all tokens."""
    top_k: int = -1
    """Likeliest tokens to sample from; -1 for all."""
    dtype: str = "float32"
    """Precision of the engine."""
    seed: int = 1
    """Seed of sampling; each step derives its own."""
    enforce_eager: bool = True
    """Run vLLM without CUDA graphs."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory that vLLM takes."""
    max_num_seqs: int = 512
    """Rows that vLLM samples at a time."""
    max_num_batched_tokens: int | None = 8192
    """Tokens of one step of vLLM."""
    max_model_len: int | None = None
    """Longest row in tokens; null is prompt and response together."""
    kv_cache_memory_bytes: int | None = 64 * 2**20
    """Key-value cache on a CPU; null lets vLLM choose."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Rows of one forward pass of a rank."""
    log_prob_use_dynamic_bsz: bool = False
    """Fill those by tokens instead of rows."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Most attended tokens of such a pass, with dynamic sizes."""
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
    """The advantage estimator, and a KL penalty in the rewards."""

    adv_estimator: str = "grpo"
    """How rewards become advantages; `gae` trains a critic."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO)."""
    gamma: float = 1.0
    """Discount of later rewards, with `gae`."""
    lam: float = 1.0
    """Weight of later errors of the values, with `gae`."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference model off the rewards."""
    kl_penalty: str = "kl"
    """Estimator of that KL."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)


@dataclass
class RewardFunctionConfig:
    """A Python file with ``compute_score(data_source, solution_str, ground_truth, extra_info)``,
    or with ``path: null`` a built-in scorer by name.
    """

    path: str | None = None
    """Python file with the scorer; null takes a built-in one."""
    name: str = "compute_score"
    """The scorer's name."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)


@dataclass
class WarmupConfig:
    """Supervised steps on answers before the first RL step; ``steps: 0`` for none."""

    steps: int = 0
    """Optimizer steps; 0 for none."""
    batch_size: int = 64
    """Prompts of such a step."""
    lr: float = 1e-3
    """Their learning rate, with an optimizer of their own."""


@dataclass
class TrainerConfig:
    """The run as a whole."""

    total_training_steps: int = MISSING
    """The last step."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 2
    """Training ranks; on CPU processes."""
    balance_batch: bool = True
    """Reorder rows so that ranks get like numbers of tokens."""
    seed: int = 1
    """Seed of everything that has none of its own."""
    experiment_name: str = "run"
    """Begins the name of the run folder."""
    run_dir: str | None = None
    """The run folder; null makes a new one under `reports/`."""
    overwrite: bool = False
    """Replace a run that is in the folder."""
    save_freq: int = -1
    """Steps between checkpoints; -1 for none."""
    critic_warmup: int = 0
    """First step that trains the policy; until then only the critic learns."""
    test_freq: int = -1
    """Steps between validations; -1 for none."""
    val_before_train: bool = False
    """Validate before the first step."""
    resume_mode: str = "disable"
    """Go on from the newest checkpoint (`auto`) or a given one (`path`)."""
    resume_from_path: str | None = None
    """The checkpoint folder for `resume_mode=path`."""
    collective_timeout_s: float = 300.0
    """Seconds after which a rank that waits for its peers gives up."""
    ray_object_store_bytes: int = 128 * 2**20
    """Shared memory of Ray."""


@dataclass
class AuditConfig:
    """What the auditor does. ``sync_probe_every`` is the k of the log-prob probe of the sync."""

    level: str = "full"
    """Nothing, declarations and row relations, or the probes as well."""
    on_fail: str = "raise"
    """Stop at a finding of severity `fail`, log it, or write it down only."""
    trace: str = "last:1"
    """Steps whose batches are kept."""
    inject: str | None = None
    """`FAULT@STEP`: a seeded fault, to see one found."""
    policy: str | None = None
    """YAML with codes to leave out, severities, tolerances and aliases."""
    sync_probe_every: int = 20
    """Steps between two samples that engine and trainer both score."""


@dataclass
class Config:
    """The whole configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
