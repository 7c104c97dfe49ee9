"""Each stage computed again from its own recorded inputs, and compared with what it recorded.

``reference/`` does the arithmetic: masks and ids, sums of scores, the KL in the reward, advantages
and returns, the loss; log-probs and entropies need a model (:mod:`.recompute_log_probs`). A stage
that agrees is cleared, whatever its inputs were; one that differs is wrong by itself.

Not recomputed: values (they need the critic), scores (they need the reward function), what an
engine samples, and estimators that ``reference/advantages.py`` does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dataproto_audit.probes.context import filling_rows
from dataproto_audit.replay.compared import Compared, compare
from dataproto_audit.replay.recompute_log_probs import log_probs
from dataproto_audit.replay.recompute_update import losses
from dataproto_audit.replay.recompute_values import advantages, kl_reward
from dataproto_audit.replay.replay import Replayed, Seen
from dataproto_audit.replay.scorers import Scorers

VISIBLE = 1e-4
"""Cells of a wrong field that are off by less are not named."""


def recomputed(step: Replayed, scorers: Scorers | None = None) -> list[Compared]:
    """Compare every stage of a replayed step that can be recomputed; each model pass runs once."""
    scorers = scorers or Scorers()
    scorers.forget()
    out: list[Compared] = []
    for number, one in enumerate(step.seen):
        if one.boundary.when != "after" or one.boundary.part:
            continue
        for made in _STAGES.get(one.boundary.stage, _nothing)(step, one):
            out.append(Compared(**{**made.__dict__, "boundary": number}))
    out += log_probs(step, scorers)
    return out


def _nothing(step: Replayed, one: Seen) -> Iterator[Compared]:
    return iter(())


# -- tokens ----------------------------------------------------------------------------------------


def _rollout(step: Replayed, one: Seen) -> Iterator[Compared]:
    view = one.view
    if not all(name in view.tensors for name in ("prompts", "responses")):
        return
    sides = [view.numpy(name) for name in ("prompts", "responses")]
    if not view.prompt or not view.response or any(side.ndim != 2 for side in sides):
        return
    joined = np.concatenate(sides, 1)
    if "input_ids" in view.tensors and view.numpy("input_ids").shape == joined.shape:
        everywhere = np.ones(joined.shape, np.bool_)
        yield compare("rollout", "input_ids", view.numpy("input_ids"), joined, everywhere, 0.0)
    attention = view.attention
    if attention is None or attention.shape != joined.shape:
        return
    on = attention != 0
    if "position_ids" in view.tensors and view.numpy("position_ids").shape == joined.shape:
        wanted = np.maximum(np.cumsum(on, 1) - 1, 0)
        yield compare("rollout", "position_ids", view.numpy("position_ids"), wanted, on, 0.0)
    plain = step.settings.multi_turn is False and "response_mask" in view.tensors
    mask = view.numpy("response_mask") if plain else np.zeros(0)
    if plain and mask.shape == (view.rows, view.response):
        answered, filling = on[:, view.prompt :], filling_rows(view)
        looked = np.ones(answered.shape, np.bool_)
        if filling is not None:
            looked &= ~filling[:, None]
        yield compare("rollout", "response_mask", mask != 0, answered, looked, 0.0)


def _reward(step: Replayed, one: Seen) -> Iterator[Compared]:
    view = one.view
    if "score" not in view.arrays or "token_level_scores" not in view.tensors:
        return
    try:
        told = np.asarray(view.arrays["score"].tolist(), np.float64).reshape(-1)
    except (TypeError, ValueError):
        return
    scores = view.numpy("token_level_scores")
    if scores.ndim != 2 or len(told) != len(scores):
        return
    summed = scores.sum(1, dtype=np.float64)[:, None]
    bound = 1e-4 * (1.0 + np.abs(told[:, None]))
    yield compare(
        "reward", "token_level_scores", summed, told[:, None],
        np.ones(summed.shape, np.bool_), bound, of="sum of each row",
    )  # fmt: skip


# -- values of the driver --------------------------------------------------------------------------


def _kl_reward(step: Replayed, one: Seen) -> Iterator[Compared]:
    made = kl_reward(one.view)
    if made is not None:
        expected, looked, bound, evidence = made
        recorded = one.view.numpy("token_level_rewards")
        yield compare(
            "kl_reward",
            "token_level_rewards",
            recorded,
            expected,
            looked,
            bound,
            least=VISIBLE,
            **evidence,
        )


def _advantage(step: Replayed, one: Seen) -> Iterator[Compared]:
    view, settings = one.view, step.settings
    made = advantages(view, settings)
    if isinstance(made, str):
        yield Compared("advantage", "advantages", "unknown", missing=made)
        return
    for name, (expected, bound) in made.values.items():
        if name in view.tensors and view.numpy(name).shape == expected.shape:
            yield compare(
                "advantage", name, view.numpy(name), expected, made.looked, bound,
                least=VISIBLE, estimator=made.name,
            )  # fmt: skip


def _update(step: Replayed, one: Seen) -> Iterator[Compared]:
    for name, recorded, expected, bound, missing in losses(
        one.view, one.boundary.evidence, step.settings
    ):
        if missing:
            yield Compared("update_actor", name, "unknown", missing=missing)
            continue
        looked = np.ones((len(recorded), 1), np.bool_)
        made = compare(
            "update_actor", name, recorded[:, None], expected[:, None], looked, bound[:, None],
            of="each mini-batch",
        )  # fmt: skip
        # Rows of ``cells`` are rows of the batch; a loss belongs to all rows of a mini-batch.
        yield Compared(**{**made.__dict__, "cells": None, "looked": None})


_STAGES: dict[str, Any] = {
    "rollout": _rollout,
    "reward": _reward,
    "kl_reward": _kl_reward,
    "advantage": _advantage,
    "update_actor": _update,
}
