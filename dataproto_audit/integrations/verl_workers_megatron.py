"""Hooks in verl's Megatron actor (legacy) and its engine twin. **Not run on a CPU**: Megatron needs
an accelerator, so these hooks have only seen stand-ins of the same signatures.

Read from the wheels, ``workers/actor/megatron_actor.py`` and
``workers/engine/megatron/transformer_impl.py``. Seen are the partition, the limit and the counts
over ranks, in the update and in log-probs; micro-batches count when they are cut, because a
pipeline runs them out of order. Log-probs and losses stay on the last pipeline stage and are not
looked at.
"""

from __future__ import annotations

from typing import Any

from dataproto_audit.integrations.patches import Args, Kwargs
from dataproto_audit.integrations.verl_workers import Hook, Workers, argument
from dataproto_audit.integrations.verl_workers_engine import plain
from dataproto_audit.integrations.worker_record import Place, here, row_keys


def hook_legacy(workers: Workers, module: Any) -> None:
    """Hook into ``MegatronPPOActor``, and into the split that its module imports."""
    actor = getattr(module, "MegatronPPOActor", None)
    seen = MegatronCalls(workers, getattr(module, "mpu", None))
    workers.wrap(actor, "compute_log_prob",
                 Hook(workers, "compute_log_prob", before=seen.log_prob,
                      begins=True, ends=True))  # fmt: skip
    name = "make_minibatch_iterator"
    workers.wrap(actor, name, Hook(workers, name, before=seen.update, begins=True))
    workers.wrap(actor, "update_policy", Hook(workers, "update_policy", ends=True))
    name = "forward_backward_batch"
    workers.wrap(actor, name, Hook(workers, name, before=seen.mini_batch, after=seen.over))
    name = "rearrange_micro_batches"
    workers.wrap(module, name, Hook(workers, name, after=seen.split))


def hook_engine(workers: Workers, module: Any) -> None:
    """Hook into ``MegatronEngine``; its stages are calls of the same worker as FSDP's."""
    engine = getattr(module, "MegatronEngine", None)
    seen = MegatronCalls(workers, getattr(module, "mpu", None))
    name = "forward_backward_batch"
    workers.wrap(engine, name, Hook(workers, name, before=seen.engine_mini_batch, after=seen.over))
    name = "prepare_micro_batches"
    workers.wrap(module, name, Hook(workers, name, after=seen.split))


HOOKS = {
    "verl.workers.actor.megatron_actor": hook_legacy,
    "verl.workers.engine.megatron.transformer_impl": hook_engine,
}


class MegatronCalls:
    """What the hooks do; ``self`` of verl's methods is their first argument."""

    def __init__(self, workers: Workers, mpu: Any) -> None:
        self._workers, self._mpu = workers, mpu

    def log_prob(self, args: Args, kwargs: Kwargs) -> None:
        """``compute_log_prob(data)``: of the actor, or of a reference, which has no optimizer."""
        actor, data = args[0], argument(args, kwargs, "data", 1)
        ref = getattr(actor, "actor_optimizer", None) is None
        self._begin("ref_log_prob" if ref else "old_log_prob", data)

    def update(self, args: Args, kwargs: Kwargs) -> None:
        """``make_minibatch_iterator(data)`` precedes ``update_policy(dataloader)``."""
        self._begin("update_actor", argument(args, kwargs, "data", 1))

    def _begin(self, stage: str, data: Any) -> None:
        rows = row_keys(data.batch["input_ids"], data.batch["attention_mask"])
        self._workers.begin(stage, self._place(), rows)
        if self._workers.record is not None:
            self._workers.record.about = {"path": "megatron"}

    def _place(self) -> Place:
        own, mpu = here(), self._mpu
        if mpu is None:
            return own
        size = int(mpu.get_data_parallel_world_size())
        return Place(own.rank, own.ranks, int(mpu.get_data_parallel_rank()), size)

    def mini_batch(self, args: Args, kwargs: Kwargs) -> None:
        """``forward_backward_batch(data, ...)``: by tokens it calls the split, by rows not."""
        record = self._workers.record
        if record is None:
            return
        if argument(args, kwargs, "use_dynamic_bsz", 5, False):
            record.token_limit = int(argument(args, kwargs, "max_token_len", 7))
            return
        data = argument(args, kwargs, "data", 1)
        keys, lengths = row_keys(data.batch["input_ids"], data.batch["attention_mask"])
        size = int(argument(args, kwargs, "micro_batch_size", 6))
        starts = range(0, len(keys), size)
        for start in starts:
            part = slice(start, start + size)
            record.micro_batch(keys[part], lengths[part], of=len(starts))

    def engine_mini_batch(self, args: Args, kwargs: Kwargs) -> None:
        """``forward_backward_batch(data, ...)`` of the engine, which always calls the split."""
        record, data = self._workers.record, argument(args, kwargs, "data", 1)
        if record is not None and plain(data, "use_dynamic_bsz", True):
            splits = int(getattr(args[0].engine_config, "context_parallel_size", 1) or 1)
            record.token_limit = int(plain(data, "max_token_len_per_gpu", 0)) * splits or None

    def split(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Micro-batches and their row numbers; the numbers are not looked at."""
        record, micros = self._workers.record, result[0]
        for micro in micros if record is not None else ():
            ids = micro["input_ids"]
            mask = None if ids.is_nested else micro["attention_mask"]
            record.micro_batch(*row_keys(ids, mask), of=len(micros))  # type: ignore[union-attr]

    def over(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """The mini-batch is over; in a log-prob pass there is one."""
        record = self._workers.record
        if record is not None and record.asked.stage == "update_actor":
            record.stepped()
