"""Fields of a simulated step that follow from others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.reference import advantages as estimators
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.toy_policy import PAD, START, STOP

MAX_WEIGHT = 2.0
"""Importance weights are cut here."""


def objects(values: list[Any]) -> NDArray[np.object_]:
    """A one-dimensional object array, also of lists."""
    out = np.empty(len(values), object)
    for row, value in enumerate(values):
        out[row] = value
    return out


def left_padded(lists: list[list[int]], width: int) -> tuple[Any, Any]:
    """Ids ``[N, width]`` and which of them are real."""
    ids, used = np.full((len(lists), width), PAD), np.zeros((len(lists), width), bool)
    for row, items in enumerate(lists):
        ids[row, width - len(items) :] = items
        used[row, width - len(items) :] = True
    return ids, used


def response_attention(tensors: Any) -> Tensor:
    """What is attended of the response, bool ``[rows, response]``."""
    attended: Tensor = tensors["attention_mask"][:, -tensors["responses"].shape[1] :] != 0
    return attended


def last_ids(tensors: Any) -> Tensor:
    """The last attended id of each response; of an empty one, the last column's."""
    responses: Tensor = tensors["responses"]
    return responses[torch.arange(len(responses)), response_attention(tensors).sum(1) - 1]


def padding_rows(fields: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """``fields`` with rows that only fill up: one prompt id, a stop token, nothing trained on."""
    width, columns = fields["prompts"].shape[1], fields["responses"].shape[1]
    prompts = torch.full((rows, width), PAD)
    responses = torch.full((rows, columns), PAD)
    prompts[:, -1], responses[:, 0] = START, STOP
    attention = torch.zeros((rows, width + columns), dtype=torch.int64)
    attention[:, width - 1 : width + 1] = 1
    more = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    out = {}
    for name, tensor in fields.items():
        extra = more.get(name, torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype))
        if extra.dim() < tensor.dim():
            extra = extra[:, None].expand(rows, *tensor.shape[1:])
        out[name] = torch.cat([tensor, extra.to(tensor.dtype)])
    return out


def corrected(tensors: Any) -> None:
    """Rollout correction: weights old over rollout, cut; one row in eight and a token rejected."""
    mask = tensors["response_mask"].clone()
    gap = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).float()
    weights = gap.exp().clamp(max=MAX_WEIGHT)
    mask[::8] = 0
    mask[1::8, 0] = 0
    tensors["rollout_is_weights"] = torch.where(tensors["response_mask"] != 0, weights, 0.0)
    tensors["response_mask"] = mask


def estimated(o: Options, tensors: Any, uid: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the configured estimator, float64."""
    rewards, mask = tensors["token_level_rewards"], tensors["response_mask"]
    if o.critic:
        return estimators.gae(rewards, tensors["values"], mask, gamma=o.gamma, lam=o.lam)
    if o.estimator == "remax":
        return estimators.remax(rewards, mask, tensors["reward_baselines"])
    if o.estimator == "reinforce_plus_plus":
        return estimators.reinforce_plus_plus(rewards, mask, gamma=o.gamma)
    options = {"norm_by_std": o.norm_by_std} if o.estimator.startswith("grpo") else {}
    made: tuple[Tensor, Tensor] = getattr(estimators, o.estimator)(rewards, mask, uid, **options)
    return made


def image_positions(images: NDArray[np.bool_], attention: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions in time, height and width ``[rows, 3, columns]`` for images of 1 x 1 x 2 pieces.

    Text advances all three together; the second piece of an image is one further in width only.
    """
    out = np.zeros((len(images), 3, images.shape[1]), np.int64)
    for row in range(len(images)):
        at, pieces = 0, 0
        for column in np.flatnonzero(attention[row]):
            if not images[row, column]:
                out[row, :, column] = at
                at += 1
                continue
            out[row, :, column] = at
            out[row, 2, column] += pieces
            pieces = (pieces + 1) % 2
            at += 0 if pieces else 2
    return out


def batch_metrics(batch: Any, new: Tensor) -> dict[str, float]:
    """What the batch says of itself: counts, shares, gaps, clipping."""
    tensors = batch.batch
    mask, attended = tensors["response_mask"] != 0, response_attention(tensors)
    old = tensors["old_log_probs"].float()
    ratio = (new.float() - old)[mask].exp()
    scores = tensors["token_level_rewards"].sum(1).tolist()
    groups: dict[str, set[float]] = {}
    for uid, score in zip(batch.non_tensor_batch["uid"].tolist(), scores, strict=True):
        groups.setdefault(uid, set()).add(score)
    return {
        "actor/pg_clipfrac": float(((ratio < 0.8) | (ratio > 1.28)).float().mean()),
        "response_mask/tokens": float(mask.sum()),
        "response_mask/masked_share": 1.0 - float(mask.sum()) / max(1.0, float(attended.sum())),
        "groups/dead_share": sum(len(found) == 1 for found in groups.values()) / len(groups),
        "rollout_corr/abs_log_prob_gap": float(
            (old - tensors["rollout_log_probs"])[mask].abs().mean()
        ),
    }
