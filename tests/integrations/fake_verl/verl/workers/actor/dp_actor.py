"""The legacy actor's calls over a tiny model, in the order of verl 0.7.1's ``dp_actor.py``."""

import torch

from dataproto_audit.reference.losses import policy_loss
from verl.workers.tiny import Toy, cut, packed_log_probs, padded_log_probs

NAMES = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids",
         "old_log_probs", "advantages")  # fmt: skip


class DataParallelPPOActor:
    """One rank. ``optimizer`` None makes it a reference."""

    def __init__(self, config, optimizer="sgd") -> None:
        self.config, self.scaler = config, None
        self.actor_module = Toy()
        self.actor_optimizer = optimizer
        self.use_remove_padding = config.use_remove_padding
        self.ulysses_sequence_parallel_size = 1

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        run = packed_log_probs if self.use_remove_padding else padded_log_probs
        return {"log_probs": run(self.actor_module, micro_batch)}

    def _optimizer_step(self):
        return torch.tensor(1.0)

    def compute_log_prob(self, data, calculate_entropy=False):
        """Log-probs of all rows."""
        limit = data.meta_info["max_token_len"] if data.meta_info["use_dynamic_bsz"] else None
        size = data.meta_info["micro_batch_size"]
        parts = cut(data.batch, rows=size, tokens=limit)
        out = torch.zeros(data.batch["responses"].shape)
        for rows in parts:
            micro = {name: data.batch[name][rows] for name in NAMES[2:5]}
            micro["responses"] = data.batch["responses"][rows]
            with torch.no_grad():
                out[rows] = self._forward_micro_batch(micro, 1.0)["log_probs"]
        return {"log_probs": out}

    def update_policy(self, data):
        """One optimizer step a mini-batch."""
        config, size = self.config, self.config.ppo_mini_batch_size
        for start in range(0, len(data), size):
            mini = {name: data.batch[name][start : start + size] for name in NAMES}
            limit = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
            parts = cut(mini, rows=config.ppo_micro_batch_size_per_gpu, tokens=limit)
            for rows in self.run_of(parts):
                micro = {name: tensor[rows] for name, tensor in mini.items()}
                self.train(micro, len(rows) / size, len(data) <= size)
            self._optimizer_step()
        return {"actor/pg_loss": 0.0}

    def train(self, micro, share, on_policy):
        """Forward and backward of a micro-batch."""
        log_prob = self._forward_micro_batch(micro, 1.0)["log_probs"]
        old = log_prob.detach() if on_policy else micro["old_log_probs"]
        loss = policy_loss(
            log_probs=log_prob, old_log_probs=old, advantages=micro["advantages"],
            response_mask=micro["response_mask"], clip_ratio_low=0.2, clip_ratio_high=0.2,
            clip_ratio_c=3.0, loss_agg_mode="token-mean",
        )["total"]  # fmt: skip
        self.scaled(loss * share).backward()

    def scaled(self, loss):
        """A seam for faults."""
        return loss

    def run_of(self, parts):
        """A seam for faults."""
        return parts
