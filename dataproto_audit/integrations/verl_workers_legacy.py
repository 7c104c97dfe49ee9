"""Hooks in the legacy FSDP actor of verl 0.7.1 (``DataParallelPPOActor``).

Read from the wheel, ``workers/actor/dp_actor.py``: ``update_policy`` cuts with ``split`` into
mini-batches and each of those by rows or tokens; ``_forward_micro_batch`` is called once a
micro-batch, ``_optimizer_step`` once a mini-batch (509-676). The loss of a micro-batch is a mean
over itself, times its share of the rows (577-650): ``split`` says so to the probe. With one
mini-batch and one epoch the new log-probs stand in for the old ones (550, 598-601): ``old``.
"""

from __future__ import annotations

from typing import Any

import torch

from dataproto_audit.integrations.patches import Args, Kwargs
from dataproto_audit.integrations.verl_workers import (
    Hook,
    Workers,
    argument,
    mask_of,
    restarts_of,
    seen_alone,
    stays_alone,
)
from dataproto_audit.integrations.worker_record import here, row_keys


def hook(workers: Workers, module: Any) -> None:
    """Hook into the actor class of ``module``."""
    actor = getattr(module, "DataParallelPPOActor", None)
    seen = _Legacy(workers)
    for name, begin in (("compute_log_prob", seen.log_prob), ("update_policy", seen.update)):
        workers.wrap(actor, name, Hook(workers, name, before=begin, begins=True, ends=True))
    name = "_forward_micro_batch"
    workers.wrap(actor, name, Hook(workers, name, before=seen.micro_batch, after=seen.output))
    workers.wrap(actor, "_optimizer_step",
                 Hook(workers, "_optimizer_step", after=seen.stepped))  # fmt: skip


HOOKS = {"verl.workers.actor.dp_actor": hook}


class _Legacy:
    """What the hooks do; ``self`` of verl's methods is their first argument."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._lengths: list[int] = []
        self._eps = 0.0

    def log_prob(self, args: Args, kwargs: Kwargs) -> None:
        """``compute_log_prob(data)``: of the actor, or of a reference, which has no optimizer."""
        actor, data = args[0], argument(args, kwargs, "data", 1)
        stage = "ref_log_prob" if actor.actor_optimizer is None else "old_log_prob"
        limit = None
        if data.meta_info.get("use_dynamic_bsz"):
            limit = int(data.meta_info["max_token_len"]) * _splits(actor)
        self._begin(stage, actor, data, limit)

    def update(self, args: Args, kwargs: Kwargs) -> None:
        """``update_policy(data)``."""
        actor, data = args[0], argument(args, kwargs, "data", 1)
        config = actor.config
        limit = None
        if config.use_dynamic_bsz:
            limit = int(config.ppo_max_token_len_per_gpu) * _splits(actor)
        self._begin("update_actor", actor, data, limit)
        record = self._workers.record
        if record is None:
            return
        one = len(data) <= config.ppo_mini_batch_size and config.ppo_epochs == 1
        replaced = one and not getattr(config, "use_rollout_log_probs", False)
        record.about = {"path": "legacy", "split": "rows", "old": "new" if replaced else "stored"}
        if actor.scaler is None:
            self._workers.calls.wrap(
                torch.Tensor, "backward", Hook(self._workers, "backward", before=self.loss)
            )

    def _begin(self, stage: str, actor: Any, data: Any, limit: int | None) -> None:
        rows = row_keys(data.batch["input_ids"], data.batch["attention_mask"])
        splits = _splits(actor)
        self._workers.begin(stage, here(splits), rows, limit)
        if self._workers.record is not None and actor.use_remove_padding and splits == 1:
            self._watch(actor.actor_module)

    def _watch(self, model: Any) -> None:
        """Look at what goes into the model for the length of this call."""
        handle = model.register_forward_pre_hook(self.packed, with_kwargs=True)
        self._workers.handles.append(handle)

    def packed(self, model: Any, args: Args, kwargs: Kwargs) -> None:
        """The model is called."""
        record = self._workers.record
        if record is None or kwargs.get("position_ids") is None:
            return
        self._workers.guarded("packed rows", lambda: record.packed(
            restarts_of(kwargs["position_ids"], self._lengths),
            mask_of(kwargs.get("attention_mask")),
        ))  # fmt: skip

    def micro_batch(self, args: Args, kwargs: Kwargs) -> None:
        """``_forward_micro_batch(micro_batch, ...)``."""
        micro = argument(args, kwargs, "micro_batch", 1)
        keys, self._lengths = row_keys(micro["input_ids"], micro["attention_mask"])
        record, actor = self._workers.record, args[0]
        if record is None:
            return
        record.micro_batch(keys, self._lengths)
        splits = _splits(actor)
        if splits > 1 and actor.use_remove_padding and stays_alone(actor.actor_module):
            record.attended(self._lengths, seen_alone(self._lengths, splits))

    def output(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Log-probs [rows, R] of the micro-batch."""
        record = self._workers.record
        if record is None or record.asked.stage != "update_actor":
            return
        found = result if isinstance(result, dict) else {"log_probs": result[-1]}
        self._eps = float(torch.finfo(found["log_probs"].dtype).eps)
        record.output("update_log_probs", list(found["log_probs"]))
        if found.get("entropys") is not None:
            record.output("update_entropys", list(found["entropys"]))

    def loss(self, args: Args, kwargs: Kwargs) -> None:
        """``loss.backward()``: what is added to the gradient."""
        if self._workers.record is not None and args[0].numel() == 1:
            self._workers.record.loss(float(args[0].detach()), {"eps": self._eps})

    def stepped(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """``_optimizer_step()``."""
        if self._workers.record is not None:
            self._workers.record.stepped()


def _splits(actor: Any) -> int:
    return int(getattr(actor, "ulysses_sequence_parallel_size", 1) or 1)
