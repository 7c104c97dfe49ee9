"""What a training worker needs to know, in plain frozen data that travels to its process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
class CriticSpec:
    """The value model of a rank: its update, its pass without gradients, its engine and layout,
    of which None takes the actor's. Model and FSDP options are the actor's."""

    optim: OptimSpec = field(default_factory=OptimSpec)
    loss: ValueLossOptions = field(default_factory=ValueLossOptions)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    forward_micro: MicroBatching = field(default_factory=MicroBatching)
    strategy: str | None = None
    megatron: MegatronOptions | None = None


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
    critic: CriticSpec | None = None
    collective_timeout_s: float = 60.0
    seed: int = 0


def roles_of(spec: WorkerSpec) -> tuple[str, ...]:
    """Models that a training rank holds."""
    there = {"actor": True, "ref": spec.with_reference, "critic": spec.critic is not None}
    return tuple(role for role, held in there.items() if held)


def strategy_of(spec: WorkerSpec, role: str) -> str:
    """The engine of ``actor``, ``ref`` or ``critic``."""
    own = {"ref": spec.ref_strategy, "critic": spec.critic.strategy if spec.critic else None}
    return own.get(role) or spec.strategy


def megatron_of(spec: WorkerSpec, role: str) -> MegatronOptions:
    """Megatron's layout of ``actor``, ``ref`` or ``critic``."""
    own = {"ref": spec.ref_megatron, "critic": spec.critic.megatron if spec.critic else None}
    return own.get(role) or spec.megatron


def model_of(spec: WorkerSpec, role: str) -> ModelSpec:
    """The model of ``actor``, ``ref`` or ``critic``."""
    return replace(spec.model, head="value") if role == "critic" else spec.model


def checkpoint_layout(spec: WorkerSpec) -> dict[str, Any]:
    """What the ranks' files of a checkpoint depend on, for its index.

    ``ref_megatron`` and ``critic_megatron`` are sizes of a role on Megatron, where the actor's do
    not say them. Without them ranks would take each other's layers for their own.
    """
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
    if spec.critic is not None:
        layout["critic_strategy"] = strategy_of(spec, "critic")
    for role in roles_of(spec)[1:]:
        own = megatron_of(spec, role).layout()
        if strategy_of(spec, role) == "megatron" and not own.items() <= layout.items():
            layout[f"{role}_megatron"] = own
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


def rate_schedule(optim: Any, trainer: Any) -> RateSchedule | None:
    """Megatron's schedule, if ``lr_decay_style`` of an ``optim`` section names one; not checked
    yet. It takes the steps of the ``trainer`` section where none are given."""
    if optim.lr_decay_style is None:
        return None
    own, start = optim.lr_decay_steps, optim.start_weight_decay
    return RateSchedule(
        style=str(optim.lr_decay_style),
        lr=float(optim.lr),
        decay_steps=int(trainer.total_training_steps if own is None else own),
        warmup_steps=int(optim.lr_warmup_steps),
        init_lr=float(optim.lr_warmup_init),
        min_lr=float(optim.min_lr),
        wsd_style=str(optim.lr_wsd_decay_style),
        wsd_steps=optim.lr_wsd_decay_steps,
        weight_decay=float(optim.weight_decay),
        start_weight_decay=float(optim.weight_decay if start is None else start),
        incr_style=str(optim.weight_decay_incr_style),
    )


def _optim_spec(section: Any) -> OptimSpec:
    """The optimizer of an ``actor`` or ``critic`` section."""
    optim = section.optim
    return OptimSpec(
        name=str(optim.name),
        lr=float(optim.lr),
        weight_decay=float(optim.weight_decay),
        betas=(float(optim.betas[0]), float(optim.betas[1])),
        eps=float(optim.eps),
        grad_clip=float(section.grad_clip or 0.0),
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
        optim=_optim_spec(actor),
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
            rates=rate_schedule(actor.optim, config.trainer),
        ),
        log_prob_micro=_log_prob_micro(rollout),
        ref_micro=_log_prob_micro(ref),
        fsdp=fsdp_options(config),
        megatron=megatron,
        ref_megatron=options_from(ref.megatron, defaults=megatron),
        strategy=str(actor.strategy),
        ref_strategy=None if ref.strategy is None else str(ref.strategy),
        with_reference=with_reference(config),
        critic=critic_spec(config, megatron) if with_critic(config) else None,
        collective_timeout_s=float(config.trainer.collective_timeout_s),
        seed=int(config.trainer.seed),
    )


def with_critic(config: Any) -> bool:
    """Whether the advantage estimator needs values."""
    return str(config.algorithm.adv_estimator) == "gae"


def with_reference(config: Any) -> bool:
    """Whether anything reads the reference's log-probs."""
    actor = config.actor_rollout_ref.actor
    return bool(actor.use_kl_loss) or bool(config.algorithm.use_kl_in_reward)


def critic_spec(config: Any, megatron: MegatronOptions) -> CriticSpec:
    """The critic's part of :func:`worker_spec`; ``megatron`` is the actor's layout."""
    critic, roles = config.critic, config.actor_rollout_ref
    mini = _or(critic.ppo_mini_batch_size, roles.actor.ppo_mini_batch_size)
    own = options_from(critic.megatron, defaults=megatron)
    on_megatron = str(critic.strategy or roles.actor.strategy) == "megatron"
    limit = critic.ppo_max_token_len_per_gpu
    return CriticSpec(
        optim=_optim_spec(critic),
        loss=ValueLossOptions(
            cliprange_value=float(critic.cliprange_value),
            loss_agg_mode=str(critic.loss_agg_mode or roles.actor.loss_agg_mode),
        ),
        update=UpdateOptions(
            mini_batch_size=int(mini) * int(roles.rollout.n),
            micro=_micro(
                critic.use_dynamic_bsz,
                limit,
                critic.ppo_micro_batch_size_per_gpu,
                own.pp if on_megatron else 1,
            ),
            epochs=int(_or(critic.ppo_epochs, roles.actor.ppo_epochs)),
            shuffle=bool(critic.shuffle),
            seed=int(config.trainer.seed),
            lr_warmup_steps=int(critic.optim.lr_warmup_steps),
            rates=rate_schedule(critic.optim, config.trainer),
        ),
        forward_micro=_micro(
            critic.use_dynamic_bsz,
            _or(critic.forward_max_token_len_per_gpu, limit),
            critic.forward_micro_batch_size_per_gpu,
        ),
        strategy=None if critic.strategy is None else str(critic.strategy),
        megatron=own,
    )


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


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
