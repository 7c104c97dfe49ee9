"""A step that was recorded, run again with faults: later stages go on from what a fault left.

What cannot be computed from a batch is taken from the record: what the engine sampled, and what a
model gives for a prefix of tokens. For a prefix that was never met, the record's value at another
token stands in, the same for every role, as a model that knows nothing would give. Everything else
is computed again: the union, the balancing, scores, the KL in the reward, advantages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.reference import advantages as estimators
from dataproto_audit.reference.kl import rewards_with_kl
from dataproto_audit.testing.healthy import Boundary

Index = NDArray[np.int64]
MODELLED = ("old_log_probs", "entropys", "ref_log_prob", "values")
MADE = (*MODELLED, "token_level_scores", "token_level_rewards", "advantages", "returns")
BY_STAGE = {"old_log_prob": ("old_log_probs", "entropys"), "ref_log_prob": ("ref_log_prob",),
            "values": ("values",)}  # fmt: skip


@dataclass(frozen=True)
class RecordedStep:
    """One healthy step: the prompts, what the engine returned for them (n rows a prompt, in their
    order), and the batch of the update, whose row i was row ``order[i]`` before balancing.

    ``metrics`` is what the update measured, ``kl_coef`` the coefficient of a KL in the reward.
    """

    name: str
    prompts: DataProto
    sampled: DataProto
    final: DataProto
    settings: Settings
    order: Index
    balanced: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    kl_coef: float = 0.0
    step: int = 1

    @property
    def copies(self) -> Index:
        """The prompt of each sampled row."""
        n = len(self.sampled) // max(1, len(self.prompts))
        return np.arange(len(self.prompts)).repeat(n)

    def run(self) -> Rerun:
        """A run of it."""
        return Rerun(self)


def order_of(sampled: DataProto, final: DataProto) -> Index:
    """Where each row of ``final`` is in ``sampled``, by prompt and response; equal rows in order.

    Raises ``KeyError`` where they are not the same rows.
    """
    places: dict[bytes, list[int]] = {}
    for row, mark in enumerate(_marks(sampled)):
        places.setdefault(mark, []).append(row)
    return np.array([places[mark].pop(0) for mark in _marks(final)], np.int64)


def _marks(batch: DataProto) -> list[bytes]:
    sides = [batch.batch[name].numpy() for name in ("prompts", "responses")]
    return [b"".join(side[row].tobytes() for side in sides) for row in range(len(batch))]


class PrefixModel:
    """What the models of a recorded step give for a prefix: prompt, and response up to a token."""

    def __init__(self, batch: DataProto) -> None:
        fields = batch.batch
        self._known: dict[bytes, tuple[int, int]] = {}
        self._pool: list[tuple[int, int]] = []
        self._fields = {name: fields[name] for name in (*MODELLED, "rollout_log_probs")
                        if name in fields.keys()}  # fmt: skip  # noqa: SIM118 - a TensorDict iterates rows
        trained = (fields["response_mask"] != 0).tolist()
        for row, marks in enumerate(prefixes(fields)):
            for column, mark in enumerate(marks):
                if mark is not None:
                    self._known.setdefault(mark, (row, column))
                if mark is not None and trained[row][column]:
                    self._pool.append((row, column))

    def gives(self, name: str, tensors: Any, *, otherwise: Tensor | None = None) -> Tensor:
        """The field ``name`` for the rows of ``tensors``, ``[rows, response]``; where nothing is
        attended, ``otherwise``, or 0."""
        source: Tensor = self._fields[name]
        shape = tensors["responses"].shape
        out: Tensor = source.new_zeros(shape)
        if otherwise is not None and otherwise.shape == shape:
            out = otherwise.clone()
        for row, marks in enumerate(prefixes(tensors)):
            for column, mark in enumerate(marks):
                if mark is not None:
                    at = self._known.get(mark)
                    at = self._pool[zlib.crc32(mark) % len(self._pool)] if at is None else at
                    out[row, column] = source[at]
        return out

    def scorer(self, name: str) -> Callable[[BatchView, float | None], Any]:
        """The exact log-probs of a role, as a replay takes them: a function of a batch and the
        temperature. ``name`` is a field without the trainer's rounding."""

        def score(view: BatchView, temperature: float | None) -> tuple[Any, Any]:
            made = self.gives(name, view.tensors).double().numpy()
            return made, None

        return score


def prefixes(tensors: Any) -> Iterator[list[bytes | None]]:
    """For each row and column of the response, its prefix; None where it is not attended."""
    attention, ids = tensors["attention_mask"].numpy() != 0, tensors["input_ids"].numpy()
    width = ids.shape[1] - tensors["responses"].shape[1]
    prompts, responses = ids[:, :width], ids[:, width:]
    for row in range(len(prompts)):
        start = prompts[row][attention[row, :width]].tobytes()
        on = attention[row, width:]
        yield [start + responses[row, : column + 1][on[: column + 1]].tobytes()
               if on[column] else None for column in range(responses.shape[1])]  # fmt: skip


class Rerun:
    """The stages of a recorded step, each from the batch that the one before handed on.

    ``options`` and ``order`` are what faults look up in a simulated step.
    """

    def __init__(self, record: RecordedStep) -> None:
        self.record = record
        self.order: Index | None = None
        self.model = PrefixModel(record.final)
        s = record.settings
        largest = max(int(record.final.batch[n].max()) for n in ("prompts", "responses"))
        self.options = SimpleNamespace(
            n=len(record.sampled) // max(1, len(record.prompts)), ranks=s.world_size or 1,
            vocab=s.vocab_size or largest + 1, settings=lambda: s,
            estimator=s.adv_estimator, step=record.step,
        )  # fmt: skip

    def stages(self, prompts: DataProto) -> Iterator[tuple[str, Callable[[DataProto], Any]]]:
        """Name and work of each stage behind the prompts."""
        fields, s = self.record.final.batch.keys(), self.record.settings
        yield "rollout", self.rollout
        yield "union", lambda batch: self.union(batch, prompts)
        if self.record.balanced:
            yield "balance", self.balance
        yield "reward", self.reward
        for stage, names in BY_STAGE.items():
            if names[0] in fields:
                yield stage, self._modelled(names)
        if s.use_kl_in_reward:
            yield "kl_reward", self.kl_reward
        yield "advantage", self.advantage
        if "values" in fields:
            yield "update_critic", lambda batch: {}
        yield "update_actor", lambda batch: {"metrics": dict(self.record.metrics)}

    def rollout(self, batch: DataProto) -> dict[str, Any]:
        """What the engine returned, whatever it was asked."""
        made = copied(self.record.sampled)
        batch.batch, batch.non_tensor_batch = made.batch, made.non_tensor_batch
        batch.meta_info = dict(made.meta_info)
        return {}

    def union(self, batch: DataProto, prompts: DataProto) -> dict[str, Any]:
        """Prompts, each repeated in place, and responses side by side."""
        rows = self.record.copies
        left = {n: a[rows] for n, a in prompts.non_tensor_batch.items() if len(a) == len(prompts)}
        batch.non_tensor_batch = {**left, **batch.non_tensor_batch}
        tensors = {} if prompts.batch is None else dict(prompts.batch.items())
        for name, tensor in tensors.items():
            batch.batch[name] = tensor[torch.from_numpy(rows)]
        batch.meta_info = {**prompts.meta_info, **batch.meta_info}
        return {}

    def balance(self, batch: DataProto) -> dict[str, Any]:
        """The order that was taken then, of as many rows; token counts of these."""
        order = self.record.order
        self.order = order if len(order) == len(batch) else np.arange(len(batch))
        batch.reorder(torch.from_numpy(self.order))
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(1).tolist()
        return {}

    def reward(self, batch: DataProto) -> dict[str, Any]:
        """Scores that came with the rows, from their reward loop."""
        batch.batch["token_level_scores"] = batch.batch["rm_scores"].clone()
        return {}

    def _modelled(self, names: Sequence[str]) -> Callable[[DataProto], dict[str, Any]]:
        def work(batch: DataProto) -> dict[str, Any]:
            for name in names:
                if name in self.record.final.batch.keys():  # noqa: SIM118 - a TensorDict iterates rows
                    same = len(batch) == len(self.record.final)
                    off = self.record.final.batch[name] if same else None
                    batch.batch[name] = self.model.gives(name, batch.batch, otherwise=off)
            return {}

        return work

    def kl_reward(self, batch: DataProto) -> dict[str, Any]:
        """Scores less a KL penalty of verl's default kind."""
        names = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
        made = rewards_with_kl(
            *(batch.batch[name] for name in names), coefficient=self.record.kl_coef
        )
        batch.batch["token_level_rewards"] = made.float()
        return {}

    def advantage(self, batch: DataProto) -> dict[str, Any]:
        """Advantages of the configured estimator."""
        tensors, s = batch.batch, self.record.settings
        if not s.use_kl_in_reward:
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        rewards, mask = tensors["token_level_rewards"], tensors["response_mask"]
        uid, name = batch.non_tensor_batch["uid"], str(s.adv_estimator)
        if name == "gae":
            values = tensors["values"]
            made = estimators.gae(rewards, values, mask, gamma=s.gamma or 1.0, lam=s.lam or 1.0)
        elif name == "reinforce_plus_plus":
            made = estimators.reinforce_plus_plus(rewards, mask, gamma=s.gamma or 1.0)
        else:
            made = getattr(estimators, name)(rewards, mask, uid)
        final = self.record.final.batch
        for field_name, part in zip(("advantages", "returns"), made, strict=True):
            new = torch.where(mask != 0, part.float(), 0.0)
            if final[field_name].shape == part.shape:  # verl leaves numbers off the mask
                off = (mask == 0) & (final["response_mask"] == 0)
                new = torch.where(off, final[field_name], new)
            tensors[field_name] = new
        return {}


def boundaries(run: Rerun) -> Iterator[Boundary]:
    """The boundaries of a step in the order of the loop, each made when it is asked for."""
    now = Boundary("prompts", "after", copied(run.record.prompts))
    yield now
    prompts = now.batch
    for stage, work in run.stages(prompts):
        if stage != "union":  # two batches enter it
            now = Boundary(stage, "before", now.batch)
            yield now
        batch = copied(now.batch)
        evidence = work(batch)
        now = Boundary(stage, "after", batch, evidence)
        yield now


def copied(batch: DataProto) -> DataProto:
    """A batch of its own with the same tensors and arrays."""
    tensors = None if batch.batch is None else batch.batch.clone(recurse=False)
    return DataProto(tensors, dict(batch.non_tensor_batch), dict(batch.meta_info))
