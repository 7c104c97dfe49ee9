"""Whether the rates of an ``optim`` section can be, and whether every key of it does something."""

from __future__ import annotations

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.schema_optim import OptimConfig
from dataproto_audit.trainer.workers.spec import rate_schedule

OF_SCHEDULE = (
    "lr_decay_steps",
    "lr_warmup_init",
    "min_lr",
    "lr_wsd_decay_style",
    "lr_wsd_decay_steps",
    "weight_decay_incr_style",
    "start_weight_decay",
)
"""Keys that only a schedule reads."""


def check_rates(optim: DictConfig, trainer: DictConfig, *, key: str) -> None:
    """Raise DPA851 for rates of an ``optim`` section that cannot be, or that do nothing."""
    schedule = rate_schedule(optim, trainer)
    if schedule is not None:
        schedule.check(key=key)
        return
    defaults = OptimConfig()
    idle = [name for name in OF_SCHEDULE if optim[name] != getattr(defaults, name)]
    if idle:
        given = ", ".join(f"{name}={optim[name]}" for name in idle)
        raise UsageError(
            "DPA851",
            f"{key}.lr_decay_style is null, so {given} would do nothing.",
            f"Choose {key}.lr_decay_style, or leave the rest as it comes.",
        )
