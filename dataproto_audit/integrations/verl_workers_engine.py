"""Hooks in verl's engine workers over FSDP (0.7.1 with the legacy ones disabled, and 0.9.1).

Read from the wheels: ``TrainingWorker.train_mini_batch`` cuts the rank's rows by a loader and
``FSDPEngine.forward_backward_batch`` each mini-batch by ``prepare_micro_batches``; ``forward_step``
is called once a micro-batch and returns its loss and outputs, ``optimizer_step`` once a mini-batch
(``workers/engine_workers.py``, ``workers/engine/fsdp/transformer_impl.py``). Losses are divided by
counts of the whole mini-batch and multiplied by the number of ranks, over which gradients are
averaged. Log-probs are jagged: the value at position t is that of token t+1. V1's critic is handed
the names of rows only, which verl fetches behind the hook and then cuts by ``make_iterator``.
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
from dataproto_audit.integrations.worker_record import Place, here, row_keys
from dataproto_audit.progress import UNKNOWN


def hook_workers(workers: Workers, module: Any) -> None:
    """Hook into the calls that are a stage each."""
    worker = getattr(module, "TrainingWorker", None)
    seen = EngineCalls(workers)
    for name, begin in (("infer_batch", seen.log_prob), ("train_mini_batch", seen.update)):
        workers.wrap(worker, name, Hook(workers, name, before=begin, begins=True, ends=True))
    name = "make_iterator"
    workers.wrap(getattr(module, "tu", None), name,
                 Hook(workers, name, before=seen.fetched, begins=True))  # fmt: skip


def hook_fsdp(workers: Workers, module: Any) -> None:
    """Hook into the engine of ``module``."""
    base, engine = (getattr(module, f"FSDPEngine{n}", None) for n in ("", "WithLMHead"))
    seen = EngineCalls(workers)
    for owner, name, before, after in (
        (base, "forward_backward_batch", seen.mini_batch, None),
        (base, "optimizer_step", None, seen.stepped),
        (module, "prepare_micro_batches", None, seen.split),
        (engine, "prepare_model_inputs", None, seen.packed),
        (engine, "forward_step", seen.micro_batch, seen.output),
    ):
        workers.wrap(owner, name, Hook(workers, name, before=before, after=after))


HOOKS = {
    "verl.workers.engine_workers": hook_workers,
    "verl.workers.engine.fsdp.transformer_impl": hook_fsdp,
}


OUTPUTS = {
    "update_actor": {"log_probs": "update_log_probs", "entropy": "update_entropys"},
    "update_critic": {"values": "update_values"},
}
"""What a forward pass of an update gives, and our names for it."""


class EngineCalls:
    """What the hooks do; ``self`` of verl's methods is their first argument."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._of = UNKNOWN
        self._fetches: Any = None
        """The critic whose rows are still being fetched."""

    def log_prob(self, args: Args, kwargs: Kwargs) -> None:
        """``infer_batch(data)`` of a worker: the reference cannot train, or leaves LoRA out."""
        worker, data = args[0], argument(args, kwargs, "data", 1)
        if _is_critic(worker):
            return
        ref = getattr(worker.engine_config, "forward_only", False)
        ref = ref or bool(plain(data, "no_lora_adapter", False))
        self._begin("ref_log_prob" if ref else "old_log_prob", worker, data)

    def update(self, args: Args, kwargs: Kwargs) -> None:
        """``train_mini_batch(data)``, of the actor or of a critic."""
        worker, data = args[0], argument(args, kwargs, "data", 1)
        self._fetches = None if hasattr(data, "items") else worker
        if self._fetches is None:
            self._update(worker, data)

    def fetched(self, args: Args, kwargs: Kwargs) -> None:
        """``make_iterator(tensordict, ...)``: the rows of an update have been fetched."""
        worker, self._fetches = self._fetches, None
        if worker is not None:
            self._update(worker, argument(args, kwargs, "tensordict", 0))

    def _update(self, worker: Any, data: Any) -> None:
        self._begin("update_critic" if _is_critic(worker) else "update_actor", worker, data)
        if self._workers.record is not None:
            self._workers.record.about = {"path": "engine"}

    def _begin(self, stage: str, worker: Any, data: Any) -> None:
        self._workers.begin(stage, _place(worker.engine), row_keys(data["input_ids"]))

    def mini_batch(self, args: Args, kwargs: Kwargs) -> None:
        """``forward_backward_batch(data, ...)``: what its micro-batches are cut by."""
        engine, data = args[0], argument(args, kwargs, "data", 1)
        record = self._workers.record
        if record is not None and plain(data, "use_dynamic_bsz", True):
            splits = int(getattr(engine, "ulysses_sequence_parallel_size", 1) or 1)
            record.token_limit = int(plain(data, "max_token_len_per_gpu", 0)) * splits or None

    def split(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """``prepare_micro_batches(data, ...)``."""
        self._of = len(result[0])

    def micro_batch(self, args: Args, kwargs: Kwargs) -> None:
        """``forward_step(micro_batch, ...)`` begins."""
        micro = argument(args, kwargs, "micro_batch", 1)
        if self._workers.record is not None:
            self._workers.record.micro_batch(*row_keys(micro["input_ids"]), of=self._of)

    def packed(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """``prepare_model_inputs(micro_batch)``: what goes into the model."""
        engine, micro = args[0], argument(args, kwargs, "micro_batch", 1)
        record = self._workers.record
        if record is None:
            return
        inputs = result[0]
        lengths = micro["input_ids"].offsets().diff().tolist()
        if not plain(micro, "use_remove_padding", True):
            mask = inputs.get("attention_mask")
            if mask is not None and mask.ndim == 2:
                record.attended(lengths, (mask != 0).sum(1).tolist())
        elif getattr(engine, "use_ulysses_sp", False):
            if stays_alone(engine.module):
                splits = int(engine.ulysses_sequence_parallel_size)
                record.attended(lengths, seen_alone(lengths, splits))
        elif inputs.get("position_ids") is not None:
            record.packed(
                restarts_of(inputs["position_ids"], lengths), mask_of(inputs.get("attention_mask"))
            )

    def output(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """``forward_step`` returned ``loss, {model_output, loss, metrics}``."""
        record = self._workers.record
        if record is None or record.asked.stage not in OUTPUTS:
            return
        micro = argument(args, kwargs, "micro_batch", 1)
        loss, told = result
        held = told["model_output"]
        widths = response_lengths(micro)
        names = OUTPUTS[record.asked.stage]
        first = held[next(iter(names))]
        if first.ndim != 2:  # padded critics of 0.7.1 give a column for each token
            return
        for name, ours in names.items():
            if held.get(name) is not None:
                record.output(ours, responses_of(held[name], widths))
        eps = float(torch.finfo(first.dtype).eps)
        tokens = plain(micro, "batch_num_tokens", None)
        counted = {} if tokens is None else {"tokens": float(tokens)}
        record.loss(float(loss.detach()), {"eps": eps, **counted})

    def stepped(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """``optimizer_step()``."""
        if self._workers.record is not None:
            self._workers.record.stepped()


def plain(data: Any, name: str, default: Any) -> Any:
    """An entry of a TensorDict that is no tensor."""
    value = data.get(name, None)
    if value is None:
        return default
    return getattr(value, "data", value) if "NonTensor" in type(value).__name__ else value


def response_lengths(micro: Any) -> list[int]:
    """Tokens of each response, of jagged or padded rows."""
    responses = micro["responses"]
    if responses.is_nested:
        return [int(n) for n in responses.offsets().diff()]
    width = responses.shape[1]
    return [int(n) for n in (micro["attention_mask"][:, -width:] != 0).sum(1)]


def responses_of(values: Any, widths: list[int]) -> list[Any]:
    """The values of the response's tokens, of jagged values of whole rows shifted by one."""
    return [row[len(row) - width - 1 : len(row) - 1]
            for row, width in zip(values.detach().unbind(), widths, strict=True)]  # fmt: skip


def _is_critic(worker: Any) -> bool:
    return bool(getattr(worker.config, "model_type", "language_model") == "value_model")


def _place(engine: Any) -> Place:
    own = here()
    size = int(engine.get_data_parallel_size())
    return Place(own.rank, own.ranks, int(engine.get_data_parallel_rank()), size)
