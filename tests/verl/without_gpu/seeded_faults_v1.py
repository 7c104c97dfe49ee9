"""Faults inside verl's V1 trainer, one in each step: ``SEEDED_V1=1:reference_hot,2:old_shifted``.

Each changes what a stage leaves in the store, or the keys that it hands on, as a mistake there
would.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dataproto_audit.integrations.on_import import OnImport

STEPS = dict(
    reversed(entry.split(":")) for entry in os.environ.get("SEEDED_V1", "").split(",") if entry
)


def rows_of(tensor: Any) -> list[Any]:
    """A tensor for each row."""
    return [row.clone() for row in tensor.unbind()]


def hot(rows: list[Any]) -> list[Any]:
    """Of a reference at another temperature."""
    return [row * 1.2 for row in rows]


def shifted(rows: list[Any]) -> list[Any]:
    """Each a token late."""
    return [torch.cat([row[:1] * 0, row[:-1]]) for row in rows]


def rolled(rows: list[Any]) -> list[Any]:
    """Each with its last value in front."""
    return [torch.roll(row, 1) for row in rows]


def swapped(rows: list[Any]) -> list[Any]:
    """Each pair of neighbours written under the key of the other."""
    return [rows[row ^ 1] for row in range(len(rows))]


def flipped(rows: list[Any]) -> list[Any]:
    """With the other sign."""
    return [-row for row in rows]


def stored(module: ModuleType, batch: Any, field: str, change: Callable[..., Any]) -> Any:
    """Write ``field`` of these keys again, changed."""
    data = module.tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[field]
    )
    data[field] = torch.nested.as_nested_tensor(change(rows_of(data[field])), layout=torch.jagged)
    module.tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)
    return batch


def reordered(batch: Any) -> Any:
    """The first two keys change places."""
    keys = [batch.keys[1], batch.keys[0], *batch.keys[2:]]
    out = batch.select_keys(keys)
    out.partition_id = batch.partition_id
    return out


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "reference_hot": ("_compute_ref_log_prob", lambda m, b: stored(m, b, "ref_log_prob", hot)),
    "old_shifted": ("_compute_old_log_prob", lambda m, b: stored(m, b, "old_log_probs", shifted)),
    "old_swapped": ("_compute_old_log_prob", lambda m, b: stored(m, b, "old_log_probs", swapped)),
    "reference_shifted": (
        "_compute_ref_log_prob",
        lambda m, b: stored(m, b, "ref_log_prob", shifted),
    ),
    "rewards_moved": ("_balance_batch", lambda m, b: stored(m, b, "rm_scores", rolled)),
    "advantages_swapped": ("_compute_advantage", lambda m, b: stored(m, b, "advantages", swapped)),
    "keys_reordered": ("_compute_ref_log_prob", lambda _, b: reordered(b)),
    "sign_flipped": ("_compute_advantage", lambda m, b: stored(m, b, "advantages", flipped)),
    "keys_dropped": ("_compute_ref_log_prob", lambda _, b: b.select_keys(b.keys[8:])),
}
"""The method behind which each fault happens, and what it does to keys and store."""


def install(module: ModuleType) -> None:
    """Put the faults behind their methods."""
    for name, (method, change) in FAULTS.items():
        if name in STEPS:
            seed(module, name, method, change)


def seed(module: ModuleType, name: str, method: str, change: Callable[..., Any]) -> None:
    """``change`` what ``method`` hands on in the step of that fault."""
    original = getattr(module.PPOTrainer, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        due = STEPS.get(name) == str(self.global_steps)
        return change(module, batch) if due else batch

    setattr(module.PPOTrainer, method, changed)


def unsent(module: ModuleType) -> None:
    """``stale_weights``: the weights of the step before were not sent."""
    manager = module.CheckpointEngineManager
    send = manager.update_weights

    def update_weights(self: Any, global_steps: Any = None, *args: Any, **kwargs: Any) -> Any:
        if global_steps is not None and STEPS.get("stale_weights") == str(global_steps + 1):
            return {}
        return send(self, global_steps, *args, **kwargs)

    manager.update_weights = update_weights


OnImport("verl.trainer.ppo.v1.trainer_base", install).install()
OnImport("verl.checkpoint_engine.base", unsent).install()
