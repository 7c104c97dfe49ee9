"""Log-probs and entropies computed again by a pass of each model, and compared with the record.

A model that is not the one of the run contradicts everything; it is then not believed, and
:mod:`.strangers` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.replay.compared import Compared, compare
from dataproto_audit.replay.replay import Replayed, Seen
from dataproto_audit.replay.scorers import OPTION, Scored, Scorers
from dataproto_audit.replay.strangers import FIELDS, stranger
from dataproto_audit.replay.tolerance import listed_bound, noise

STAGE_OF = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
    "update_log_probs": "update_actor",
}


def log_probs(step: Replayed, scorers: Scorers) -> list[Compared]:
    """Recorded log-probs against one pass of each role, at the boundary where they were made."""
    found: list[Compared] = []
    for role, names in FIELDS.items():
        own: list[Compared] = []
        scored = None
        for name in names:
            stage = STAGE_OF[name]
            one = step.after(stage)
            if one is None or name not in one.view.tensors:
                continue
            scored = _pass(step, one, role, scorers)
            if scored is None:
                why = scorers.failed.get(role, f"pass {OPTION[role]} DIR to recompute it")
                own.append(_unknown(step, one, name, why))
            else:
                own += _against(step, one, name, scored)
        if scored is not None:
            other = stranger(step, role, own, scored, vocabulary=scorers.vocabulary(role))
            if other is not None:
                own = [
                    c if c.verdict == "unknown" else replace(
                        c, verdict="unknown", cells=None, looked=None, missing=other.text,
                        evidence=other.evidence,
                    ) for c in own
                ]  # fmt: skip
        found += own
    return sorted(found, key=lambda c: c.boundary)


def _pass(step: Replayed, one: Seen, role: str, scorers: Scorers) -> Scored | None:
    """The pass of a role over the batch that entered its stage, made once."""
    at = step.before("old_log_prob" if role == "policy" else "ref_log_prob") or one
    at = at if at.view.has("input_ids") else one
    scorers.compare_vocabulary(role, step.settings.vocab_size)
    return scorers.of(role, at.view, at.boundary.row_keys, _temperature(step.settings, at.view))


def _temperature(settings: Settings, view: BatchView) -> float | None:
    told = (
        settings.temperature if settings.temperature is not None else view.meta.get("temperature")
    )
    return float(told) if isinstance(told, (int, float)) and told > 0 else None


def _unknown(step: Replayed, one: Seen, name: str, why: str) -> Compared:
    return Compared(
        one.boundary.stage, name, "unknown", step.seen.index(one), missing=f"{name}: {why}",
        model=True,
    )  # fmt: skip


def _against(step: Replayed, one: Seen, name: str, scored: Scored) -> Iterator[Compared]:
    view, settings, stage = one.view, step.settings, one.boundary.stage
    number = step.seen.index(one)
    expected, entropies, known = scored.aligned(one.boundary.row_keys)
    if "response_mask" not in view.tensors:
        yield _unknown(step, one, name, f"record response_mask with the batch that leaves {stage}")
        return
    recorded, mask = view.numpy(name), view.numpy("response_mask") != 0
    if recorded.shape != mask.shape or expected.shape != mask.shape:
        return
    if name == "rollout_log_probs" and (settings.filtered or settings.on_policy is False):
        why = "sampled with a filter or with other weights, so a pass of the policy does not tell"
        yield _unknown(step, one, name, why)
        return
    looked = mask & known[:, None]
    if view.attention is not None:  # what a mask covers beyond the response has no log-prob
        looked &= view.attention[:, view.prompt or 0 :] != 0
    if name == "update_log_probs":
        if "mini_batch" not in view.tensors:
            return
        looked = looked & (view.numpy("mini_batch") == 0)[:, None]  # later ones: weights have moved
    dtype = settings.rollout_dtype if name == "rollout_log_probs" else settings.trainer_dtype
    gap = np.abs(recorded.astype(np.float64) - expected)
    bound = noise(gap, expected, looked, dtype)
    made = compare(
        stage, name, recorded, expected, looked, bound, least=listed_bound(gap, looked, dtype),
        against="a pass of the model",
    )  # fmt: skip
    yield replace(made, boundary=number, model=True)
    if name == "old_log_probs" and entropies is not None and "entropys" in view.tensors:
        wanted, told = entropies, view.numpy("entropys")
        if told.shape == mask.shape:
            apart = np.abs(told.astype(np.float64) - wanted)
            made = compare(
                stage, "entropys", told, wanted, looked, noise(apart, wanted, looked, dtype),
                against="a pass of the model",
            )  # fmt: skip
            yield replace(made, boundary=number, model=True)
