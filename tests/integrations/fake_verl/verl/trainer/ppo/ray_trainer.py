"""A trainer of one process whose numbers come from the simulated step of this package."""

import uuid

import numpy as np

from dataproto_audit.testing.options import Options
from dataproto_audit.testing.simulated import SimulatedStep
from verl.protocol import DataProto


def extract_reward(batch):
    """Scores that came with the rollout, and the reward function's other numbers."""
    keys = batch.meta_info.get("reward_extra_keys", [])
    return batch.batch["rm_scores"], {key: batch.non_tensor_batch[key] for key in keys}


def apply_kl_penalty(data, kl_ctrl, kl_penalty="kl"):
    """Rewards are scores less a KL penalty."""
    kl_ctrl.kl_reward(data)
    return data, {"actor/reward_kl_penalty": 0.0}


def compute_advantage(data, adv_estimator, config=None, **options):
    """Advantages of the estimator."""
    config.advantage(data)
    return data


def compute_data_metrics(batch, use_critic=False):
    """A metric of the batch."""
    return {"critic/score/mean": float(batch.batch["token_level_scores"].sum(-1).mean())}


class Manager:
    """Rollouts in the order of the prompts, each scored."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def generate_sequences(self, prompts):
        """Responses and scores, one a row."""
        trainer, n = self.trainer, self.trainer.copies
        rows = DataProto(non_tensor_batch={k: v[::n] for k, v in prompts.non_tensor_batch.items()})
        trainer.sim.rollout(rows)
        trainer.sim.reward(rows)
        rows.batch["rm_scores"] = rows.batch.pop("token_level_scores")
        rows.non_tensor_batch["raw_prompt"] = prompts.non_tensor_batch["raw_prompt"]
        rows.meta_info = {"timing": {"generate": 0.1}, "reward_extra_keys": ["score"]}
        return rows


class Engine:
    """Weights arrive."""

    def __init__(self) -> None:
        self.synced: list[int] = []

    def update_weights(self, global_steps):
        """Note the step."""
        self.synced.append(global_steps)

    def sleep_replicas(self):
        """Nothing to free."""


class RayPPOTrainer:
    """The order of ``fit`` is that of verl 0.7.1 and of 0.9.1 with ``use_v1=False``."""

    def __init__(self, config, logger, options=None, steps=1) -> None:
        self.config, self.logger, self.total = config, logger, steps
        self.options = options or Options()
        self.tokenizer = None
        self.copies = self.options.n
        self.trained = []
        self.checkpoint_manager = None

    def init_workers(self):
        """Make the managers."""
        self.async_rollout_manager = Manager(self)
        self.checkpoint_manager = Engine()

    def _get_gen_batch(self, batch):
        kept = {"data_source", "reward_model", "extra_info", "uid"} & set(batch.non_tensor_batch)
        gen = batch.pop(
            batch_keys=[], non_tensor_batch_keys=list(set(batch.non_tensor_batch) - kept)
        )
        gen.non_tensor_batch.update(batch.non_tensor_batch)
        return gen

    def _balance_batch(self, batch, metrics):
        self.sim.balance(batch)
        metrics["global_seqlen/min"] = 1

    def _added(self, work, batch, *names):
        """What a worker adds to the batch, without the batch."""
        made = DataProto(batch.batch.clone(recurse=False), dict(batch.non_tensor_batch))
        work(made)
        return made.select(batch_keys=list(names), non_tensor_batch_keys=[])

    def _compute_old_log_prob(self, batch):
        return self._added(self.sim.old_log_prob, batch, "old_log_probs", "entropys"), 0

    def _compute_ref_log_prob(self, batch):
        return self._added(self.sim.ref_log_prob, batch, "ref_log_prob")

    def _compute_reward_colocate(self, batch):
        raise NotImplementedError

    def _compute_values(self, batch):
        return self._added(self.sim.values, batch, "values")

    def _update_critic(self, batch):
        return DataProto(meta_info={"metrics": {"critic/vf_loss": 0.1}})

    def _update_actor(self, batch):
        batch.meta_info["multi_turn"] = False
        self.trained.append(batch)
        return DataProto(meta_info={"metrics": {"actor/grad_norm": 0.5}})

    def _validate(self):
        batch = self.sim.validation()
        batch.batch["rm_scores"] = batch.batch.pop("token_level_scores")
        rows = [[{"role": "user", "content": "?"}] for _ in range(len(batch))]
        batch.non_tensor_batch["raw_prompt"] = np.fromiter(rows, dtype=object)
        scores, _ = extract_reward(batch)
        return {"val-core/reward": float(scores.sum(-1).mean())}

    def _save_checkpoint(self):
        pass

    def _prompts(self):
        """A batch of the data loader with uids of its own."""
        loaded = self.sim.prompts()
        batch = DataProto.from_dict(
            {"dummy_tensor": np_ones(len(loaded))},
            {name: array for name, array in loaded.non_tensor_batch.items() if name != "uid"},
        )
        batch.meta_info["temperature"] = self.options.temperature
        uids = [str(uuid.uuid4()) for _ in range(len(batch))]
        batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
        return batch

    def fit(self):
        """All stages of every step."""
        algorithm = self.config.algorithm
        self.global_steps = 0
        self.sim = SimulatedStep(self.options, lambda used: used)
        self.checkpoint_manager.update_weights(self.global_steps)
        if self.config.trainer.val_before_train:
            self.logger.log(data=self._validate(), step=0)
        for step in range(1, self.total + 1):
            self.global_steps, metrics = step, {}
            self.sim = SimulatedStep(
                Options(**{**self.options.__dict__, "step": step}), lambda used: used
            )
            batch = self._prompts()
            gen = self._get_gen_batch(batch)
            gen.meta_info["global_steps"] = step
            gen = self.repeated(gen)
            gen = self.async_rollout_manager.generate_sequences(gen)
            self.checkpoint_manager.sleep_replicas()
            gen.meta_info.pop("timing", None)
            batch = self.repeated(batch)
            batch = batch.union(gen)
            if self.config.trainer.balance_batch:
                self._balance_batch(batch, metrics=metrics)
            scores, extra = extract_reward(batch)
            correction = algorithm.get("rollout_correction")
            bypass = correction and correction.get("bypass_mode")
            if bypass:
                from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode

                apply_bypass_mode(batch=batch, rollout_corr_config=correction)
            else:
                old, _ = self._compute_old_log_prob(batch)
                old.batch.pop("entropys")
                batch = batch.union(old)
            if self.config.actor_rollout_ref.actor.use_kl_loss or algorithm.use_kl_in_reward:
                batch = batch.union(self._compute_ref_log_prob(batch))
            critic = algorithm.adv_estimator == "gae"
            if critic:
                batch = batch.union(self._compute_values(batch))
            batch.batch["token_level_scores"] = scores
            batch.non_tensor_batch.update({k: np.array(v) for k, v in extra.items()})
            if algorithm.use_kl_in_reward:
                batch, more = apply_kl_penalty(batch, kl_ctrl=self.sim)
                metrics.update(more)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if correction is not None and not bypass:
                from verl.trainer.ppo.rollout_corr_helper import (
                    compute_rollout_correction_and_add_to_batch,
                )

                batch, more = compute_rollout_correction_and_add_to_batch(batch, correction)
                metrics.update(more)
            batch = compute_advantage(batch, adv_estimator=algorithm.adv_estimator, config=self.sim)
            if critic:
                metrics.update(self._update_critic(batch).meta_info["metrics"])
            output = self._update_actor(batch)
            self._save_checkpoint()
            self.checkpoint_manager.update_weights(step)
            metrics.update(output.meta_info["metrics"])
            if self.config.trainer.test_freq > 0 and step % self.config.trainer.test_freq == 0:
                metrics.update(self._validate())
            metrics.update({"training/global_step": step})
            metrics.update(compute_data_metrics(batch=batch, use_critic=critic))
            self.logger.log(data=metrics, step=step)

    def repeated(self, batch):
        """n rows of each prompt, side by side."""
        return batch.repeat(repeat_times=self.copies, interleave=True)


def np_ones(rows):
    """The dummy tensor that verl's data loader makes."""
    import torch

    return torch.ones(rows, 1, dtype=torch.uint8)
