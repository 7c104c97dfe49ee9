"""Metrics of one step from its batch, under verl's names where verl has them.

Units: lengths in tokens, times in seconds, scores as the reward function returned them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.protocol import DataProto


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Scores, advantages and lengths of a finished batch of rows ``[B,R]``."""
    tensors = batch.batch
    mask = tensors["response_mask"].numpy() != 0
    width = mask.shape[1]
    attended = tensors["attention_mask"].numpy() != 0
    prompt, response = attended[:, :-width].sum(1), attended[:, -width:].sum(1)
    scores = tensors["token_level_scores"].numpy().sum(1)
    rewards = tensors["token_level_rewards"].numpy().sum(1)
    advantages = tensors["advantages"].numpy()[mask]
    learnt = {}
    if "values" in tensors:
        returns, guessed = (tensors[name].numpy()[mask] for name in ("returns", "values"))
        learnt = {"critic/returns": returns, "critic/values": guessed}
    out: dict[str, float] = {}
    for name, values in (
        *learnt.items(),
        ("critic/score", scores),
        ("critic/rewards", rewards),
        ("critic/advantages", advantages),
        ("response_length", response),
        ("prompt_length", prompt),
    ):
        if values.size:
            out[f"{name}/mean"] = float(values.mean())
            out[f"{name}/max"] = float(values.max())
            out[f"{name}/min"] = float(values.min())
    if learnt and returns.size > 1 and returns.var() > 0:
        out["critic/vf_explained_var"] = 1.0 - float((returns - guessed).var() / returns.var())
    out["response_length/clip_ratio"] = float((response == width).mean())
    out["response/aborted_ratio"] = float((response == 0).mean())
    out["perf/total_num_tokens"] = float(attended.sum())
    out["response_mask/tokens"] = float(mask.sum())
    out["response_mask/masked_share"] = 1.0 - float(mask.sum()) / max(1.0, float(response.sum()))
    out["groups/dead_share"] = dead_share(batch.non_tensor_batch["uid"].tolist(), rewards)
    if "rollout_log_probs" in tensors and mask.any():
        gap = tensors["old_log_probs"].numpy() - tensors["rollout_log_probs"].numpy()
        out["rollout_corr/abs_log_prob_gap"] = float(np.abs(gap[mask]).mean())
    return out


def kl_metrics(kl: Tensor, response_mask: Tensor, weight: float) -> dict[str, float]:
    """The mean over rows of the mean KL ``[B,R]`` (nats) of their trained tokens, and its weight.

    ``kl`` is 0 off the mask; a row without trained tokens counts as 0.
    """
    counts = (response_mask != 0).sum(-1).clamp(min=1)
    mean = float((kl.sum(-1) / counts).mean())
    return {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": weight}


def dead_share(uids: Sequence[Any], rewards: NDArray[Any]) -> float:
    """Share of the groups whose rows all have one reward; groups of one row do not count."""
    groups: dict[Any, list[float]] = {}
    for uid, reward in zip(uids, rewards.tolist(), strict=True):
        groups.setdefault(uid, []).append(reward)
    several = [own for own in groups.values() if len(own) > 1]
    return sum(min(own) == max(own) for own in several) / len(several) if several else 0.0
