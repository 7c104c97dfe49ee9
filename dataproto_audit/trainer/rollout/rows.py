"""Rows of a batch to engine requests, and an engine's answer back to rows.

Legend: B rows, K requests, P prompt width, R response width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.rollout.base import Generation, join

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Widths:
    """Prompt and response columns of the batch, and the id that fills the rest."""

    prompt: int
    response: int
    pad_id: int


@dataclass(frozen=True)
class Requests:
    """``prompts_BP``/``mask_BP`` are the rows' padded prompts; request k stands for the next
    ``count_K[k]`` rows, whose uid and prompt are equal.
    """

    prompts_BP: Ids
    mask_BP: Ids
    tokens_T: NDArray[np.int32]
    length_K: NDArray[np.int32]
    count_K: NDArray[np.int32]


def to_requests(batch: DataProto, widths: Widths) -> Requests:
    """Collapse runs of adjacent rows with one uid and one prompt to one request of n samples.

    Prompts are ``prompt_ids`` (object array of id lists) or the tensors ``prompts`` and
    ``attention_mask``. Rows without uid, or whose prompts differ, are requests of their own:
    every row gets samples of its own prompt, whatever the uid says. Raises UsageError DPA853 for
    prompts wider than P and DPA857 for empty ones.
    """
    prompts = _prompts(batch)
    uids = batch.non_tensor_batch.get("uid")
    heads: list[int] = []
    for row, ids in enumerate(prompts):
        same = row > 0 and uids is not None and uids[row] == uids[row - 1]
        if not (same and ids == prompts[row - 1]):
            _check(row, ids, widths.prompt)
            heads.append(row)
    count_K = np.diff([*heads, len(prompts)]).astype(np.int32)
    tokens_T, length_K = join([prompts[row] for row in heads])
    shape = (len(heads), widths.prompt)
    prompts_KP, mask_KP = np.full(shape, widths.pad_id, np.int64), np.zeros(shape, np.int64)
    slots = np.arange(widths.prompt) >= widths.prompt - length_K[:, None]
    prompts_KP[slots] = tokens_T
    mask_KP[slots] = 1
    repeated = prompts_KP.repeat(count_K, 0), mask_KP.repeat(count_K, 0)
    return Requests(*repeated, tokens_T, length_K, count_K)


def _prompts(batch: DataProto) -> list[list[int]]:
    ids = batch.non_tensor_batch.get("prompt_ids")
    if ids is not None:
        return [list(row) for row in ids]
    prompts_BP = batch.batch["prompts"]
    mask_BP = batch.batch["attention_mask"][:, : prompts_BP.shape[1]].bool()
    return [row[mask].tolist() for row, mask in zip(prompts_BP, mask_BP, strict=True)]


def _check(row: int, ids: list[int], width: int) -> None:
    if not ids:
        raise UsageError("DPA857", f"row {row} has an empty prompt.", "Every prompt needs a token.")
    if len(ids) > width:
        raise UsageError(
            "DPA853",
            f"row {row} has a prompt of {len(ids)} tokens, more than {width}.",
            "Raise data.max_prompt_length, or filter or truncate the data.",
        )


def to_batch(requests: Requests, generation: Generation, widths: Widths) -> DataProto:
    """Rows as the loop wants them: prompts padded left, responses right, masks and positions.

    Adds prompts, responses, input_ids, attention_mask, position_ids, response_mask (all i64),
    rollout_log_probs f32 (0 off the mask) and ``finish_reason``, "stop" or "length".
    """
    rows, made = generation.tokens_NW.shape
    width = max(widths.response, made)
    responses_BR = np.full((rows, width), widths.pad_id, np.int64)
    responses_BR[:, :made] = generation.tokens_NW
    log_probs_BR = np.zeros((rows, width), np.float32)
    log_probs_BR[:, :made] = generation.log_probs_NW
    mask_BR = (np.arange(width) < generation.length_N[:, None]).astype(np.int64)
    mask = np.concatenate([requests.mask_BP, mask_BR], axis=1)
    arrays = {
        "prompts": requests.prompts_BP,
        "responses": responses_BR,
        "response_mask": mask_BR,
        "input_ids": np.concatenate([requests.prompts_BP, responses_BR], axis=1),
        "attention_mask": mask,
        "position_ids": positions(mask),
        "rollout_log_probs": log_probs_BR,
    }
    reason = np.where(generation.stopped_N, "stop", "length").astype(object)
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
        non_tensors={"finish_reason": reason},
        meta_info={"sampling": generation.used},
    )


def positions(mask: Ids) -> Ids:
    """Positions counted over attended slots: clip(cumsum(mask) - 1, 0)."""
    return np.clip(mask.cumsum(axis=1) - 1, 0, None)
