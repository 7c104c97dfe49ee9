"""Healthy steps to test against: one simulated GRPO step, boundary by boundary.

::

    for b in boundaries(Options(prompts=4, n=4, ranks=2)):
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)

Every number is consistent: tokens are sampled from :class:`~.toy_policy.ToyPolicy`, log-probs are
that policy's plus rounding noise, advantages and losses come from ``reference/``, losses are summed
over ranks and micro-batches. A batch may be changed between two boundaries, to seed a fault: the
stages that follow go on from the changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.findings import When
from dataproto_audit.probes.context import Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.reference import advantages as estimators
from dataproto_audit.reference.kl import rewards_with_kl
from dataproto_audit.testing import toy_update
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.toy_policy import PAD, START, STOP, ToyPolicy, prompt_hash, sample

__all__ = ["Boundary", "Options", "boundaries", "healthy_step"]

HALF_NOISE, FULL_NOISE = 0.01, 3e-7
"""Standard deviation of what two passes over the same tokens differ by, in nats."""


@dataclass
class Boundary:
    """One boundary of the step, ready for ``Auditor.boundary``."""

    stage: str
    when: When
    batch: DataProto
    evidence: Mapping[str, Any] = field(default_factory=dict)


def healthy_step(options: Options | None = None) -> tuple[Settings, list[Boundary]]:
    """Settings and all boundaries of one step."""
    options = options or Options()
    return options.settings(), list(boundaries(options))


def boundaries(
    options: Options | None = None,
    *,
    sampling: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    sent: Callable[[Any, Any], Any] | None = None,
) -> Iterator[Boundary]:
    """The boundaries of one step in the order of the loop, each made when it is asked for.

    ``sampling`` may change the settings that the engine is asked for, ``sent`` the weights that
    are sent to it, given those of the step before.
    """
    options = options or Options()
    run = _Step(options, sampling or (lambda settings: settings))
    now = Boundary("prompts", "after", run.prompts())
    yield now
    prompts = now.batch
    for stage, work in run.stages(prompts):
        yield Boundary(stage, "before", now.batch)
        batch = _copied(now.batch)
        evidence = work(batch)
        now = Boundary(stage, "after", batch, evidence)
        yield now
    yield Boundary("sync_weights", "after", DataProto(), run.sync(sent or (lambda new, old: new)))
    yield Boundary("validation", "after", run.validation())


def _copied(batch: DataProto) -> DataProto:
    """A batch of its own with the same tensors and arrays."""
    tensors = None if batch.batch is None else batch.batch.clone(recurse=False)
    return DataProto(tensors, dict(batch.non_tensor_batch), dict(batch.meta_info))


class _Step:
    """The stages of one step. Each takes a batch, changes it, and returns the evidence."""

    def __init__(
        self, options: Options, sampling: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self.options = o = options
        self.sampling = sampling
        self.random = np.random.default_rng([o.seed, o.step])
        base = ToyPolicy(o.vocab, temperature=o.temperature)
        self.reference, self.policy = base, base.at(0.02 * (o.step - 1))
        self.engine = base.at(0.02 * (o.step - 1 - o.stale_steps))

    def noise(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """What a second pass over the same tokens differs by."""
        scale = HALF_NOISE if self.options.half else FULL_NOISE
        return self.random.normal(0.0, scale, shape)

    def stages(self, prompts: DataProto) -> Iterator[tuple[str, Callable[[DataProto], Any]]]:
        """Name and work of each stage between the prompts and the weight sync."""
        o = self.options
        yield "rollout", self.rollout
        yield "union", lambda batch: self.union(batch, prompts)
        if o.balanced:
            yield "balance", self.balance
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
        lists = [
            [START, *random.integers(3, o.vocab, int(random.integers(o.prompt_width))).tolist()]
            for _ in range(o.prompts)
        ]
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
        return DataProto(
            non_tensor_batch={name: _objects(values) for name, values in arrays.items()},
            meta_info={"temperature": o.temperature, "global_steps": o.step},
        )

    def rollout(self, batch: DataProto) -> dict[str, Any]:
        """n responses to each prompt."""
        o = self.options
        used = self.sampling({"temperature": o.temperature, "top_p": 1.0, "top_k": -1})
        self.engine = replace(self.engine, temperature=used["temperature"])
        lists = [ids for ids in batch.non_tensor_batch["prompt_ids"].tolist() for _ in range(o.n)]
        fields, log_probs = self._sampled(lists)
        fields["rollout_log_probs"] = log_probs.float()
        self._replace(batch, fields)
        batch.meta_info["sampling"] = {**used, "max_tokens": o.response_width}
        return {}

    def _replace(self, batch: DataProto, fields: dict[str, Tensor]) -> None:
        """Make ``batch`` one of these tensors, with a finish reason for each row."""
        stopped = _last_ids(fields) == STOP
        reasons = ["stop" if stop else "length" for stop in stopped.tolist()]
        fresh = DataProto.from_dict(fields, {"finish_reason": _objects(reasons)})
        batch.batch, batch.non_tensor_batch = fresh.batch, fresh.non_tensor_batch

    def _sampled(self, lists: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Token fields of one response to each prompt, and the engine's log-probs."""
        o = self.options
        prompts, used = _left_padded(lists, o.prompt_width)
        hashes = prompt_hash(prompts, used)
        responses, attended, trained = sample(
            self.engine, hashes, o.response_width, self.random,
            one_token=o.one_token, truncated=o.truncated, tools=o.multi_turn,
        )  # fmt: skip
        scored, _ = self.engine.score(hashes, responses)
        log_probs = np.minimum(scored + self.noise(scored.shape), 0.0) * trained
        attention = np.concatenate([used, attended], 1)
        fields = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": trained.astype(np.int64),
            "input_ids": np.concatenate([prompts, responses], 1),
            "attention_mask": attention.astype(np.int64),
            "position_ids": np.maximum(np.cumsum(attention, 1) - 1, 0),
        }
        return {name: torch.from_numpy(value) for name, value in fields.items()}, torch.from_numpy(
            log_probs
        )

    def union(self, batch: DataProto, prompts: DataProto) -> dict[str, Any]:
        """The prompt side, each prompt n times, merged with the rollout."""
        for name, array in prompts.non_tensor_batch.items():
            batch.non_tensor_batch[name] = array.repeat(self.options.n)
        return {}

    def balance(self, batch: DataProto) -> dict[str, Any]:
        """Rows from long to short, dealt to the ranks back and forth."""
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        order, ranks = np.argsort(-lengths, kind="stable"), self.options.ranks
        turns = order.reshape(-1, ranks)
        turns[1::2] = turns[1::2, ::-1]
        batch.reorder(torch.from_numpy(np.sort(turns.T, axis=1).reshape(-1).copy()))
        return {}

    def reward(self, batch: DataProto) -> dict[str, Any]:
        """1 for responses whose ids sum to a multiple of 3, on the last attended token."""
        tensors = batch.batch
        attended = _response_attention(tensors)
        kept = torch.where(attended, tensors["responses"], 0).sum(1)
        score = (kept % 3 == 0).float() if not self.options.equal_groups else torch.ones(len(kept))
        scores = torch.zeros(attended.shape)
        scores[torch.arange(len(score)), attended.sum(1) - 1] = score
        tensors["token_level_scores"] = scores
        batch.non_tensor_batch["score"] = _objects(score.tolist())
        return {}

    def old_log_prob(self, batch: DataProto) -> dict[str, Any]:
        """The policy's own log-probs and entropies."""
        log_probs, entropy = self._scored(batch, self.policy)
        batch.batch["old_log_probs"], batch.batch["entropys"] = log_probs, entropy
        return {"ranks": self._plan(batch).notes()}

    def ref_log_prob(self, batch: DataProto) -> dict[str, Any]:
        """The reference's log-probs."""
        batch.batch["ref_log_prob"] = self._scored(batch, self.reference)[0]
        return {"ranks": self._plan(batch).notes()}

    def _scored(self, batch: DataProto, policy: ToyPolicy) -> tuple[Tensor, Tensor]:
        tensors, width = batch.batch, self.options.prompt_width
        used = tensors["attention_mask"][:, :width].numpy() != 0
        hashes = prompt_hash(tensors["prompts"].numpy(), used)
        log_probs, entropy = policy.score(hashes, tensors["responses"].numpy())
        log_probs = np.minimum(log_probs + self.noise(log_probs.shape), 0.0)
        attended = _response_attention(tensors).numpy()
        stored = torch.bfloat16 if self.options.half else torch.float32
        return tuple(torch.from_numpy(x * attended).to(stored) for x in (log_probs, entropy))  # type: ignore[return-value]  # two of them

    def values(self, batch: DataProto) -> dict[str, Any]:
        """A critic that knows nothing."""
        shape = batch.batch["responses"].shape
        batch.batch["values"] = torch.from_numpy(self.random.normal(size=shape)).float()
        return {}

    def kl_reward(self, batch: DataProto) -> dict[str, Any]:
        """Scores less a KL penalty."""
        fields = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
        rewards = rewards_with_kl(*(batch.batch[name] for name in fields), coefficient=0.01)
        batch.batch["token_level_rewards"] = rewards.float()
        return {}

    def advantage(self, batch: DataProto) -> dict[str, Any]:
        """Advantages of the configured estimator."""
        o, tensors = self.options, batch.batch
        if "token_level_rewards" not in tensors.keys():  # noqa: SIM118 - a TensorDict iterates rows
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        rewards, mask = tensors["token_level_rewards"], tensors["response_mask"]
        if o.critic:
            made = estimators.gae(rewards, tensors["values"], mask)
        else:
            options = {"norm_by_std": o.norm_by_std} if o.estimator.startswith("grpo") else {}
            made = getattr(estimators, o.estimator)(
                rewards, mask, batch.non_tensor_batch["uid"], **options
            )
        tensors["advantages"], tensors["returns"] = (value.float() for value in made)
        return {}

    def update_critic(self, batch: DataProto) -> dict[str, Any]:
        """Nothing that the batch shows."""
        return {"ranks": self._plan(batch).notes()}

    def update_actor(self, batch: DataProto) -> dict[str, Any]:
        """Mini-batch steps, each with a policy a little further on."""
        plan, tensors = self._plan(batch), batch.batch
        new, entropy = self._scored(batch, self.policy)
        for number in range(1, self.options.mini_batches):
            later, moved = self._scored(batch, self.policy.at(self.policy.version + 0.01 * number))
            rows = torch.from_numpy(plan.mini_batch == number)
            new[rows], entropy[rows] = later[rows], moved[rows]
        tensors["update_log_probs"] = new.float()
        if self.options.entropy:
            tensors["update_entropys"] = entropy.float()
        tensors["mini_batch"] = torch.from_numpy(plan.mini_batch)
        losses = toy_update.losses(tensors, plan, self.options.settings())
        mask = tensors["response_mask"] != 0
        metrics = {
            "actor/grad_norm": 0.5 + 0.1 * self.random.random(),
            "actor/ppo_kl": float((tensors["old_log_probs"] - new)[mask].float().mean()),
            "actor/kl_loss": sum(loss["kl_loss"] for loss in losses) / len(losses),
        }
        return {"ranks": plan.notes(), "losses": losses, "metrics": metrics}

    def _plan(self, batch: DataProto) -> toy_update.Plan:
        o = self.options
        lengths = batch.batch["attention_mask"].sum(1).numpy()
        return toy_update.plan(lengths, o.ranks, o.mini_batches, o.micro_rows, seed=o.seed)

    def sync(self, sent: Callable[[Any, Any], Any]) -> dict[str, Any]:
        """Checksums of both sides, and a few tokens that both scored."""
        now, before = (
            {f"layer.{i}": 1000 * step + i for i in range(4)}
            for step in (self.options.step, self.options.step - 1)
        )
        engine, sample = sent(now, before), np.asarray([-0.5, -1.5, -2.5])
        other = sample + self.noise(sample.shape) + (0.3 if engine != now else 0.0)
        return {
            "trainer_checksum": now,
            "engine_checksum": dict(engine),
            "sync_probe": {"trainer": sample, "engine": other},
        }

    def validation(self) -> DataProto:
        """A few scored responses to other prompts."""
        batch = DataProto()
        lists = [[START], [START, 7][: self.options.prompt_width], [START]]
        self._replace(batch, self._sampled(lists)[0])
        self.reward(batch)
        return batch


def _objects(values: list[Any]) -> NDArray[np.object_]:
    out = np.empty(len(values), object)
    for row, value in enumerate(values):
        out[row] = value
    return out


def _left_padded(lists: list[list[int]], width: int) -> tuple[Any, Any]:
    ids, used = np.full((len(lists), width), PAD), np.zeros((len(lists), width), bool)
    for row, items in enumerate(lists):
        ids[row, width - len(items) :] = items
        used[row, width - len(items) :] = True
    return ids, used


def _response_attention(tensors: Any) -> Tensor:
    attended: Tensor = tensors["attention_mask"][:, -tensors["responses"].shape[1] :] != 0
    return attended


def _last_ids(tensors: Any) -> Tensor:
    responses: Tensor = tensors["responses"]
    return responses[torch.arange(len(responses)), _response_attention(tensors).sum(1) - 1]
