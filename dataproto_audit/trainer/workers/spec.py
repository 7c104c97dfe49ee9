"""What a training worker needs to know, in plain frozen data that travels to its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec, OptimSpec
from dataproto_audit.trainer.plans import MicroBatching


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
class UpdateOptions:
    """How an update walks over its batch.

    ``mini_batch_size`` counts rows over all ranks (verl's ppo_mini_batch_size times n); 0 takes
    the whole batch. ``lr_warmup_steps`` raises the rate linearly over the first updates.
    """

    mini_batch_size: int = 0
    micro: MicroBatching = field(default_factory=MicroBatching)
    epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    lr_warmup_steps: int = 0


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
    strategy: str = "fsdp2"
    with_reference: bool = True
    collective_timeout_s: float = 60.0
    seed: int = 0


def lr_at(optim: OptimSpec, update: UpdateOptions, *, step: int) -> float:
    """Learning rate of update number ``step`` (from 0): linear warm-up, then constant."""
    if update.lr_warmup_steps <= 0:
        return optim.lr
    return optim.lr * min(1.0, (step + 1) / update.lr_warmup_steps)


def worker_spec(config: Any, *, model_path: str) -> WorkerSpec:
    """The spec of a training configuration (a DictConfig, or a dataclass of the same keys).

    ``model_path`` is the folder that was opened or made for ``actor_rollout_ref.model``.
    """
    group = config.actor_rollout_ref
    actor, ref, rollout = group.actor, group.ref, group.rollout
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return WorkerSpec(
        model=ModelSpec(
            path=str(model_path),
            dtype=str(group.model.dtype),
            attn_implementation=str(group.model.attn_implementation),
        ),
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
            ),
            epochs=int(actor.ppo_epochs),
            shuffle=bool(actor.shuffle),
            seed=int(config.trainer.seed),
            lr_warmup_steps=int(actor.optim.lr_warmup_steps),
        ),
        log_prob_micro=_log_prob_micro(rollout),
        ref_micro=_log_prob_micro(ref),
        fsdp=FSDPOptions(
            wrap=str(actor.fsdp_config.wrap),
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            param_dtype=str(actor.fsdp_config.param_dtype),
        ),
        strategy=str(actor.strategy),
        with_reference=bool(actor.use_kl_loss),
        collective_timeout_s=float(config.trainer.collective_timeout_s),
        seed=int(config.trainer.seed),
    )


def _log_prob_micro(section: Any) -> MicroBatching:
    return _micro(
        section.log_prob_use_dynamic_bsz,
        section.log_prob_max_token_len_per_gpu,
        section.log_prob_micro_batch_size_per_gpu,
    )


def _micro(dynamic: Any, max_tokens: Any, rows: Any) -> MicroBatching:
    if dynamic:
        return MicroBatching(max_tokens=int(max_tokens))
    return MicroBatching(rows=int(rows or 0))
