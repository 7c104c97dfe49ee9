"""Learning rate and weight decay of each update, by Megatron's ``OptimizerParamScheduler``.

Written out here because both engines take their rates from the driver, and because Megatron's own
class writes into the groups of its optimizer, one step at a time. Source: megatron-core 0.16.1,
``optimizer_param_scheduler.py``; a test runs both side by side. Update number k (from 0) gets what
Megatron has after ``step`` was called k times, as verl calls it: the first one ``lr_warmup_init``
where there is a warm-up. Not covered: rates that differ between groups of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dataproto_audit.codes import UsageError

KEY = "actor_rollout_ref.actor.optim"
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
INCREASES = ("constant", "linear", "cosine")


def _cosine(left: float) -> float:
    """1 at the beginning (``left`` 1), 0 at the end."""
    return 0.5 * (math.cos(math.pi * (1.0 - left)) + 1.0)


_WSD: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: _cosine(1.0 - done),
    "exponential": lambda done: 2.0 * math.pow(0.5, done) - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


@dataclass(frozen=True)
class RateSchedule:
    """Rates go from ``init_lr`` up to ``lr`` in ``warmup_steps`` updates, then by ``style`` down to
    ``min_lr`` at ``decay_steps``; weight decay goes from ``start_weight_decay`` to
    ``weight_decay`` by ``incr_style`` over ``decay_steps``."""

    style: str
    lr: float
    decay_steps: int
    warmup_steps: int = 0
    init_lr: float = 0.0
    min_lr: float = 0.0
    wsd_style: str = "exponential"
    wsd_steps: int | None = None
    weight_decay: float = 0.0
    start_weight_decay: float = 0.0
    incr_style: str = "constant"

    def lr_at(self, step: int) -> float:
        """Learning rate of update ``step``, from 0."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (self.lr - self.init_lr) * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            slower = math.sqrt(max(self.warmup_steps, 1)) / math.sqrt(max(step, 1))
            return max(self.min_lr, self.lr * slower)
        return self.min_lr + self._share(step) * (self.lr - self.min_lr)

    def _share(self, step: int) -> float:
        """What is left of the way from ``min_lr`` to ``lr``, 0..1."""
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.style == "linear":
            return 1.0 - done
        if self.style == "cosine":
            return _cosine(1.0 - done)
        steps = self.wsd_steps or 1
        last = step - (self.decay_steps - steps)
        return 1.0 if last <= 0 else _WSD[self.wsd_style](last / steps)

    def weight_decay_at(self, step: int) -> float:
        """Weight decay of update ``step``, from 0."""
        if step > self.decay_steps or self.incr_style == "constant":
            return self.weight_decay
        done = step / self.decay_steps
        share = done if self.incr_style == "linear" else _cosine(done)
        return self.start_weight_decay + share * (self.weight_decay - self.start_weight_decay)

    def check(self, *, key: str = KEY) -> None:
        """Raise DPA851 for numbers that Megatron's scheduler would stop at, by an assertion or
        later; the names of the styles are taken for right. ``key`` is that of the section."""
        if self.style == "WSD":
            longest = self.decay_steps - self.warmup_steps
            if not 1 <= (self.wsd_steps or 0) <= longest:
                raise _wrong(
                    key,
                    "lr_wsd_decay_steps",
                    f"{self.wsd_steps}: the last part of WSD has 1 to {longest} updates",
                    "It lies between the warm-up and lr_decay_steps.",
                )
        if not self.warmup_steps < self.decay_steps:
            raise _wrong(
                key,
                "lr_warmup_steps",
                f"{self.warmup_steps}, lr_decay_steps {self.decay_steps}",
                "Make the warm-up shorter than the schedule.",
            )
        for name, value in (("min_lr", self.min_lr), ("lr_warmup_init", self.init_lr)):
            if value > self.lr:
                raise _wrong(key, name, f"{value}, above lr {self.lr}", "Lower it, or raise lr.")
        if self.start_weight_decay > self.weight_decay:
            raise _wrong(
                key,
                "start_weight_decay",
                f"{self.start_weight_decay}, above weight_decay {self.weight_decay}",
                "Megatron's weight decay rises only.",
            )
        if self.incr_style == "constant" and self.start_weight_decay != self.weight_decay:
            raise _wrong(
                key,
                "start_weight_decay",
                f"{self.start_weight_decay}, but weight_decay_incr_style is constant",
                "Choose linear or cosine, or leave it null.",
            )


def _wrong(key: str, name: str, what: str, remedy: str) -> UsageError:
    return UsageError("DPA851", f"{key}.{name} is {what}.", remedy)
