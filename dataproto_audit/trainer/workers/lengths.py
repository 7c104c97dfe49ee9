"""Plans of a call from the masks of its batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.plans import MicroBatching, UpdatePlan, plan_update


def lengths_of(batch: DataProto, mask: str) -> NDArray[np.int64]:
    """Tokens of each row under ``mask``, i64[rows]; raises DPA851 if the batch lacks it."""
    if mask not in batch.batch:
        raise UsageError("DPA851", f"the batch lacks {mask}.", "An earlier stage writes it.")
    lengths: NDArray[np.int64] = batch.batch[mask].sum(-1).numpy().astype(np.int64)
    return lengths


def warmup_plan(
    batch: DataProto, *, steps: int, ranks: int, micro: MicroBatching
) -> tuple[DataProto, UpdatePlan]:
    """``batch`` reordered so that a rank's chunk holds its share of every step, and the plan."""
    rows = len(batch)
    if rows % steps or (rows // steps) % ranks:
        raise UsageError(
            "DPA854",
            f"{rows} warm-up rows cannot be cut into {steps} steps over {ranks} ranks.",
            "Make warmup.batch_size a multiple of the number of ranks.",
        )
    order = np.arange(rows).reshape(steps, ranks, -1).transpose(1, 0, 2).reshape(-1)
    batch = batch.select_idxs(order)
    plan = plan_update(
        lengths_of(batch, "attention_mask"),
        lengths_of(batch, "response_mask"),
        ranks=ranks,
        mini_batch_size=rows // steps,
        width=int(batch.batch["responses"].shape[1]),
        micro=micro,
        shuffle=False,
    )
    return batch, plan
