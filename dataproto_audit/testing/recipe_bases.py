"""Three tiny healthy batches that bug reports are retold on.

``T`` is text GRPO (two prompts, n = 3), ``M`` one group of two multi-turn rows, ``V`` two rows with
an image each. Log-probs are written by hand. They belong to no model: the probabilities after one
prefix may sum to more than 1, in rollout and trainer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAD, STOP = 0, 9
Fields = dict[str, NDArray[Any]]


class Recipe:
    """A batch under construction: ``tensors``, ``objects`` (non-tensor arrays) and ``meta``."""

    def __init__(self, tensors: Fields, objects: Fields, meta: dict[str, Any]) -> None:
        self.tensors, self.objects, self.meta = tensors, objects, meta

    def batch(self) -> dict[str, Any]:
        """The batch as a plain mapping."""
        return {
            "batch": self.tensors, "non_tensor_batch": self.objects, "meta_info": self.meta,
        }  # fmt: skip


def listed(*values: Any) -> NDArray[Any]:
    """An object array, one entry each."""
    out = np.empty(len(values), object)
    for at, value in enumerate(values):
        out[at] = value
    return out


def _padded(rows: Sequence[Sequence[float]], width: int) -> NDArray[np.float64]:
    out = np.zeros((len(rows), width))
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out


def _last(mask: NDArray[Any]) -> NDArray[np.int64]:
    last: NDArray[np.int64] = mask.shape[1] - 1 - (mask[:, ::-1] > 0).argmax(1)
    return last


def on_last(values: Sequence[float], mask: NDArray[Any]) -> NDArray[np.float64]:
    """One value a row, on its last trained token."""
    out = np.zeros(mask.shape)
    out[np.arange(len(values)), _last(mask)] = values
    return out


def group_advantages(
    scores: NDArray[np.float64], groups: Sequence[Any], mask: NDArray[Any]
) -> NDArray[np.float64]:
    """GRPO: (score - mean) / (unbiased std + 1e-6) of the row's group, on the mask ``[B,R]``.

    A group of one keeps its score (arXiv 2402.03300, 4.1; the case of one as in verl).
    """
    out = np.zeros(len(scores))
    for group in dict.fromkeys(groups):
        rows = [row for row, own in enumerate(groups) if own == group]
        own = scores[rows]
        alone = len(rows) == 1
        mean, std = (0.0, 1.0) if alone else (own.mean(), own.std(ddof=1))
        out[rows] = (own - mean) / (std + 1e-6)
    spread: NDArray[np.float64] = out[:, None] * mask
    return spread


def position_ids(attention: NDArray[Any]) -> NDArray[Any]:
    """The running count of attended tokens."""
    return np.clip(np.cumsum(attention, 1) - 1, 0, None)


def _tokens(prompts: NDArray[Any], responses: NDArray[Any], attention: NDArray[Any]) -> Fields:
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": position_ids(attention),
    }


def _trained(tensors: Fields, scores: Sequence[float], groups: Sequence[Any]) -> None:
    mask = tensors["response_mask"]
    tensors["token_level_scores"] = on_last(scores, mask)
    tensors["token_level_rewards"] = tensors["token_level_scores"].copy()
    tensors["advantages"] = group_advantages(np.array(scores), groups, mask)
    tensors["returns"] = tensors["advantages"].copy()


def _text() -> Recipe:
    prompts = np.array([[PAD, 11, 12, 13]] * 3 + [[PAD, PAD, 14, 15]] * 3)
    rows = [[3, 4, 9], [5, 6, 7, 9], [8, 9], [4, 5, 6, 7, 8], [6, 9], [7, 3, 5, 9]]
    responses = _padded(rows, 5).astype(np.int64)
    mask = (np.arange(5)[None] < np.array([len(row) for row in rows])[:, None]).astype(np.int64)
    old = _padded(
        [[-0.5, -1.2, -0.3], [-0.8, -0.4, -1.6, -0.2], [-0.9, -0.1],
         [-0.7, -1.1, -0.6, -0.25, -1.9], [-0.35, -0.15], [-1.4, -0.65, -0.45, -0.05]], 5,
    )  # fmt: skip
    noise = _padded(
        [[0.005, -0.004, 0.002], [-0.003, 0.004, -0.006, 0.001], [0.003, 0.001],
         [0.002, 0.004, -0.003, 0.001, -0.007], [-0.002, 0.001], [0.006, -0.002, 0.003]], 5,
    )  # fmt: skip
    attention = np.concatenate([(prompts != PAD).astype(np.int64), mask], 1)
    uid = listed("A", "A", "A", "B", "B", "B")
    tensors = _tokens(prompts, responses, attention) | {
        "response_mask": mask,
        "rollout_log_probs": old - noise,
        "old_log_probs": old,
        "ref_log_prob": old.copy(),
        "values": _padded(
            [[0.2, 0.3, 0.4], [0.1, 0.1, 0.2, 0.2], [0.3, 0.2], [0.5, 0.5, 0.6, 0.6, 0.7],
             [0.4, 0.4], [0.3, 0.2, 0.2, 0.1]], 5,
        ),
    }  # fmt: skip
    _trained(tensors, [1.0, 0.2, 0.6, 0.1, 0.9, 0.8], uid.tolist())
    objects = {
        "uid": uid,
        "index": listed(0, 0, 0, 1, 1, 1),
        "data_source": listed(*["toy"] * 6),
        "ground_truth": listed("a", "a", "a", "b", "b", "b"),
    }
    meta = {"n": 3, "temperature": 1.0, "global_steps": 1, "eos_token_id": STOP,
            "pad_token_id": PAD, "adv_estimator": "grpo", "dp_size": 2}  # fmt: skip
    return Recipe(tensors, objects, meta)


def _multi_turn() -> Recipe:
    prompts = np.array([[11, 12, 13]] * 2)
    responses = np.array([[3, 4, 21, 22, 23, 5, 9, 0], [6, 24, 25, 7, 8, 9, 0, 0]])
    attended = (np.arange(8)[None] < np.array([[7], [6]])).astype(np.int64)
    mask = attended * (responses < 21)
    old = _padded([[-0.4, -0.9, -3.1, -2.7, -4.0, -0.6, -0.1],
                   [-1.1, -5.2, -3.3, -0.7, -0.2, -0.3]], 8)  # fmt: skip
    uid = listed("A", "A")
    attention = np.concatenate([np.ones_like(prompts), attended], 1)
    tensors = _tokens(prompts, responses, attention) | {
        "response_mask": mask,
        "rollout_log_probs": np.where(mask == 1, old + 0.002, 0.0),
        "old_log_probs": old,
        "ref_log_prob": old.copy(),
        "values": _padded([[0.2, 0.3, 9, 9, 9, 0.4, 0.5], [0.1, 9, 9, 0.2, 0.3, 0.3]], 8),
    }
    _trained(tensors, [1.0, 0.4], uid.tolist())
    meta = {"n": 2, "temperature": 1.0, "global_steps": 1, "eos_token_id": STOP,
            "pad_token_id": PAD, "adv_estimator": "grpo",
            "tool_token_ids": [21, 22, 23, 24, 25]}  # fmt: skip
    return Recipe(tensors, {"uid": uid, "index": listed(0, 0)}, meta)


def _images() -> Recipe:
    prompts = np.array([[0, 11, 50, 50, 12], [13, 50, 50, 14, 15]])
    responses = np.array([[3, 9, 0], [4, 5, 9]])
    attention = np.concatenate([prompts != PAD, responses != PAD], 1).astype(np.int64)
    time = np.array([[0, 0, 1, 1, 3, 4, 5, 0], [0, 1, 1, 3, 4, 5, 6, 7]])
    width = time.copy()
    width[0, 3], width[1, 2] = 2, 2  # the second piece of the image
    mask, old = attention[:, 5:].copy(), np.array([[-0.5, -0.2, 0], [-0.8, -1.0, -0.1]])
    tensors = _tokens(prompts, responses, attention) | {
        "position_ids": np.stack([position_ids(attention), time, time, width], 1),
        "response_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": np.where(mask == 1, old + 0.003, 0.0),
    }
    grids = np.array([[[1, 2, 4]], [[1, 2, 4]]])
    meta = {"n": 2, "image_token_id": 50, "merge_size": 2, "pad_token_id": PAD,
            "eos_token_id": STOP}  # fmt: skip
    return Recipe(tensors, {"uid": listed("A", "A"), "image_grid_thw": grids}, meta)


BASES: dict[str, Callable[[], Recipe]] = {"T": _text, "M": _multi_turn, "V": _images}
