"""Faults that can also be seeded into a live run (``audit.inject=FAULT@STEP``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.faults.registry import CATALOGUE, DEFAULT_BASES, FAULTS, Truth, fault
from dataproto_audit.testing.faults.scene import cells


@fault("log_prob_shift", "old_log_prob", "old_log_probs")
def log_prob_shift(batch: DataProto) -> Truth:
    """Old log-probs one column late: column t holds the log-prob of token t - 1."""
    old = batch.batch["old_log_probs"]
    moved = torch.roll(old, 1, dims=1)
    moved[:, 0] = 0.0
    batch.batch["old_log_probs"] = moved
    return cells("old_log_probs", (moved != old) & (batch.batch["response_mask"] != 0))


@fault("mask_on_pad", "rollout", "response_mask")
def mask_on_pad(batch: DataProto) -> Truth:
    """The response mask covers the first padding slot of every third shorter row."""
    mask = batch.batch["response_mask"].clone()
    width = mask.shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(1)
    rows = torch.nonzero(lengths < width).squeeze(1)[::3]
    mask[rows, lengths[rows]] = 1
    changed = mask != batch.batch["response_mask"]
    batch.batch["response_mask"] = mask
    return cells("response_mask", changed)


@fault("tiled_groups", "union", "uid")
def tiled_groups(batch: DataProto) -> Truth:
    """The prompt side was repeated p0,p1,..,p0,p1,.. and the responses p0,p0,..,p1,p1,..."""
    uids = batch.non_tensor_batch["uid"]
    prompts = len(dict.fromkeys(uids.tolist()))
    n = len(uids) // max(1, prompts)
    index = np.arange(len(uids)).reshape(prompts, n).T.reshape(-1)
    for name in ("uid", "raw_prompt", "prompt_ids", "reward_model", "extra_info", "index"):
        if name in batch.non_tensor_batch:
            batch.non_tensor_batch[name] = batch.non_tensor_batch[name][index]
    wrong = np.flatnonzero(batch.non_tensor_batch["uid"] != uids)
    return Truth("uid", tuple(wrong.tolist()))


@fault("reward_on_pad", "reward", "token_level_scores")
def reward_on_pad(batch: DataProto) -> Truth:
    """Scores of shorter rows sit on the last column, a padding slot that the mask removes."""
    scores = batch.batch["token_level_scores"]
    moved = scores.clone()
    width = scores.shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(1)
    rows = torch.nonzero((lengths < width) & (scores.sum(1) != 0)).squeeze(1)
    moved[rows] = 0.0
    moved[rows, width - 1] = scores[rows].sum(1)
    batch.batch["token_level_scores"] = moved
    return cells("token_level_scores", (moved != 0) & (scores == 0))


@fault("stale_rollout_weights", "sync_weights", "weights", where="before_sync")
def stale_rollout_weights(weights: Any, previous: Any) -> Any:
    """The engine gets the weights of the sync before."""
    return previous


@fault("other_temperature", "rollout", "sampling.temperature", where="sampling")
def other_temperature(sampling: dict[str, Any]) -> dict[str, Any]:
    """The engine samples at 0.7 of the configured temperature."""
    return {**sampling, "temperature": 0.7 * float(sampling["temperature"])}


_KNOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "log_prob_shift": (("shift",), ()),
    "mask_on_pad": (("mask_on_padding",), ("B019",)),
    "tiled_groups": (("tiled_groups",), ()),
    "reward_on_pad": (("reward_on_padding",), ("B037",)),
    "stale_rollout_weights": (("stale_rollout_weights",), ("B118",)),
    "other_temperature": (("temperature_mismatch",), ()),
}


def _on_scene(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda scene: apply(scene.batch)


for _name, (_causes, _origin) in _KNOWN.items():
    _live = FAULTS[_name]
    CATALOGUE[_name] = replace(
        _live,
        apply=_on_scene(_live.apply) if _live.where == "after_stage" else _live.apply,
        stages=(_live.stage,), fields=(_live.field,), causes=_causes, origin=_origin,
        bases=DEFAULT_BASES, tuned=True,
    )  # fmt: skip
