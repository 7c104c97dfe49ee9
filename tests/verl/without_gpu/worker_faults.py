"""Faults inside verl's engine workers, one in each update: ``WORKER_FAULTS=dropped,scaled,packed``.

Loaded before the audit, so that its hooks see what is really run.
"""

import os
from types import ModuleType
from typing import Any

import torch

from dataproto_audit.integrations.on_import import OnImport

ORDER = os.environ.get("WORKER_FAULTS", "").split(",")
NOW: dict[str, Any] = {"update": 0, "training": False}


def due(name: str) -> bool:
    """True in the update of that fault."""
    place = NOW["update"] - 1
    return NOW["training"] and 0 <= place < len(ORDER) and ORDER[place] == name


def workers(module: ModuleType) -> None:
    """Count the updates."""
    original = module.TrainingWorker.train_mini_batch

    def train_mini_batch(self: Any, data: Any) -> Any:
        NOW.update(update=NOW["update"] + 1, training=True)
        try:
            return original(self, data)
        finally:
            NOW["training"] = False

    train_mini_batch.__dict__.update(original.__dict__)
    module.TrainingWorker.train_mini_batch = train_mini_batch


def engine(module: ModuleType) -> None:
    """``dropped``: a micro-batch; ``scaled``: losses doubled; ``packed``: positions go on."""
    split = module.prepare_micro_batches
    owner = module.FSDPEngineWithLMHead
    step, inputs = owner.forward_step, owner.prepare_model_inputs

    def prepare_micro_batches(*args: Any, **kwargs: Any) -> Any:
        micros, index = split(*args, **kwargs)
        return (micros[:-1] if due("dropped") else micros), index

    def forward_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, more = step(self, *args, **kwargs)
        return (loss * 2 if due("scaled") else loss), more

    def prepare_model_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, more = inputs(self, *args, **kwargs)
        if due("packed"):
            positions = found["position_ids"]
            found["position_ids"] = torch.arange(positions.shape[-1]).expand_as(positions)
        return found, more

    module.prepare_micro_batches = prepare_micro_batches
    owner.forward_step, owner.prepare_model_inputs = forward_step, prepare_model_inputs


OnImport("verl.workers.engine_workers", workers).install()
OnImport("verl.workers.engine.fsdp.transformer_impl", engine).install()
