"""Run inside verl's environment: the critic's loss of one mini-batch, cut in 1, 2 and 4 parts.

python value_losses.py      what the engine adds up, by the number of micro-batches, as JSON
"""

import json
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.losses import value_loss

ROWS, PROMPT, RESPONSE = 8, 3, 5
CONFIG = SimpleNamespace(
    cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None,
)  # fmt: skip


def mini_batch():
    """Dense rows of one length, and what the critic said of each of their tokens."""
    torch.manual_seed(0)
    fields = {
        "prompts": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "responses": torch.ones(ROWS, RESPONSE, dtype=torch.long),
        "attention_mask": torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long),
        "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.long),
        "values": torch.randn(ROWS, RESPONSE), "returns": torch.randn(ROWS, RESPONSE),
    }  # fmt: skip
    return TensorDict(fields, batch_size=[ROWS]), torch.randn(ROWS, PROMPT + RESPONSE)


def added(parts):
    """The sum over equal micro-batches, as ``forward_backward_batch`` accumulates gradients."""
    rows, said = mini_batch()
    total = 0.0
    for part, values in zip(rows.chunk(parts), said.chunk(parts), strict=True):
        tensordict_utils.assign_non_tensor(
            part, dp_size=1, batch_num_tokens=ROWS * RESPONSE, global_batch_size=ROWS
        )
        total += float(value_loss(CONFIG, {"values": values.reshape(-1)}, part)[0])
    return total


if __name__ == "__main__":
    print(json.dumps({str(parts): added(parts) for parts in (1, 2, 4)}))
