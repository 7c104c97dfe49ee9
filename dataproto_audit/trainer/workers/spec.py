"""What a training worker needs to know, in plain frozen data that travels to its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec, OptimSpec
from dataproto_audit.trainer.backends.checkpoint import SEATS
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions, options_from
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.rates import RateSchedule


@dataclass(frozen=True)
class LossOptions:
    """The policy loss of ``actor_rollout_ref.actor``, in verl's names."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"


@dataclass(frozen=True)
class ValueLossOptions:
    """The value loss, in verl's names (``critic.cliprange_value``, ``critic.loss_agg_mode``)."""

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"


@dataclass(frozen=True)
class UpdateOptions:
    """How an update walks over its batch.

    ``mini_batch_size`` counts rows over all ranks (verl's ppo_mini_batch_size times n); 0 takes
    the whole batch. ``lr_warmup_steps`` raises the rate linearly over the first updates; ``rates``,
    if given, takes the place of that and of the optimizer's weight decay.
    """

    mini_batch_size: int = 0
    micro: MicroBatching = field(default_factory=MicroBatching)
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    lr_warmup_steps: int = 0
    rates: RateSchedule | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that fixes what a training rank computes."""

    model: ModelSpec
    optim: OptimSpec = field(default_factory=OptimSpec)
    loss: LossOptions = field(default_factory=LossOptions)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    log_prob_micro: MicroBatching = field(default_factory=MicroBatching)
    ref_micro: MicroBatching = field(default_factory=MicroBatching)
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    ref_megatron: MegatronOptions | None = None
    strategy: str = "fsdp2"
    ref_strategy: str | None = None
    with_reference: bool = True
    collective_timeout_s: float = 60.0
    seed: int = 0


def roles_of(spec: WorkerSpec) -> tuple[str, ...]:
    """Models that a training rank holds."""
    return ("actor", "ref") if spec.with_reference else ("actor",)


def strategy_of(spec: WorkerSpec, role: str) -> str:
    """The engine of ``actor`` or ``ref``."""
    return spec.strategy if role == "actor" else spec.ref_strategy or spec.strategy


def megatron_of(spec: WorkerSpec, role: str) -> MegatronOptions:
    """Megatron's layout of ``actor`` or ``ref``."""
    return spec.megatron if role == "actor" else spec.ref_megatron or spec.megatron


def checkpoint_layout(spec: WorkerSpec) -> dict[str, Any]:
    """What the ranks' files of a checkpoint depend on, for its index."""
    layout: dict[str, Any] = {"strategy": spec.strategy}
    if spec.strategy == "megatron":
        layout |= spec.megatron.layout()
    engines = {strategy_of(spec, role) for role in roles_of(spec)}
    if "megatron" in engines:
        layout[SEATS] = True
    if engines != {"megatron"} and spec.fsdp.fsdp_size != -1:
        layout["fsdp_size"] = spec.fsdp.fsdp_size
    if strategy_of(spec, "ref") != spec.strategy and spec.with_reference:
        layout["ref_strategy"] = spec.ref_strategy
    return layout


def lr_at(optim: OptimSpec, update: UpdateOptions, *, step: int) -> float:
    """Learning rate of update number ``step`` (from 0): linear warm-up, then constant; or that of
    the schedule."""
    if update.rates is not None:
        return update.rates.lr_at(step)
    if update.lr_warmup_steps <= 0:
        return optim.lr
    return optim.lr * min(1.0, (step + 1) / update.lr_warmup_steps)


def weight_decay_at(optim: OptimSpec, update: UpdateOptions, *, step: int) -> float:
    """Weight decay of update number ``step`` (from 0)."""
    return optim.weight_decay if update.rates is None else update.rates.weight_decay_at(step)


def rate_schedule(config: Any) -> RateSchedule | None:
    """Megatron's schedule, if ``optim.lr_decay_style`` names one; not checked yet."""
    optim = config.actor_rollout_ref.actor.optim
    if optim.lr_decay_style is None:
        return None
    steps, start = optim.lr_decay_steps, optim.start_weight_decay
    return RateSchedule(
        style=str(optim.lr_decay_style),
        lr=float(optim.lr),
        decay_steps=int(config.trainer.total_training_steps if steps is None else steps),
        warmup_steps=int(optim.lr_warmup_steps),
        init_lr=float(optim.lr_warmup_init),
        min_lr=float(optim.min_lr),
        wsd_style=str(optim.lr_wsd_decay_style),
        wsd_steps=optim.lr_wsd_decay_steps,
        weight_decay=float(optim.weight_decay),
        start_weight_decay=float(optim.weight_decay if start is None else start),
        incr_style=str(optim.weight_decay_incr_style),
    )


def worker_spec(config: Any, *, model_path: str) -> WorkerSpec:
    """The spec of a training configuration (a DictConfig, or a dataclass of the same keys).

    ``model_path`` is the folder that was opened or made for ``actor_rollout_ref.model``.
    """
    group = config.actor_rollout_ref
    actor, ref, rollout = group.actor, group.ref, group.rollout
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    megatron = options_from(actor.megatron)
    stages = megatron.pp if actor.strategy == "megatron" else 1
    return WorkerSpec(
        model=model_spec(config, model_path=model_path),
        optim=OptimSpec(
            name=str(actor.optim.name),
            lr=float(actor.optim.lr),
            weight_decay=float(actor.optim.weight_decay),
            betas=(float(actor.optim.betas[0]), float(actor.optim.betas[1])),
            eps=float(actor.optim.eps),
            grad_clip=float(actor.grad_clip or 0.0),
        ),
        loss=LossOptions(
            clip_ratio_low=float(actor.clip_ratio if low is None else low),
            clip_ratio_high=float(actor.clip_ratio if high is None else high),
            clip_ratio_c=float(actor.clip_ratio_c),
            loss_agg_mode=str(actor.loss_agg_mode),
            entropy_coeff=float(actor.entropy_coeff),
            use_kl_loss=bool(actor.use_kl_loss),
            kl_loss_coef=float(actor.kl_loss_coef),
            kl_loss_type=str(actor.kl_loss_type),
        ),
        update=UpdateOptions(
            mini_batch_size=int(actor.ppo_mini_batch_size) * int(rollout.n),
            micro=_micro(
                actor.use_dynamic_bsz,
                actor.ppo_max_token_len_per_gpu,
                actor.ppo_micro_batch_size_per_gpu,
                stages,
            ),
            epochs=int(actor.ppo_epochs),
            shuffle=bool(actor.shuffle),
            seed=int(config.trainer.seed),
            lr_warmup_steps=int(actor.optim.lr_warmup_steps),
            rates=rate_schedule(config),
        ),
        log_prob_micro=_log_prob_micro(rollout),
        ref_micro=_log_prob_micro(ref),
        fsdp=fsdp_options(config),
        megatron=megatron,
        ref_megatron=options_from(ref.megatron, defaults=megatron),
        strategy=str(actor.strategy),
        ref_strategy=None if ref.strategy is None else str(ref.strategy),
        with_reference=bool(actor.use_kl_loss),
        collective_timeout_s=float(config.trainer.collective_timeout_s),
        seed=int(config.trainer.seed),
    )


def model_spec(config: Any, *, model_path: str) -> ModelSpec:
    """The model part of :func:`worker_spec`."""
    model = config.actor_rollout_ref.model
    return ModelSpec(
        path=str(model_path),
        dtype=str(model.dtype),
        attn_implementation=str(model.attn_implementation),
        remove_padding=bool(model.use_remove_padding),
        fused_kernels=bool(model.use_fused_kernels),
    )


def fsdp_options(config: Any) -> FSDPOptions:
    """The FSDP part of :func:`worker_spec`."""
    actor = config.actor_rollout_ref.actor
    return FSDPOptions(
        wrap=str(actor.fsdp_config.wrap),
        reshard_after_forward=actor.fsdp_config.reshard_after_forward,
        param_dtype=str(actor.fsdp_config.param_dtype),
        fsdp_size=int(actor.fsdp_config.fsdp_size),
        offload=bool(actor.fsdp_config.offload_policy),
        sequence_parallel=int(actor.ulysses_sequence_parallel_size),
    )


def _log_prob_micro(section: Any) -> MicroBatching:
    return _micro(
        section.log_prob_use_dynamic_bsz,
        section.log_prob_max_token_len_per_gpu,
        section.log_prob_micro_batch_size_per_gpu,
    )


def _micro(dynamic: Any, max_tokens: Any, rows: Any, stages: int = 1) -> MicroBatching:
    """``stages`` pipeline stages are given something to do where the size is open."""
    if dynamic:
        return MicroBatching(max_tokens=int(max_tokens), divisible_by=stages)
    return MicroBatching(rows=int(rows or 0), divisible_by=1 if rows else stages)
