"""The toy policy as a module, so that a simulated step can be recomputed with a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.testing.toy_policy import ToyPolicy, extended, prompt_hash


class ToyModel(torch.nn.Module):
    """Called as transformers' models are; it reads ``input_ids`` and ``attention_mask`` alone.

    ``policy`` has a temperature of 1: who scores with the model divides by their own.
    """

    def __init__(self, policy: ToyPolicy) -> None:
        super().__init__()
        if policy.temperature != 1.0:
            raise ValueError(f"the policy is at temperature {policy.temperature}, not 1")
        self.policy = policy

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, **_ignored: object
    ) -> SimpleNamespace:
        """``logits`` [rows, total, vocabulary], float32."""
        ids, on = input_ids.numpy(), attention_mask.numpy() != 0
        prefix = prompt_hash(ids[:, :0], on[:, :0])
        logits = np.empty((*ids.shape, self.policy.vocab), np.float32)
        for column in range(ids.shape[1]):
            prefix = np.where(on[:, column], extended(prefix, ids[:, column]), prefix)
            logits[:, column] = self.policy.log_probs(prefix)
        return SimpleNamespace(logits=torch.from_numpy(logits))
