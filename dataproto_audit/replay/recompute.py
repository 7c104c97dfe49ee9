"""Each stage computed again from its own recorded inputs, and compared with what it recorded.

``reference/`` does the arithmetic: masks and ids, sums of scores, the KL in the reward, advantages
and returns, the loss; log-probs and entropies need a model (:mod:`.scorers`). A stage that agrees
is cleared, whatever its inputs were; one that differs is wrong by itself.

Not recomputed: values (they need the critic), scores (they need the reward function), what an
engine samples, and estimators that ``reference/advantages.py`` does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dc_field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.probes.context import filling_rows
from dataproto_audit.replay.recompute_update import losses
from dataproto_audit.replay.recompute_values import advantages, kl_reward
from dataproto_audit.replay.replay import Replayed, Seen
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.replay.tolerance import listed_bound, noise

VISIBLE = 1e-4
"""Cells of a wrong field that are off by less are not named."""
Cells = NDArray[np.bool_]
Verdict = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True)
class Compared:
    """One recorded field against its recomputation.

    ``cells [rows, columns]`` are those that differ, ``looked`` those that were compared;
    ``missing`` says what to record or pass where the verdict is ``unknown``.
    """

    stage: str
    field: str
    verdict: Verdict
    boundary: int = -1
    cells: Cells | None = None
    looked: Cells | None = None
    evidence: Mapping[str, Any] = dc_field(default_factory=dict)
    missing: str = ""
    model: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that differ."""
        if self.cells is None:
            return ()
        return tuple(np.flatnonzero(self.cells.any(1)).tolist())

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "stage": self.stage, "field": self.field, "verdict": self.verdict,
            "rows": list(self.rows), "cells": 0 if self.cells is None else int(self.cells.sum()),
            "evidence": dict(self.evidence), "missing": self.missing, "model": self.model,
        }  # fmt: skip


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
    out += _log_probs(step, scorers)
    return out


def _nothing(step: Replayed, one: Seen) -> Iterator[Compared]:
    return iter(())


def compare(
    stage: str,
    name: str,
    recorded: Any,
    expected: Any,
    looked: Cells,
    bound: Any,
    *,
    least: Any = None,
    **evidence: Any,
) -> Compared:
    """Where ``recorded`` and ``expected`` lie further apart than ``bound``, on cells ``looked``.

    Where one does, the cells beyond ``least`` are named, if there are any. NaN equals NaN.
    """
    recorded, expected = np.asarray(recorded, np.float64), np.asarray(expected, np.float64)
    alike = (recorded == expected) | (np.isnan(recorded) & np.isnan(expected))
    gap = np.where(looked & ~alike, np.abs(recorded - expected), 0.0)
    bad = looked & ~alike & ~(gap <= bound)
    told = {
        "max |difference|": float(np.max(gap, initial=0.0)),
        "compared": int(looked.sum()),
        **evidence,
    }
    if not bad.any():
        return Compared(stage, name, "agrees", looked=looked, evidence=told)
    if least is not None:
        named = looked & ~alike & ~(gap <= least)
        bad = named if named.any() else bad
    told["differ"] = int(bad.sum())
    return Compared(stage, name, "differs", cells=bad, looked=looked, evidence=told)


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

# -- log-probs -------------------------------------------------------------------------------------

_ROLES = {
    "rollout_log_probs": ("rollout", "policy"),
    "old_log_probs": ("old_log_prob", "policy"),
    "ref_log_prob": ("ref_log_prob", "reference"),
    "update_log_probs": ("update_actor", "policy"),
}


def _log_probs(step: Replayed, scorers: Scorers) -> list[Compared]:
    """Recorded log-probs against one pass of each role, at the boundary where they were made."""
    found: list[Compared] = []
    for name, (stage, role) in _ROLES.items():
        one = step.after(stage)
        if one is None or name not in one.view.tensors:
            continue
        number = step.seen.index(one)
        at = step.before("old_log_prob" if role == "policy" else "ref_log_prob") or one
        at = at if at.view.has("input_ids") else one
        settings = step.settings
        scored = scorers.of(role, at.view, at.boundary.row_keys, _temperature(settings, at.view))
        if scored is None:
            option = "--model" if role == "policy" else "--ref-model"
            why = scorers.failed.get(role, f"pass {option} DIR to recompute it")
            unknown = Compared(stage, name, "unknown", number, missing=f"{name}: {why}", model=True)
            found.append(unknown)
            continue
        found += _against(step, one, number, name, stage, scored)
    return _trusted(found)


def _temperature(settings: Settings, view: BatchView) -> float | None:
    told = (
        settings.temperature if settings.temperature is not None else view.meta.get("temperature")
    )
    return float(told) if isinstance(told, (int, float)) and told > 0 else None


def _against(
    step: Replayed, one: Seen, number: int, name: str, stage: str, scored: Any
) -> Iterator[Compared]:
    view, settings = one.view, step.settings
    log_probs, entropies, known = scored.aligned(one.boundary.row_keys)
    if "response_mask" not in view.tensors:
        why = f"record response_mask with the batch that leaves {stage}"
        yield Compared(stage, name, "unknown", number, missing=f"{name}: {why}", model=True)
        return
    recorded, mask = view.numpy(name), view.numpy("response_mask") != 0
    if recorded.shape != mask.shape or log_probs.shape != mask.shape:
        return
    if name == "rollout_log_probs" and (settings.filtered or settings.on_policy is False):
        why = "sampled with a filter or with other weights, so a pass of the policy does not tell"
        yield Compared(stage, name, "unknown", number, missing=f"{name}: {why}", model=True)
        return
    looked = mask & known[:, None]
    if view.attention is not None:  # what a mask covers beyond the response has no log-prob
        looked &= view.attention[:, view.prompt or 0 :] != 0
    if name == "update_log_probs":
        if "mini_batch" not in view.tensors:
            return
        looked = looked & (view.numpy("mini_batch") == 0)[:, None]  # later ones: weights have moved
    dtype = settings.rollout_dtype if name == "rollout_log_probs" else settings.trainer_dtype
    gap = np.abs(recorded.astype(np.float64) - log_probs)
    bound = noise(gap, log_probs, looked, dtype)
    made = compare(
        stage, name, recorded, log_probs, looked, bound, least=listed_bound(gap, looked, dtype),
        against="a pass of the model",
    )  # fmt: skip
    yield Compared(**{**made.__dict__, "boundary": number, "model": True})
    if name == "old_log_probs" and entropies is not None and "entropys" in view.tensors:
        wanted, told = entropies, view.numpy("entropys")
        if told.shape == mask.shape:
            apart = np.abs(told.astype(np.float64) - wanted)
            made = compare(
                stage, "entropys", told, wanted, looked, noise(apart, wanted, looked, dtype),
                against="a pass of the model",
            )  # fmt: skip
            yield Compared(**{**made.__dict__, "boundary": number, "model": True})


MISFIT = 0.5
"""Share of the tokens that differ from a model which two recorded fields, alike, contradict."""


def _trusted(found: list[Compared]) -> list[Compared]:
    """Without the verdicts of a policy that cannot be this step's: everything contradicts it."""
    own = {c.field: c for c in found if c.verdict == "differs"}
    pair = [own.get(name) for name in ("rollout_log_probs", "old_log_probs")]
    shares = [
        float(c.cells.sum() / max(1, c.looked.sum()))
        for c in pair
        if c is not None and c.cells is not None and c.looked is not None
    ]
    means = [c.evidence.get("max |difference|", 0.0) for c in pair if c is not None]
    if len(shares) < 2 or min(shares) < MISFIT or not np.isclose(means[0], means[1], rtol=0.05):
        return found
    why = "the given model is not the policy of this step: engine and trainer both contradict it"
    return [
        Compared(c.stage, c.field, "unknown", c.boundary, missing=why, model=True)
        if c.field in ("rollout_log_probs", "old_log_probs", "update_log_probs", "entropys")
        else c
        for c in found
    ]
