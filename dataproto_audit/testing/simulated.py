"""The stages of one simulated step, each from the batch that the one before handed on.

Every number is consistent: tokens are sampled from :class:`~.toy_policy.ToyPolicy`, log-probs are
that policy's plus rounding noise, advantages and losses come from ``reference/``, losses are summed
over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.protocol import DataProto
from dataproto_audit.reference.kl import rewards_with_kl
from dataproto_audit.testing import toy_update
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.simulated_fields import (
    batch_metrics,
    corrected,
    estimated,
    image_positions,
    last_ids,
    left_padded,
    objects,
    padding_rows,
    response_attention,
)
from dataproto_audit.testing.toy_policy import START, STOP, ToyPolicy, prompt_hash, sample

HALF_NOISE, FULL_NOISE = 0.01, 3e-7
"""Standard deviation of what two passes over the same tokens differ by, in nats."""
TAIL, FARTHEST = 0.75, 1.5
"""Mean and largest |old - rollout| of the few tokens that are far apart in large models."""


class SimulatedStep:
    """Stages take a batch, change it, and return the evidence.

    ``reference``, ``policy`` and ``engine`` are the policies of the three roles, ``noise_scale``
    multiplies the rounding noise, and ``adjust`` holds, by field, what is done to log-probs of
    the update before anything is computed from them: what a seeded fault may change beforehand.
    """

    def __init__(
        self, options: Options, sampling: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self.options = o = options
        self.sampling = sampling
        self.random = np.random.default_rng([o.seed, o.step])
        base = ToyPolicy(o.vocab, temperature=o.temperature, reserved=o.reserved)
        self.reference, self.policy = base, base.at(o.step_drift * (o.step - 1))
        self.engine = base.at(o.step_drift * (o.step - 1 - o.stale_steps))
        self.noise_scale = 0.0 if o.exact else 1.0
        self.adjust: dict[str, Callable[[Tensor], Tensor]] = {}
        self.order: NDArray[np.int64] | None = None
        """Rows before balancing, in the order after it."""

    def noise(self, shape: tuple[int, ...], *, half: bool) -> NDArray[np.float64]:
        """What a second pass over the same tokens differs by."""
        scale = HALF_NOISE if half else FULL_NOISE
        return self.random.normal(0.0, scale * self.noise_scale, shape)

    def engine_scored(self, exact: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-probs as the engine has them: off by rounding, or as far as published runs report.

        Published are means of |old - rollout| of 0.010 to 0.018 nats, and means of
        exp(|old - rollout|) (``token_mult_prob_error``) of up to 1.05, which single tokens make.
        """
        o = self.options
        if not o.engine_gap:
            return np.minimum(exact + self.noise(exact.shape, half=o.engine_half), 0.0)
        far = self.random.random(exact.shape) < o.engine_tail
        noise = self.random.laplace(0.0, np.where(far, TAIL, o.engine_gap))
        # Added to logits: what is likely moves less, and no log-prob becomes 0.
        odds = exact - np.log(-np.expm1(np.minimum(exact, -1e-9)))
        odds += noise.clip(-FARTHEST, FARTHEST)
        moved: NDArray[np.float64] = -np.logaddexp(0.0, -odds)
        return moved

    def stages(self, prompts: DataProto) -> Iterator[tuple[str, Callable[[DataProto], Any]]]:
        """Name and work of each stage between the prompts and the weight sync."""
        o = self.options
        yield "rollout", self.rollout
        yield "union", lambda batch: self.union(batch, prompts)
        if o.balanced:
            yield "balance", self.balance
        if o.recorded:
            yield "dispatch", lambda batch: {}
        yield "reward", self.reward
        yield "old_log_prob", self.old_log_prob
        if o.reference or o.kl_in_reward:
            yield "ref_log_prob", self.ref_log_prob
        if o.critic:
            yield "values", self.values
        if o.kl_in_reward:
            yield "kl_reward", self.kl_reward
        yield "advantage", self.advantage
        if o.critic:
            yield "update_critic", self.update_critic
        yield "update_actor", self.update_actor

    def prompts(self) -> DataProto:
        """Prompts of 1 id up to the width, one uid each."""
        o, random = self.options, self.random
        lists = []
        for _ in range(o.prompts):
            size = int(random.integers(o.prompt_width - 2 * o.images))
            lists.append([START, *random.integers(3, o.vocab - o.reserved, size).tolist()])
        if o.images:
            lists = [[START, o.image_id, o.image_id, *ids[1:]] for ids in lists]
        if o.duplicate_prompts and o.prompts > 1:
            lists[1] = list(lists[0])
        texts = [[{"role": "user", "content": str(ids)}] for ids in lists]
        arrays: dict[str, list[Any]] = {
            "uid": [f"{random.integers(1 << 62):015x}-{row}" for row in range(o.prompts)],
            "raw_prompt": texts,
            "prompt_ids": lists,
            "data_source": ["toy"] * o.prompts,
            "reward_model": [{"style": "rule", "ground_truth": row} for row in range(o.prompts)],
            "extra_info": [{"index": row} for row in range(o.prompts)],
            "index": list(range(o.prompts)),
        }
        if o.images:
            arrays["image_grid_thw"] = [np.asarray([[1, 2, 4]])] * o.prompts
        return DataProto(
            non_tensor_batch={name: objects(values) for name, values in arrays.items()},
            meta_info={"temperature": o.temperature, "global_steps": o.step},
        )

    def _copies(self, rows: int) -> NDArray[np.int64]:
        """Prompt of each row."""
        return np.arange(rows).repeat(self.options.counts or self.options.n)

    def rollout(self, batch: DataProto) -> dict[str, Any]:
        """n responses to each prompt."""
        o = self.options
        used = self.sampling({"temperature": o.temperature, "top_p": o.top_p, "top_k": -1})
        self.engine = replace(
            self.engine,
            temperature=used["temperature"],
            top_p=min(self.engine.top_p, used["top_p"]),
        )
        prompts = batch.non_tensor_batch["prompt_ids"].tolist()
        lists = [prompts[row] for row in self._copies(len(prompts))]
        fields, log_probs = self._sampled(lists, aborted=o.aborted)
        fields["rollout_log_probs"] = log_probs.float()
        if o.pad_rows:
            fields = padding_rows(fields, o.pad_rows)
        if o.estimator == "remax":
            fields["reward_baselines"] = torch.from_numpy(
                self.random.integers(0, 2, len(fields["prompts"])).astype(np.float32)
            )
        self._replace(batch, fields)
        if o.pad_rows:
            flags = [row >= len(lists) for row in range(len(lists) + o.pad_rows)]
            batch.non_tensor_batch["is_padding"] = objects(flags)
        if o.recorded:
            batch.non_tensor_batch["weight_version"] = objects([o.step] * len(batch))
        if o.images:
            grid = np.asarray([[1, 2, 4]])
            batch.non_tensor_batch["image_grid_thw"] = objects([grid] * len(batch))
        batch.meta_info["sampling"] = {**used, "max_tokens": o.response_width}
        return {}

    def _replace(self, batch: DataProto, fields: dict[str, Tensor]) -> None:
        """Make ``batch`` one of these tensors, with a finish reason for each row."""
        stopped = last_ids(fields) == STOP
        reasons = ["stop" if stop else "length" for stop in stopped.tolist()]
        empty = ~response_attention(fields).any(1)
        reasons = ["abort" if e else r for e, r in zip(empty.tolist(), reasons, strict=True)]
        fresh = DataProto.from_dict(fields, {"finish_reason": objects(reasons)})
        batch.batch, batch.non_tensor_batch = fresh.batch, fresh.non_tensor_batch

    def _sampled(
        self, lists: list[list[int]], *, aborted: int = 0
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Token fields of one response to each prompt, and the engine's log-probs."""
        o = self.options
        prompts, used = left_padded(lists, o.prompt_width)
        hashes = prompt_hash(prompts, used)
        responses, attended, trained = sample(
            self.engine, hashes, o.response_width, self.random,
            one_token=o.one_token, truncated=o.truncated, tools=o.multi_turn,
        )  # fmt: skip
        if aborted:
            responses[-aborted:], attended[-aborted:], trained[-aborted:] = 0, False, False
        scored, _ = self.engine.score(hashes, responses)
        log_probs = np.where(trained, self.engine_scored(scored), 0.0)
        attention = np.concatenate([used, attended], 1)
        positions = np.maximum(np.cumsum(attention, 1) - 1, 0)
        if o.channels:
            positions = np.repeat(positions[:, None], o.channels, 1)
        whole = np.concatenate([prompts, responses], 1)
        if o.images:
            images = image_positions(whole == o.image_id, attention)
            positions = np.concatenate([positions[:, None], images], 1)
        fields = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": trained.astype(np.int64),
            "input_ids": whole,
            "attention_mask": attention.astype(np.int64),
            "position_ids": positions,
        }
        if o.images:
            fields["mm_token_type_ids"] = (whole == o.image_id).astype(np.int64)
        if o.recorded or o.rejected:
            fields["loss_mask"] = fields["response_mask"].copy()
        if o.recorded:
            fields["tool_mask"] = fields["response_mask"].copy()
        return {name: torch.from_numpy(value) for name, value in fields.items()}, torch.from_numpy(
            log_probs
        )

    def union(self, batch: DataProto, prompts: DataProto) -> dict[str, Any]:
        """The prompt side, each prompt n times, merged with the rollout."""
        filled = {"raw_prompt": [{"role": "user", "content": ""}], "prompt_ids": [START]}
        for name, array in prompts.non_tensor_batch.items():
            rows = array[self._copies(len(array))].tolist()
            for row in range(self.options.pad_rows):
                rows.append(f"pad{row}" if name == "uid" else filled.get(name, array[0]))
            batch.non_tensor_batch[name] = objects(rows)
        return {}

    def balance(self, batch: DataProto) -> dict[str, Any]:
        """Rows from long to short, dealt to the ranks back and forth."""
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        order, ranks = np.argsort(-lengths, kind="stable"), self.options.ranks
        turns = order.reshape(-1, ranks)
        turns[1::2] = turns[1::2, ::-1]
        self.order = np.sort(turns.T, axis=1).reshape(-1).copy()
        batch.reorder(torch.from_numpy(self.order))
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(1).tolist()
        return {}

    def reward(self, batch: DataProto) -> dict[str, Any]:
        """1 for responses whose ids sum to a multiple of 3, on the last attended token."""
        tensors = batch.batch
        attended = response_attention(tensors)
        kept = torch.where(attended, tensors["responses"], 0).sum(1)
        score = (kept % 3 == 0).float() if not self.options.equal_groups else torch.ones(len(kept))
        score[~attended.any(1)] = 0.0
        if "is_padding" in batch.non_tensor_batch:
            score[torch.from_numpy(batch.non_tensor_batch["is_padding"].astype(bool))] = 0.0
        scores = torch.zeros(attended.shape)
        scores[torch.arange(len(score)), attended.sum(1) - 1] = score
        tensors["token_level_scores"] = scores
        batch.non_tensor_batch["score"] = objects(score.tolist())
        if self.options.recorded:
            batch.non_tensor_batch["scorable"] = objects([1] * len(batch))
            tensors["rm_scores"] = scores.clone()
        return {}

    def old_log_prob(self, batch: DataProto) -> dict[str, Any]:
        """The policy's own log-probs and entropies, or the engine's as they are."""
        if self.options.bypass:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            return {}
        log_probs, entropy = self.scored(batch, self.policy)
        batch.batch["old_log_probs"], batch.batch["entropys"] = log_probs, entropy
        if self.options.recorded:
            batch.meta_info["micro_batch_size"] = self.options.micro_rows
        return {"ranks": self.plan(batch).notes()}

    def ref_log_prob(self, batch: DataProto) -> dict[str, Any]:
        """The reference's log-probs."""
        batch.batch["ref_log_prob"] = self.scored(batch, self.reference)[0]
        return {"ranks": self.plan(batch).notes()}

    def scored(self, batch: DataProto, policy: ToyPolicy) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``[rows, response]`` as a pass of the trainer gives them."""
        tensors, width = batch.batch, self.options.prompt_width
        used = tensors["attention_mask"][:, :width].numpy() != 0
        hashes = prompt_hash(tensors["prompts"].numpy(), used)
        log_probs, entropy = policy.score(hashes, tensors["responses"].numpy())
        log_probs = np.minimum(log_probs + self.noise(log_probs.shape, half=self.options.half), 0.0)
        attended = response_attention(tensors).numpy()
        stored = torch.bfloat16 if self.options.half else torch.float32
        made = [torch.from_numpy(x * attended).to(stored) for x in (log_probs, entropy)]
        if self.options.pad_garbage:
            short = torch.from_numpy(np.flatnonzero(~attended.all(1)))
            made[0][short, torch.from_numpy(attended.sum(1))[short]] = -7.25
        return made[0], made[1]

    def values(self, batch: DataProto) -> dict[str, Any]:
        """A critic that knows nothing."""
        shape = batch.batch["responses"].shape
        batch.batch["values"] = torch.from_numpy(self.random.normal(size=shape)).float()
        return {"ranks": self.plan(batch).notes()}

    def kl_reward(self, batch: DataProto) -> dict[str, Any]:
        """Scores less a KL penalty."""
        fields = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
        rewards = rewards_with_kl(*(batch.batch[name] for name in fields), coefficient=0.01)
        batch.batch["token_level_rewards"] = rewards.float()
        return {}

    def advantage(self, batch: DataProto) -> dict[str, Any]:
        """Rollout correction, then the advantages of the configured estimator."""
        tensors = batch.batch
        if "token_level_rewards" not in tensors.keys():  # noqa: SIM118 - a TensorDict iterates rows
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        if self.options.correction:
            corrected(tensors)
        if self.options.rejected:
            tensors["response_mask"] = tensors["response_mask"].clone()
            tensors["response_mask"][::8] = 0
        made = estimated(self.options, tensors, batch.non_tensor_batch["uid"])
        tensors["advantages"], tensors["returns"] = (value.float() for value in made)
        return {}

    def update_critic(self, batch: DataProto) -> dict[str, Any]:
        """Mini-batch steps of a critic whose values rise from each to the next."""
        plan, tensors = self.plan(batch), batch.batch
        number = torch.from_numpy(plan.mini_batch)
        tensors["update_values"] = tensors["values"] + 0.1 * number[:, None]
        tensors["value_mini_batch"] = number
        return {"ranks": plan.notes(), "losses": toy_update.value_losses(tensors, plan)}

    def update_actor(self, batch: DataProto) -> dict[str, Any]:
        """Mini-batch steps, each with a policy a little further on."""
        o, plan, tensors = self.options, self.plan(batch), batch.batch
        new, entropy = self.scored(batch, self.policy)
        for number in range(1, o.mini_batches):
            policy = self.policy.at(self.policy.version + o.update_drift * number)
            later, moved = self.scored(batch, policy)
            rows = torch.from_numpy(plan.mini_batch == number)
            new[rows], entropy[rows] = later[rows], moved[rows]
        new = self.adjust.get("update_log_probs", torch.Tensor.float)(new)
        tensors["update_log_probs"] = new.float()
        if o.entropy:
            entropy = self.adjust.get("update_entropys", torch.Tensor.float)(entropy)
            tensors["update_entropys"] = entropy.float()
        tensors["mini_batch"] = torch.from_numpy(plan.mini_batch)
        losses = toy_update.losses(tensors, plan, o.settings())
        mask = tensors["response_mask"] != 0
        metrics = {
            "actor/grad_norm": 0.5 + 0.1 * self.random.random(),
            "actor/ppo_kl": float((tensors["old_log_probs"] - new)[mask].float().mean()),
            "actor/kl_loss": sum(loss["kl_loss"] for loss in losses) / len(losses),
        }
        if o.recorded:
            metrics |= batch_metrics(batch, new) | {"actor/lr": 5e-5 * o.step_drift}
        return {"ranks": plan.notes(), "losses": losses, "metrics": metrics}

    def plan(self, batch: DataProto) -> toy_update.Plan:
        """How the update spreads the rows over ranks, mini-batches and micro-batches."""
        o = self.options
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        return toy_update.plan(
            lengths, o.ranks, o.mini_batches, o.micro_rows, seed=o.seed, limit=o.max_token_len,
            packed=o.recorded,
        )  # fmt: skip

    def sync(self, sent: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Checksums of both sides, and a few tokens that both scored."""
        now, before = (
            {f"layer.{i}": 1000 * step * (self.options.step_drift != 0) + i for i in range(4)}
            for step in (self.options.step, self.options.step - 1)
        )
        engine, sample = sent(now, before), np.asarray([-0.5, -1.5, -2.5])
        half = self.options.half or self.options.engine_half
        noise = self.noise(sample.shape, half=half)
        other = sample + noise + (0.3 if engine != now else 0.0)
        return {
            "trainer_checksum": now,
            "engine_prefix_cache_reset": True,
            "engine_checksum": dict(engine),
            "sync_probe": {"trainer": sample, "engine": other},
        }

    def validation(self) -> DataProto:
        """A few scored responses to other prompts."""
        batch = DataProto()
        other = min(7, self.options.vocab - 1)
        lists = [[START], [START, other][: self.options.prompt_width], [START]]
        self._replace(batch, self._sampled(lists)[0])
        self.reward(batch)
        return batch
