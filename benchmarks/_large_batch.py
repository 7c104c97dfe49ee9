"""A large healthy GRPO batch: what one step of a real run hands to the actor update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCABULARY, STOP, PAD = 32_000, 2, 0


def large_batch(rows: int, prompt: int, response: int, *, n: int = 8) -> dict[str, Any]:
    """``rows`` responses to ``rows / n`` prompts, as a plain mapping: 9 tensors, GRPO advantages.

    Prompts fill half to all of their width, responses a quarter to all of theirs. A log-prob is a
    function of the tokens up to it, as it is for a model, and rollout noise is that of float32.
    """
    random = torch.Generator().manual_seed(0)
    length = torch.randint(prompt // 2, prompt + 1, (rows // n,), generator=random)
    prompts = torch.randint(10, VOCABULARY, (rows // n, prompt), generator=random)
    shown = torch.arange(prompt) >= prompt - length[:, None]
    prompts, shown = ((x * 1).repeat_interleave(n, 0) for x in (prompts * shown, shown))
    tokens = torch.randint(response // 4, response + 1, (rows,), generator=random)
    mask = (torch.arange(response) < tokens[:, None]).long()
    responses = torch.randint(10, VOCABULARY, (rows, response), generator=random)
    responses[torch.arange(rows), tokens - 1] = STOP
    responses *= mask
    ids = torch.cat([prompts, responses], 1)
    attended = torch.cat([shown, mask], 1)
    prefix = ids.cumsum(1) * 2_654_435_761 % 1_000_003  # the same after the same tokens
    log_probs = (-8.0 - 4.0 * prefix[:, prompt:] / 1_000_003) * mask
    noise = 1e-5 * torch.randn(rows, response, generator=random) * mask
    score = torch.rand(rows, generator=random)
    scores = torch.zeros(rows, response)
    scores[torch.arange(rows), tokens - 1] = score
    groups = score.view(-1, n).double()
    gain = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    advantages = gain.view(-1, 1).float() * mask
    tensors: dict[str, Tensor] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ids,
        "attention_mask": attended,
        "position_ids": (attended.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "rollout_log_probs": (log_probs + noise).float(),
        "old_log_probs": log_probs.float(),
        "ref_log_prob": log_probs.float(),
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        "advantages": advantages,
        "returns": advantages.clone(),
    }
    uid = np.array([str(row // n) for row in range(rows)], object)
    return {"batch": tensors, "non_tensor_batch": {"uid": uid}, "meta_info": meta(n)}


def meta(n: int) -> dict[str, Any]:
    """What the run would be configured to do."""
    return {
        "n": n, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "global_steps": 1,
        "eos_token_id": STOP, "pad_token_id": PAD, "vocab_size": VOCABULARY,
        "adv_estimator": "grpo", "on_policy": True, "trainer_dtype": "float32",
        "rollout_dtype": "float32", "multi_turn": False, "rejection": False,
    }  # fmt: skip


def megabytes(batch: dict[str, Any]) -> float:
    """Bytes of the tensors, in millions."""
    return sum(t.numel() * t.element_size() for t in batch["batch"].values()) / 1e6
