"""Errors of verl's released wheels that are known: what raised, why, and what helps.

Numbers are those of docs/verl-flow.md, whose table says which versions have them. An error is
recognised by its kind, its text, the stage, and what the run is configured to do; all four were
seen in real runs.

Not covered: errors that a defect may cause in other places, and versions that were not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataproto_audit.integrations.announce import text_of
from dataproto_audit.integrations.verl_settings import at

Config = Mapping[str, Any]
Get = Callable[[str], Any]


@dataclass(frozen=True)
class Crash:
    """``kind`` and ``text`` are in the error's class name and message; ``stages`` empty: any."""

    number: str
    versions: tuple[str, ...]
    kind: str
    text: str
    stages: tuple[str, ...]
    why: str
    remedy: str
    configured: Callable[[Get], bool] = lambda _: True


def straight_through(get: Get) -> bool:
    """True where a KL estimator with a trailing ``+`` is in use; ``get`` reads a dotted key."""
    used = (
        ("algorithm.use_kl_in_reward", "algorithm.kl_penalty"),
        ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_type"),
    )
    return any(get(on) and str(get(key)).endswith("+") for on, key in used)


def estimator_in(*names: str) -> Callable[[Get], bool]:
    """Whether the advantage estimator is one of these."""

    def chosen(get: Get) -> bool:
        value = get("algorithm.adv_estimator")
        return str(getattr(value, "value", value)) in names

    return chosen


EMPTY = "a response without a single token (an aborted request)"
REFILL = "Let the engine answer with a token at least, or leave such prompts out."
CRASHES = (
    Crash("D6", ("0.7.1",), "NotImplementedError", "", ("kl_reward", "update_actor"),
          "a KL estimator with a trailing + is not implemented",
          "Name the estimator without +.", straight_through),
    Crash("D7", ("0.7.1",), "TypeError", "optimal_token_baseline", ("advantage",),
          "compute_advantage hands the optimal-token-baseline estimators arguments that they do "
          "not take", "Use another estimator, or verl 0.9.1."),
    Crash("D15", ("0.7.1",), "AssertionError", "are not the same object", ("union",),
          "the baseline rollout of ReMax leaves fields of its own in the batch, which the sampled "
          "rows have, too", "Use another estimator, or verl 0.9.1 with trainer.use_v1=False.",
          estimator_in("remax")),
    Crash("D16", ("0.7.1",), "AttributeError", "'list' object has no attribute 'dim'", (),
          f"{EMPTY} cannot be padded by the agent loop", REFILL),
    Crash("D16", ("0.9.1",), "TypeError", "expected Tensor as element", ("rollout", "validation"),
          f"{EMPTY} has no log-probs to put beside the others", REFILL),
)  # fmt: skip


def known_crash(version: str, stage: str, error: BaseException, config: Config) -> str:
    """``known defect D6 of verl 0.7.1: ... Name the estimator without +``, or ''.

    ``error`` may be one of a worker that Ray hands on: its class is then named after both, and its
    message holds that of the worker.
    """
    kinds = " ".join(cls.__name__ for cls in type(error).__mro__)
    for crash in CRASHES:
        fits = crash.kind in kinds and crash.text in text_of(error)
        if (
            fits
            and version in crash.versions
            and (not crash.stages or stage in crash.stages)
            and crash.configured(partial(at, config))
        ):
            return f"known defect {crash.number} of verl {version}: {crash.why}. {crash.remedy}"
    return ""
