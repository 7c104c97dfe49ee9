"""A V1 ``PPOTrainer`` under audit: where its hooks are, and what they hand to the auditor.

Until ``balance`` rows are looked at prompt by prompt, because they arrive in any order; from there
on they are in the order of the keys that verl hands on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dataproto_audit.integrations import verl_v0, verl_v1
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.verl_run import VerlRun
from dataproto_audit.integrations.verl_settings import at, plain_config
from dataproto_audit.integrations.verl_v1_store import (
    Prompts,
    fields_of,
    filling_rows,
    grouped,
    is_meta,
    uid_of,
    with_copies,
)
from dataproto_audit.integrations.verl_versions import MODULE_V1

log = logging.getLogger("dataproto_audit")

UNORDERED = ("rollout", "reward")
"""Stages in which the order of rows means nothing, as at the entry of ``balance``."""
REWARDED = ("advantage", "update_critic", "update_actor")
"""Stages at whose end rewards are there."""


class VerlV1Run(VerlRun):
    """Follows one V1 trainer."""

    each_step = ("rollout", "old_log_prob", "advantage", "update_actor")
    begins_by = "_step_once"
    loop_at = ("_step_once", MODULE_V1)

    def __init__(self, trainer: Any, options: Options) -> None:
        super().__init__(trainer, options)
        self.prompts = Prompts()
        self.repeated = False
        """True in a local update of a step behind its first one."""
        self.waiting: Any = None
        """Keys in ``_compute_advantage`` while the KL penalty has not been applied."""
        self.penalised = False
        self._scored = self._rewarded = False

    def attach(self) -> None:
        """Hook into every call that is there."""
        self.attached = True
        trainer, wrap = self.trainer, self._wrap
        for name in verl_v1.STAGES:
            wrap(trainer, name, verl_v1.StageCall(self, name))
        name = "_submit_batch_to_rollout"
        wrap(trainer, name, verl_v1.SubmitCall(self, name))
        wrap(trainer, "_step_once", verl_v1.UpdateCall(self, "_step_once"))
        wrap(trainer, "_validate", verl_v0.ValidationCall(self, "_validate"))
        wrap(trainer, "fit", verl_v0.FitCall(self, "fit"))
        self._hook_loop()
        for module in self._modules():
            wrap(module, "apply_kl_penalty", verl_v1.PenaltyCall(self, "apply_kl_penalty"))
            if self.options.metrics:
                wrap(module, "compute_data_metrics",
                     verl_v0.MetricsCall(self, "compute_data_metrics"))  # fmt: skip
        self._hook_tracking()
        self.hook_managers()

    def hook_managers(self) -> None:
        """Hook into the replay buffer and the checkpoint manager as soon as they exist."""
        for owner, name, call in (
            ("replay_buffer", "sample", verl_v1.SampleCall),
            ("checkpoint_manager", "update_weights", verl_v0.SyncCall),
        ):
            manager = getattr(self.trainer, owner, None)
            if manager is not None:
                self.patches.wrap(manager, name, call(self, name), may_be_awaited=True)

    def start(self) -> None:
        """Open the session."""
        config = plain_config(getattr(self.trainer, "config", None))
        self.penalised = bool(at(config, "algorithm.use_kl_in_reward"))
        super().start()

    # -- what the calls report ---------------------------------------------------------------------

    def begins(self) -> None:
        """A local update begins."""
        self.repeated = int(getattr(self.trainer, "local_trigger_step", 0) or 0) > 0
        if self.repeated:
            self._say("parameter_sync_step is larger than 1: the first local update of each step "
                      "is audited, the others are not.")  # fmt: skip
            return
        self.joins, self.carried, self._entered, self.waiting = False, {}, "", None
        self._scored = self._rewarded = False
        self._begins_step()

    def sampled(self, meta: Any) -> None:
        """Finished rows were taken out of the replay buffer."""
        session = self._open
        order = [meta.keys[row] for row in grouped(meta.keys)]
        prompts = self.prompts.of(order)
        copies = set(Counter(uid_of(key) for key in order).values())
        if prompts is None or copies != {session.settings.n}:
            self._say("Rows of the rollout are not compared with their prompts in a step where "
                      "these were sent by an earlier run or have not n rows each.")  # fmt: skip
            session.auditor.unseen()
        else:
            self.leave("prompts", prompts)
        self.leaves("rollout", meta)
        if getattr(getattr(self.trainer, "reward_loop_manager", None),
                   "reward_loop_worker_handles", None) is not None:  # fmt: skip
            self._scored = True
            self.leaves("reward", meta)

    def enters(self, stage: str, meta: Any) -> None:
        """The rows of ``meta`` enter ``stage``."""
        self.enter(stage, self._read(stage, meta, unordered=stage in (*UNORDERED, "balance")))

    def leaves(self, stage: str, meta: Any, metrics: Mapping[str, float] | None = None) -> None:
        """The rows of ``meta`` leave ``stage``."""
        self._scored = self._scored or stage == "reward"
        self._rewarded = self._rewarded or stage in REWARDED
        filling = filling_rows(meta) if stage == "balance" else []
        own = [row for row, fills in enumerate(filling) if not fills] if any(filling) else None
        batch = self._read(stage, meta, unordered=stage in UNORDERED, rows=own)
        self.leave(stage, batch, metrics)
        if own is not None:  # rows that only fill up are new; they are looked at from here on
            self._open.auditor.unseen()

    def tested(self, meta: Any) -> None:
        """Scored responses to held-out prompts."""
        self._open.open_step(self._step())
        if self._open.wants("validation"):
            batch = fields_of(meta, grouped(meta.keys))
            self.validated(with_copies(batch, "token_level_scores"))

    def crashed_with(self, stage: str, meta: Any, error: BaseException) -> None:
        """verl raised in ``stage`` with these keys."""
        batches: dict[str, Any] = {}
        if self.options.flight_recorder and is_meta(meta) and self._told is not error:
            stored = self.guarded("flight recorder: store", lambda: fields_of(meta), None)
            batches = {"input": stored} if stored is not None else {}
        self.crashed(stage, batches, error)

    def _read(
        self, stage: str, meta: Any, *, unordered: bool, rows: list[int] | None = None
    ) -> dict[str, Any] | None:
        """What the store holds for ``meta``; None where the gates are closed."""
        if not self._open.wants(stage):
            return None
        batch = fields_of(meta, grouped(meta.keys) if unordered else rows)
        batch["meta_info"] = {"global_steps": self._step()}
        copies = ["token_level_scores"] if self._scored else []
        return with_copies(batch, *copies, *(["token_level_rewards"] if self._rewarded else []))
