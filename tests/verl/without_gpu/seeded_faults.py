"""Faults inside verl's own trainer, one in each step: ``SEEDED=1:reference_hot,2:tiled``.

Each changes what one of verl's calls hands on, in that step only, as a mistake there would.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dataproto_audit.integrations.on_import import OnImport

STEPS = dict(
    reversed(entry.split(":")) for entry in os.environ.get("SEEDED", "").split(",") if entry
)
NOW: dict[str, int] = {"step": 0, "repeats": 0}


def due(name: str) -> bool:
    """True in the step of that fault."""
    return STEPS.get(name) == str(NOW["step"])


def after(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """``change(result, *args)`` once ``owner.name`` has returned; what it returns is handed on."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        other = change(result, *args)
        return result if other is None else other

    setattr(owner, name, changed)


def prompts(module: ModuleType) -> None:
    """Know the step; the repeats follow behind this call."""

    def begun(_: Any, trainer: Any, batch: Any) -> None:
        NOW["step"] = trainer.global_steps

    after(module.RayPPOTrainer, "_get_gen_batch", begun)


def repeats(module: ModuleType) -> None:
    """``tiled``: not interleaved. ``uid_late``: ids drawn after the repeat."""
    original = module.DataProto.repeat

    def repeat(self: Any, repeat_times: int = 2, interleave: bool = True) -> Any:
        out = original(self, repeat_times, interleave and not due("tiled"))
        if due("uid_late") and "uid" in out.non_tensor_batch:
            ids = [f"late-{row}" for row in range(len(out))]
            out.non_tensor_batch["uid"] = np.array(ids, dtype=object)
        return out

    module.DataProto.repeat = repeat


def unions(module: ModuleType) -> None:
    """``union_rows``: responses joined to the prompts of their neighbours."""
    original = module.DataProto.union

    def union(self: Any, other: Any) -> Any:
        if due("union_rows") and "responses" in (
            () if other.batch is None else set(other.batch.keys())
        ):
            other = other.select_idxs(np.roll(np.arange(len(other)), 1))
        return original(self, other)

    module.DataProto.union = union


def rollouts(module: ModuleType) -> None:
    """Faults in what the rollout hands on: masks, positions, log-probs."""

    def made(_: Any, trainer: Any) -> None:
        def sampled(result: Any, *__: Any) -> None:
            batch = result.batch
            if due("mask_all"):
                batch["response_mask"] = torch.ones_like(batch["response_mask"])
            if due("positions_shifted"):
                batch["position_ids"] = batch["position_ids"] + 1
            if due("attends_padding"):
                batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
            if due("mask_tools"):
                batch["response_mask"] = batch["attention_mask"][:, -batch["responses"].shape[1] :]
            if due("rollout_zeros"):
                batch["rollout_log_probs"] = torch.zeros_like(batch["rollout_log_probs"])

        after(trainer.async_rollout_manager, "generate_sequences", sampled)

    after(module.RayPPOTrainer, "init_workers", made)


def drivers(module: ModuleType) -> None:
    """Faults in what the driver computes."""
    trainer = module.RayPPOTrainer

    def balanced(_: Any, __: Any, batch: Any, *___: Any) -> None:
        if due("uid_rolled"):
            batch.non_tensor_batch["uid"] = np.roll(batch.non_tensor_batch["uid"], 1)
        if due("two_rows_mixed"):
            for name in ("responses", "response_mask", "rollout_log_probs"):
                batch.batch[name][:2] = batch.batch[name][:2].flip(0)
        if due("rows_mixed"):
            batch.batch["rm_scores"] = batch.batch["rm_scores"].flip(0)

    def rewarded(result: Any, *_: Any) -> Any:
        scores, extra = result
        if due("reward_rows"):
            return torch.roll(scores, 1, 0), extra
        return (torch.roll(scores, 1, 1), extra) if due("reward_shifted") else None

    def old(result: Any, *_: Any) -> None:
        if due("old_shifted"):
            batch = result[0].batch
            batch["old_log_probs"] = torch.roll(batch["old_log_probs"], 1, 1)
        if due("old_rows"):
            batch = result[0].batch
            batch["old_log_probs"] = torch.roll(batch["old_log_probs"], 1, 0)

    def reference(result: Any, *_: Any) -> None:
        if due("reference_hot"):
            result.batch["ref_log_prob"] = result.batch["ref_log_prob"] * 1.5

    def advantages(result: Any, *_: Any) -> None:
        if due("batch_norm"):
            scores = result.batch["token_level_rewards"].sum(-1, keepdim=True)
            mask = result.batch["response_mask"]
            result.batch["advantages"] = (scores - scores.mean()) / (scores.std() + 1e-6) * mask
        if due("sign_flipped"):
            result.batch["advantages"] = -result.batch["advantages"]

    def updated(_: Any, __: Any, batch: Any) -> None:
        if due("update_writes"):
            batch.batch["advantages"] = batch.batch["advantages"] + 1.0

    after(trainer, "_balance_batch", balanced)
    after(module, "extract_reward", rewarded)
    after(trainer, "_compute_old_log_prob", old)
    after(trainer, "_compute_ref_log_prob", reference)
    after(module, "compute_advantage", advantages)
    after(trainer, "_update_actor", updated)


def seed(module: ModuleType) -> None:
    """Put all faults in place; each waits for its step."""
    for part in (prompts, repeats, unions, rollouts, drivers):
        part(module)


OnImport("verl.trainer.ppo.ray_trainer", seed).install()
