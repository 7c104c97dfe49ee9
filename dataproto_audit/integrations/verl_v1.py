"""Boundaries of verl's V1 trainer (``PPOTrainer``, 0.9): which call is which stage.

Source: ``verl/trainer/ppo/v1/trainer_base.py`` of 0.9.1, ``_step_once``. Every stage takes and
returns a ``KVBatchMeta``; the batch is read from the store under its keys (:mod:`.verl_v1_store`).
A step begins when ``replay_buffer.sample`` returns: its prompts are those that the sampled rows
came from, whenever they were sent. Scores come with the rows unless a colocated reward model makes
them, so ``reward`` has an entry only there.

Not covered: the entry of ``rollout`` (no batch of repeated prompts exists), all but the first
local update of a step where ``parameter_sync_step`` is larger than 1, rows that the replay buffer
evicts, and, in a step that is filled up, what happens between ``balance`` and the next stage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataproto_audit.dump.readers.names import METHODS
from dataproto_audit.integrations import verl_v0
from dataproto_audit.integrations.patches import Args, Kwargs
from dataproto_audit.integrations.verl_batches import first
from dataproto_audit.integrations.verl_v1_store import is_meta

if TYPE_CHECKING:
    from dataproto_audit.integrations.verl_v1_run import VerlV1Run

log = logging.getLogger("dataproto_audit")

STAGES = (
    "_compute_reward_colocate", "_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob",
    "_compute_values", "_compute_advantage", "_update_critic", "_update_actor",
)  # fmt: skip
"""Methods of the trainer that are one stage each; METHODS says which."""
MEASURED = {"update_critic": "critic/", "update_actor": "actor/"}
"""Prefix of the metrics that a stage adds to the step's."""


class StoreCall(verl_v0.Call):
    """A call of the training step that takes a ``KVBatchMeta``."""

    run: VerlV1Run

    def on(self) -> bool:
        """Only in the training step, and in its first local update."""
        return super().on() and not self.run.validating and not self.run.repeated

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """verl raised: keep what the store holds for the input."""
        self.run.crashed_with(self.place(), first(args, kwargs), error)


class StageCall(StoreCall):
    """A method that is one stage."""

    def __init__(self, run: VerlV1Run, name: str) -> None:
        super().__init__(run, name)
        self.stage = METHODS[name]

    def on(self) -> bool:
        """Only in the training step, and in its first local update."""
        self.run.called(self.stage)
        return super().on()

    def place(self) -> str:
        """The stage that this call is."""
        return self.stage

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """The keys enter."""
        if self.stage == "advantage" and self.run.penalised:
            self.run.waiting = first(args, kwargs)  # the penalty on the rewards comes first
            return
        self.run.enters(self.stage, first(args, kwargs))

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """The keys leave."""
        metrics = kwargs.get("metrics", args[1] if len(args) > 1 else None)
        self.run.leaves(self.stage, result if is_meta(result) else first(args, kwargs),
                        _measured(self.stage, metrics))  # fmt: skip


def _measured(stage: str, metrics: Any) -> dict[str, float]:
    prefix = MEASURED.get(stage)
    if prefix is None or not isinstance(metrics, Mapping):
        return {}
    found = {}
    for name, value in metrics.items():
        if str(name).startswith(prefix):
            try:
                found[str(name)] = float(value)
            except (TypeError, ValueError):
                continue
    return found


class PenaltyCall(StoreCall):
    """``apply_kl_penalty(data)`` inside of ``_compute_advantage``, on a padded copy."""

    def place(self) -> str:
        """The stage that this call is."""
        return "kl_reward"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Scores enter."""
        if self.run.waiting is not None:
            self.run.enters("kl_reward", self.run.waiting)

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Rewards leave; the advantage begins."""
        meta, self.run.waiting = self.run.waiting, None
        data = result[0] if isinstance(result, tuple) else result
        if meta is not None:
            self.run.carried = {"token_level_rewards": data.batch["token_level_rewards"]}
            self.run.leaves("kl_reward", meta)
            self.run.enters("advantage", meta)

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """verl raised."""
        self.run.crashed_with(self.place(), self.run.waiting, error)


class SubmitCall(verl_v0.Call):
    """``_submit_batch_to_rollout(batch)``: prompts with their uids."""

    def on(self) -> bool:
        """Also between steps: the asynchronous trainers send ahead."""
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage that this call belongs to."""
        return "prompts"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Remember them until their rows are sampled."""
        run: Any = self.run
        run.prompts.sent(first(args, kwargs))


class UpdateCall(verl_v0.Call):
    """``_step_once(metrics, ...)``: one local update."""

    run: VerlV1Run

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """A step begins, or goes on with a batch of its own."""
        self.run.begins()

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """It is over."""
        self.run.repeated = False

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """A call inside has told already what it was."""
        self.run.repeated = False
        self.run.crashed(self.place(), {}, error)


class SampleCall(verl_v0.Call):
    """``replay_buffer.sample(...)``: finished rows, in the order of their arrival."""

    run: VerlV1Run

    def on(self) -> bool:
        """In validation, too."""
        return super().on() and not self.run.repeated

    def place(self) -> str:
        """The stage that this call belongs to."""
        return "validation" if self.run.validating else "rollout"

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """There is no batch yet."""
        self.run.crashed(self.place(), {}, error)

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Rows are there."""
        meta = result[0] if isinstance(result, tuple) else result
        if self.run.validating:
            self.run.tested(meta)
        else:
            self.run.sampled(meta)
