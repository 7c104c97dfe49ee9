"""A V1 trainer of one process whose numbers come from the simulated step of this package."""

import numpy as np
import transfer_queue as tq

from dataproto_audit.testing.options import Options
from dataproto_audit.testing.simulated import SimulatedStep

PADS = ("pad0_0_0", "pad0_1_0", "pad0_2_0", "pad0_3_0")


def apply_kl_penalty(data, kl_ctrl, kl_penalty="kl"):
    """Rewards are scores less a KL penalty."""
    kl_ctrl.kl_reward(data)
    return data, {"actor/reward_kl_penalty": 0.0}


def compute_data_metrics(batch, use_critic=False):
    """A metric of the batch."""
    return {"critic/score/mean": 0.5}


class Handles:
    """Reward workers that score rows as they finish."""

    reward_loop_worker_handles = ("worker",)


class Engine:
    """Weights arrive."""

    def update_weights(self, global_steps):
        """Nothing to do."""


class ReplayBuffer:
    """Finished rows, in the order of ``trainer.arrival``."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def sample(self, global_steps, partition_id, batch_size):
        """All rows of the partition."""
        rows = self.trainer.arrival(len(self.trainer.keys))
        keys = [self.trainer.keys[row] for row in rows]
        tag = {"min_global_steps": global_steps - 1 - self.trainer.stale,
               "max_global_steps": global_steps - 1, "is_padding": False}  # fmt: skip
        tags = [dict(tag) for _ in keys]
        if self.trainer.stale:
            for row in tags[::2]:
                row["min_global_steps"] = row["max_global_steps"]
        return tq.KVBatchMeta(keys, tags, partition_id), {}


class PPOTrainer:
    """The order of ``_step_once`` and ``fit`` is that of verl 0.9.1."""

    def __init__(self, config, logger, options=None, steps=1) -> None:
        self.config, self.logger, self.total = config, logger, steps
        self.options = options or Options()
        self.tokenizer, self.stale, self.pads = None, 0, 0
        self.local_trigger_step = 0
        self.arrival = range
        self.trained = []
        self.replay_buffer, self.checkpoint_manager = ReplayBuffer(self), Engine()
        self.reward_loop_manager = Handles()

    def _step_sim(self, step):
        self.sim = SimulatedStep(
            Options(**{**self.options.__dict__, "step": step}), lambda used: used
        )

    def _submit_batch_to_rollout(self, batch):
        """Sample and score every row, and store it under its key."""
        uids = np.repeat(batch.non_tensor_batch["uid"], self.options.n)
        self.rows = type(batch)(batch.batch, dict(batch.non_tensor_batch), dict(batch.meta_info))
        batch = self.rows
        self.sim.rollout(batch)
        self.sim.reward(batch)
        batch.non_tensor_batch["uid"] = uids
        self.keys = [f"{uid}_{row % self.options.n}_0" for row, uid in enumerate(uids)]
        fields = {k: self._jagged(k) for k, _ in batch.batch.items() if k != "attention_mask"}
        fields["rm_scores"] = fields.pop("token_level_scores")
        fields["uid"] = list(uids)
        tq.kv_batch_put(self.keys, self.partition, fields)

    def _jagged(self, name):
        data = self.rows.batch
        attended, width = data["attention_mask"].bool(), data["responses"].shape[1]
        prompt, response = attended[:, :-width], attended[:, -width:]
        own = attended if data[name].shape[1] > width else response
        own = prompt if name == "prompts" else own
        return [row[mask] for row, mask in zip(data[name], own, strict=True)]

    def _stored(self, batch, *names):
        where = {key: row for row, key in enumerate(self.keys)}
        real = [key for key in batch.keys if key in where]
        for name in names:
            rows = self._jagged(name)
            known = {"entropys": "entropy"}.get(name, name)
            tq.kv_batch_put(real, batch.partition_id, {known: [rows[where[k]] for k in real]})
        for key in batch.keys:
            if key not in where:
                zero = tq.STORE[batch.partition_id][key]["rollout_log_probs"] * 0
                fields = {{"entropys": "entropy"}.get(name, name): [zero] for name in names}
                tq.kv_batch_put([key], batch.partition_id, fields)
        return batch

    def _compute_reward_colocate(self, batch, metrics=None):
        raise NotImplementedError

    def _balance_batch(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
        if self.pads:
            source = tq.STORE[batch.partition_id][batch.keys[0]]
            for key in PADS[: self.pads]:
                row = {}
                for name, value in source.items():
                    long = 2 if name in ("input_ids", "position_ids") else 1
                    row[name] = [value[:long] * 0 if hasattr(value, "dim") else value]
                row["input_ids"] = [source["input_ids"][:2] * 0 + 2]
                row["position_ids"] = [source["position_ids"][:1].new_tensor([0, 1])]
                row["prompts"] = [row["input_ids"][0][:1]]
                row["responses"] = [row["input_ids"][0][1:]]
                row["uid"] = ["pad0"]
                tq.kv_batch_put([key], batch.partition_id, row)
                batch.keys.append(key)
                batch.tags.append({**batch.tags[0], "is_padding": True})
        batch.reorder(np.random.default_rng(3).permutation(len(batch)).tolist())
        return batch

    def _compute_old_log_prob(self, batch, metrics):
        self.sim.old_log_prob(self.rows)
        return self._stored(batch, "old_log_probs", "entropys")

    def _compute_ref_log_prob(self, batch, metrics):
        self.sim.ref_log_prob(self.rows)
        return self._stored(batch, "ref_log_prob")

    def _compute_values(self, batch, metrics):
        self.sim.values(self.rows)
        return self._stored(batch, "values")

    def _compute_advantage(self, batch, metrics):
        names = ["advantages", "returns"]
        if self.config.algorithm.use_kl_in_reward:
            where = {key: row for row, key in enumerate(self.keys)}
            order = [where[key] for key in batch.keys]
            self.sim.kl_reward(self.rows)
            copy = type(self.rows)(self.rows.batch[np.array(order)])
            apply_kl_penalty(copy, kl_ctrl=Kept())
            names.append("token_level_rewards")
        self.sim.advantage(self.rows)
        return self._stored(batch, *names)

    def _update_critic(self, batch, metrics):
        metrics["critic/vf_loss"] = 0.1
        return batch

    def _update_actor(self, batch, metrics):
        metrics["actor/grad_norm"] = 0.5
        self.trained.append(batch)
        return batch

    def _validate(self):
        self.partition = "val"
        self._step_sim(1)
        self._submit_batch_to_rollout(self.sim.prompts())
        batch, _ = self.replay_buffer.sample(1, "val", 1)
        tq.kv_clear(batch.keys, "val")
        return {"val-core/reward": 0.5}

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        batch, _ = self.replay_buffer.sample(
            global_steps=self.global_steps, partition_id="train", batch_size=sample_batch_size
        )
        batch = self._balance_batch(batch, metrics=metrics)
        batch = self._compute_old_log_prob(batch, metrics=metrics)
        if self.options.reference or self.options.kl_in_reward:
            batch = self._compute_ref_log_prob(batch, metrics=metrics)
        if self.options.critic:
            batch = self._compute_values(batch, metrics=metrics)
        batch = self._compute_advantage(batch, metrics=metrics)
        if self.options.critic:
            batch = self._update_critic(batch, metrics=metrics)
        return self._update_actor(batch, metrics=metrics)

    def fit(self, agent_loop_manager=None):
        """All stages of every step."""
        self.global_steps = 0
        if self.config.trainer.val_before_train:
            self.logger.log(data=self._validate(), step=0)
        for step in range(1, self.total + 1):
            self.global_steps, metrics = step, {}
            self._step_sim(step)
            self.partition = "train"
            self._submit_batch_to_rollout(self.sim.prompts())
            batch = self._step_once(metrics, {}, 1)
            self.checkpoint_manager.update_weights(step)
            metrics.update(compute_data_metrics(batch=batch))
            tq.kv_clear(batch.keys, "train")
            self.logger.log(data=metrics, step=step)


class Kept:
    """The penalty is in the batch already."""

    def kl_reward(self, data):
        """Nothing left to do."""
