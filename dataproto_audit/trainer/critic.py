"""What a configuration asks of a critic and of a KL in the rewards, and cannot have.

What holds for all roles is elsewhere: rows in :mod:`.sizes`, Megatron in :mod:`.megatron`.
"""

from __future__ import annotations

from omegaconf import DictConfig

from dataproto_audit.trainer.idle import Changed, changed, refuse_idle
from dataproto_audit.trainer.rate_keys import check_rates
from dataproto_audit.trainer.schema import AlgorithmConfig
from dataproto_audit.trainer.schema_critic import CriticConfig
from dataproto_audit.trainer.sizes import check_limit, refuse_limit
from dataproto_audit.trainer.workers.spec import with_critic

OF_GAE = ("gamma", "lam")
OF_KL = ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef")
OF_GROUPS = ("norm_adv_by_std_in_grpo",)


def check_critic(config: DictConfig) -> None:
    """Raise UsageError for settings of critic and KL that do nothing (DPA851) or cannot work:
    rates (DPA851), token limits (DPA856)."""
    if not config.algorithm.use_kl_in_reward:
        refuse_idle(_algorithm(config, OF_KL), "algorithm.use_kl_in_reward is false")
    estimator = f"algorithm.adv_estimator is {config.algorithm.adv_estimator}"
    if not with_critic(config):
        idle = _algorithm(config, OF_GAE) | changed(config.critic, CriticConfig, "critic")
        if config.trainer.critic_warmup:
            idle["trainer.critic_warmup"] = config.trainer.critic_warmup
        refuse_idle(idle, f"{estimator}, which has no critic")
        return
    refuse_idle(_algorithm(config, OF_GROUPS), f"{estimator}, which compares no groups")
    _token_limits(config)
    check_rates(config.critic.optim, config.trainer, key="critic.optim")


def _token_limits(config: DictConfig) -> None:
    critic = config.critic
    if critic.use_dynamic_bsz:
        limit, forward = critic.ppo_max_token_len_per_gpu, critic.forward_max_token_len_per_gpu
        check_limit("critic.ppo_max_token_len_per_gpu", limit, config.data)
        check_limit("critic.forward_max_token_len_per_gpu", forward or limit, config.data)
        return
    for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
        refuse_limit(f"critic.{name}", critic[name], switch="critic.use_dynamic_bsz")


def _algorithm(config: DictConfig, names: tuple[str, ...]) -> Changed:
    """Of ``names``, those that are not as they come."""
    given = changed(config.algorithm, AlgorithmConfig, "algorithm")
    return {key: value for key, value in given.items() if key.partition(".")[2] in names}
