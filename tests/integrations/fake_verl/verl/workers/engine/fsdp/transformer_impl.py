"""The engine's calls over a tiny model, in the order of verl's FSDP engine."""

import torch

from verl.workers.tiny import Toy, cut, picked


def prepare_micro_batches(data, dp_group=None, same_micro_num_in_dp=True):
    """Micro-batches and their row numbers."""
    limit = data["max_token_len_per_gpu"] if data["use_dynamic_bsz"] else None
    parts = cut(data, rows=data["micro_batch_size_per_gpu"], tokens=limit)
    return [data.rows(part) for part in parts], parts


class FSDPEngine:
    """One rank."""

    use_ulysses_sp = False
    ulysses_sequence_parallel_size = 1

    def __init__(self) -> None:
        self.module = Toy()

    def get_data_parallel_rank(self):
        """Of one."""
        return 0

    def get_data_parallel_size(self):
        """One."""
        return 1

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        """Micro-batches one after the other."""
        data["batch_num_tokens"], data["dp_size"] = self.counted(data)
        micros, _ = prepare_micro_batches(data=data)
        for micro in self.run_of(micros):
            loss, _ = self.forward_step(micro, loss_function=loss_function,
                                        forward_only=forward_only)  # fmt: skip
            if not forward_only:
                loss.backward()

    def counted(self, data):
        """Trained tokens of all ranks, and the number of ranks."""
        return int(data["response_mask"].sum()), 1

    def run_of(self, micros):
        """A seam for faults."""
        return micros

    def optimizer_step(self):
        """A step."""
        return 1.0


class FSDPEngineWithLMHead(FSDPEngine):
    """With log-probs."""

    gives = "log_probs"

    def of_tokens(self, logits, ids):
        """A value f32[T] for each token: the log-prob of the next one."""
        return torch.nn.functional.pad(picked(logits, ids), (0, 1))

    def prepare_model_inputs(self, micro_batch):
        """Packed rows."""
        ids = micro_batch["input_ids"].values()[None]
        positions = micro_batch["position_ids"].values()[None]
        return {"input_ids": ids, "attention_mask": None, "position_ids": positions}, {}

    def forward_step(self, micro_batch, loss_function, forward_only):
        """Loss and outputs of a micro-batch."""
        inputs, _ = self.prepare_model_inputs(micro_batch=micro_batch)
        logits = self.module(**inputs)[0]
        offsets = micro_batch["input_ids"].offsets()
        pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ids = inputs["input_ids"][0]
        rows = [self.of_tokens(logits[a:b], ids[a:b]) for a, b in pairs]
        out = {self.gives: torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
        if loss_function is None:
            return torch.tensor(1.0), {"model_output": out, "loss": 1.0, "metrics": {}}
        loss = loss_function(out, micro_batch)
        return loss, {"model_output": out, "loss": float(loss.detach()), "metrics": {}}


class FSDPEngineWithValueHead(FSDPEngineWithLMHead):
    """With values."""

    gives = "values"

    def of_tokens(self, logits, ids):
        """The value of the state behind each token."""
        return logits[:, 0]
