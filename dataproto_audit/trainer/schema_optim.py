"""The keys of ``actor.optim``, under verl's names (those of Megatron's scheduler among them)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OptimConfig:
    """The optimizer and how its rates change from update to update.

    Without ``lr_decay_style`` the rate rises linearly over ``lr_warmup_steps`` updates to ``lr``
    and stays, and the keys below that one are refused. With it, rates are those of Megatron's
    scheduler, under either engine.
    """

    name: str = "adamw"
    """Update rule."""
    lr: float = 1e-6
    """Learning rate after the warm-up."""
    lr_warmup_steps: int = 0
    """Updates up to `lr`: from `lr / lr_warmup_steps`; with a style, from `lr_warmup_init`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of AdamW's two running means."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    lr_decay_style: str | None = None
    """Megatron's schedule by its name; null for a warm-up alone."""
    lr_decay_steps: int | None = None
    """Updates after which the rate is `min_lr`; null takes `trainer.total_training_steps`."""
    lr_warmup_init: float = 0.0
    """Rate of the first update, from which Megatron's warm-up rises."""
    min_lr: float = 0.0
    """Where the rate decays to."""
    lr_wsd_decay_style: str = "exponential"
    """How `WSD` (warm-up, stable, decay) decays at its end."""
    lr_wsd_decay_steps: int | None = None
    """Updates of that last part."""
    weight_decay_incr_style: str = "constant"
    """How weight decay rises over `lr_decay_steps`, with `lr_decay_style`."""
    start_weight_decay: float | None = None
    """What it rises from, to `weight_decay`; null takes that from the start."""
