"""How far a batch has come, read off the fields that it carries.

========================  ============================================================
stage                     is reached when the batch carries
========================  ============================================================
``prompts``               no tokens yet
``rollout``               responses, or any other field of the rollout
``union``                 tokens and a field of the prompt side
``dispatch``              tokens, and a meta entry or setting says how it is to be cut; or rows
                          that only fill it up are marked
``reward``                a field of the reward stage
``old_log_prob`` ...      a field of that stage
``values``                values; or the estimator is ``gae`` and there are advantages
``kl_reward``             token-level rewards, where KL in reward is configured
``advantage``             token-level rewards, advantages or returns
``update_critic``         values and returns
``update_actor``          advantages: the loss can be recomputed from there on
========================  ============================================================

A stage sees the fields of its own and of earlier stages only, so what is wrong is named where it
enters. Fields that nothing declares count as written by the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import PROMPT_SIDE, STAGES

UNSEEN = ("balance", "sync_weights", "validation")
"""Stages that leave no mark in a batch."""
CUT = ("world_size", "micro_batch_size", "max_token_len", "cp_size")
"""Settings that say how rows are cut."""
SHARED = {"token_level_rewards": ("advantage", "kl_reward")}
"""Fields with more than one producer."""


def producer(name: str) -> str:
    """The stage that writes a field; the rollout for fields that nothing declares."""
    return FIELDS[name].producer if name in FIELDS else "rollout"


def stages_reached(view: BatchView, settings: Any) -> list[str]:
    """Stages that the batch has left, in the order of the loop."""
    there = (*view.names, *(name for name in view.odd if name in FIELDS))
    wrote = {producer(name) for name in there}
    if wrote <= {"prompts"}:
        return ["prompts"] if wrote else []
    marks = {
        "prompts": False,
        "union": any(name in view for name in PROMPT_SIDE),
        "dispatch": "dispatch" in wrote or any(getattr(settings, name) for name in CUT),
        "values": "values" in wrote or (settings.adv_estimator == "gae" and "advantages" in view),
        "kl_reward": bool(settings.use_kl_in_reward) and "token_level_rewards" in view,
        "advantage": "advantage" in wrote,
        "update_critic": "values" in view and "returns" in view,
        "update_actor": "advantages" in view,
    }  # fmt: skip
    return [name for name in STAGES if name not in UNSEEN and marks.get(name, name in wrote)]


def seen_at(stage: str, view: BatchView) -> BatchView:
    """The part of ``view`` that the batch carried when it left ``stage``."""
    order = list(STAGES)
    until = order.index(stage)
    return view.only(
        name
        for name in (*view.names, *view.odd)
        if min(order.index(p) for p in SHARED.get(name, (producer(name),))) <= until
    )


def first_difference(names: Sequence[str]) -> str:
    """The earliest stage that writes one of the fields."""
    order = list(STAGES)
    return min((producer(name) for name in names), key=order.index)
