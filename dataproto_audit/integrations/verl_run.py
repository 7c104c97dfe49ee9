"""A ``RayPPOTrainer`` under audit: hooks in its calls, and where its step stands.

The hooks are on the trainer object, on the module functions that its ``fit`` looks up, and on two
classes of verl; of those shared with other trainers, only calls made while this trainer is at work
count. ``detach`` puts every original back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from dataproto_audit.codes import InternalError
from dataproto_audit.findings import AuditError
from dataproto_audit.integrations import flight, verl_v0
from dataproto_audit.integrations.announce import Faults
from dataproto_audit.integrations.known_crashes import known_crash
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.patches import Patches
from dataproto_audit.integrations.rank_evidence import RankEvidence
from dataproto_audit.integrations.session import Session
from dataproto_audit.integrations.verl_batches import merged, parts_of
from dataproto_audit.integrations.verl_loop import Loop, LoopCall
from dataproto_audit.integrations.verl_settings import at, plain_config, settings_of
from dataproto_audit.integrations.verl_steps import Steps
from dataproto_audit.integrations.verl_versions import (
    CORRECTION,
    MODULE,
    TRACKING,
    Version,
    version,
)

log = logging.getLogger("dataproto_audit")
T = TypeVar("T")

AT_WORK: list[VerlRun] = []
"""Runs whose ``fit`` is going on in this process, the innermost last."""


class VerlRun:
    """Follows one trainer. ``session`` is made when its run begins."""

    each_step: tuple[str, ...] = (
        "prompts", "rollout", "union", "reward", "old_log_prob", "advantage", "update_actor",
    )  # fmt: skip
    """Stages without which no step of training is."""
    begins_by = "_get_gen_batch"
    """The call by which a step begins."""
    loop_at = ("fit", MODULE)
    """The method that calls the stages one after the other, and the module where verl's own is."""

    def __init__(self, trainer: Any, options: Options) -> None:
        self.trainer, self.options = trainer, options
        self.version: Version = version()
        self.patches = Patches()
        self._hooked: set[str] = set()
        self._lacking: list[str] = []
        """Calls that were not found on one of the places where they are looked up."""
        self.session: Session | None = None
        self.ranks: RankEvidence | None = None
        self.attached = self.running = self.validating = False
        self.loop = Loop(trainer, *self.loop_at)
        self.place = "prompts"
        self.joins = False
        """True between the rollout and the union that joins its responses to the prompts."""
        self.baselines: list[Any] = []
        self.carried: dict[str, Any] = {}
        """Tensors that a stage returned and that the batch does not hold yet."""
        self._entered = ""
        self._last: Any = None
        self._told: BaseException | None = None
        self._off: dict[str, str] = {}
        """Parts that failed while no session was open, with their error."""
        self._faults = Faults()
        self._steps = Steps()
        self._said: set[str] = set()
        """What was said and is not said again."""

    # -- hooks -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Hook into every call that is there."""
        self.attached = True
        trainer, wrap = self.trainer, self._wrap
        for name, (stage, where) in verl_v0.TRAINER.items():
            wrap(trainer, name, verl_v0.StageCall(self, name, stage, where))
        wrap(trainer, "_get_gen_batch", verl_v0.PromptsCall(self, "_get_gen_batch"))
        wrap(trainer, "_compute_reward_colocate",
             verl_v0.EnteringCall(self, "_compute_reward_colocate", "reward"))  # fmt: skip
        wrap(trainer, "_validate", verl_v0.ValidationCall(self, "_validate"))
        wrap(trainer, "init_workers", verl_v0.InitCall(self, "init_workers"))
        wrap(trainer, "fit", verl_v0.FitCall(self, "fit"))
        self._hook_loop()
        for module in self._modules():
            for name, (stage, where) in verl_v0.FUNCTIONS.items():
                wrap(module, name, verl_v0.StageCall(self, name, stage, where))
            wrap(module, "extract_reward", verl_v0.RewardCall(self, "extract_reward"))
            if self.options.metrics:
                wrap(module, "compute_data_metrics",
                     verl_v0.MetricsCall(self, "compute_data_metrics"))  # fmt: skip
            proto = getattr(module, "DataProto", None)
            if proto is not None and "union" in vars(proto):
                self.patches.wrap(proto, "union", verl_v0.UnionCall(self, "union"))
        self._hook_helpers()
        self.hook_managers()

    def _hook_loop(self) -> None:
        """Hook into verl's own loop, which another one may call, or another trainer may run."""
        if self.loop.home is not None:
            self.patches.wrap(self.loop.home, self.loop.name, LoopCall(self.loop, self.acting))

    def _hook_helpers(self) -> None:
        corrections = _imported(CORRECTION)
        if corrections is not None:
            for name, (stage, where) in verl_v0.CORRECTIONS.items():
                self._wrap(corrections, name, verl_v0.StageCall(self, name, stage, where))
            name = "compute_rollout_correction_and_add_to_batch"
            self._wrap(corrections, name, verl_v0.EnteringCall(self, name, "advantage"))
        self._hook_tracking()

    def _hook_tracking(self) -> None:
        tracking = getattr(_imported(TRACKING), "Tracking", None)
        if tracking is not None:
            self._wrap(tracking, "log", verl_v0.TrackingCall(self, "log"))

    def hook_managers(self) -> None:
        """Hook into the rollout and the checkpoint manager as soon as they exist."""
        for owner, name, call in (
            ("async_rollout_manager", "generate_sequences", verl_v0.RolloutCall),
            ("checkpoint_manager", "update_weights", verl_v0.SyncCall),
        ):
            manager = getattr(self.trainer, owner, None)
            if manager is not None:
                self.patches.wrap(manager, name, call(self, name), may_be_awaited=True)

    def _wrap(self, owner: Any, name: str, call: verl_v0.Call) -> None:
        if self.patches.wrap(owner, name, call):
            self._hooked.add(name)
        elif not hasattr(owner, name):
            self._lacking.append(name)

    @property
    def missing(self) -> list[str]:
        """Calls that are nowhere to be found, and whose stages stay unseen."""
        return [name for name in dict.fromkeys(self._lacking) if name not in self._hooked]

    def _modules(self) -> list[ModuleType]:
        """Modules on which ``fit`` looks functions up: that of the class, or of its bases."""
        names = [vars(cls)["fit"].__module__ for cls in type(self.trainer).__mro__
                 if "fit" in vars(cls)]  # fmt: skip
        return [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]

    def detach(self) -> None:
        """Restore every original; close what is open."""
        self.attached = False
        self.patches.undo()
        self.finish()

    def acting(self) -> bool:
        """True while this trainer, and no other one inside it, is at work."""
        at_work = self.running and self.attached and AT_WORK[-1:] == [self]
        return at_work and not self.loop.elsewhere

    # -- the run -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the session. The trainer is wholly set up by now."""
        options = self.options
        if not self.version.tried:
            log.warning(
                "verl %s is not one of the versions that attaching was tried with (0.7.1, 0.9.1): "
                "structure is checked, values are not.", self.version.number,
            )  # fmt: skip
            options = replace(options, level="off" if options.level == "off" else "shape")
        config = plain_config(getattr(self.trainer, "config", None))
        name = at(config, "trainer.experiment_name") or "run"
        self.session = Session(
            options, settings_of(self.trainer), experiment=f"verl-{name}", config=config
        )
        self.session.started(f"{type(self.trainer).__name__} of verl {self.version.number}")
        if options.workers and (self.session.folder is not None or not options.tables):
            self.ranks = RankEvidence(options, config)
            self.guarded("workers", self.ranks.start, None)
        self.hook_managers()
        self._told, self.running, self._steps = None, True, Steps()
        AT_WORK.append(self)

    def finish(self, error: BaseException | None = None, *, whole: bool = False) -> None:
        """Close tables and write the summary, with the error that ended the run, if one did.

        ``whole``: ``fit`` has returned, so every step that began was trained.
        """
        if self in AT_WORK:
            AT_WORK.remove(self)
        self.running = self.validating = False
        if self.ranks is not None:
            self.guarded("workers", self.ranks.finish, None)
            if self.session is not None:
                self.session.workers_cpu_s = self.ranks.cpu_s
            self.ranks = None
        session, self.session = self.session, None
        if session is not None:
            unseen: list[str] = []
            unseen = session.guarded("unseen", lambda: self._unseen(session, whole), unseen)
            more: dict[str, Any] = {
                "verl": self.version.number, "not_hooked": self.missing, "unseen": unseen
            }  # fmt: skip
            if error is not None:
                more["error"] = flight.brief(error)
            session.off = {**self._off, **session.off}
            session.guarded("finish", lambda: session.finish(more), None)
            self.closed = session

    def _unseen(self, session: Session, whole: bool) -> list[str]:
        config = plain_config(getattr(self.trainer, "config", None))
        wanted = set(self.options.stages or self.each_step)
        if at(config, "trainer.critic_warmup"):
            wanted.discard("update_actor")
        return self._steps.unseen(
            type(self.trainer).__name__, [s for s in self.each_step if s in wanted],
            session.observed, begins_by=self.begins_by, whole=whole,
            trains=not at(config, "trainer.val_only"),
        )  # fmt: skip

    closed: Session | None = None
    """The session of the last run that ended."""

    def guarded(self, name: str, work: Callable[[], T], default: T) -> T:
        """Run a part of ours so that its errors do not reach the trainer."""
        if self.session is not None:
            return self.session.guarded(name, work, default)
        if name in self._off:
            return default
        try:
            return work()
        except Exception as error:  # fail-open by design
            self._off[name] = flight.brief(error)
            if self._faults.are_news(error):
                log.error("DPA904 %s failed inside dataproto-audit; training goes on without it.",
                          name, exc_info=error)  # fmt: skip
            return default

    # -- what the calls report ---------------------------------------------------------------------

    @property
    def _open(self) -> Session:
        if self.session is None:
            raise InternalError("DPA904", "a stage was reported outside of a run.")
        return self.session

    def begin(self, prompts: Any) -> None:
        """A training step begins with these prompts."""
        self.joins, self.baselines, self.carried, self._entered = False, [], {}, ""
        self._begins_step()
        self.leave("prompts", prompts)

    def _begins_step(self) -> None:
        step = self._step()
        self._steps.began(step, looks=self.options.looks_at(step))
        self._open.open_step(step)

    def enter(self, stage: str, batch: Any) -> None:
        """``batch`` enters ``stage``; of several calls of one stage the first counts."""
        if self._entered == stage:
            return
        self._apart(stage)
        self.place = self._entered = stage
        self._open.boundary(stage, self._whole(batch), when="before")
        if self.ranks is not None:
            ranks, looks = self.ranks, self._open.wants(stage)
            self.guarded("workers", lambda: ranks.enter(stage, looks=looks), None)

    def leave(self, stage: str, batch: Any, metrics: Mapping[str, float] | None = None) -> None:
        """``batch`` leaves ``stage``, which measured ``metrics``."""
        if self._entered != stage:
            self._apart(stage)
        self.place, self._entered = stage, ""
        self._last = whole = self._whole(batch)
        evidence: dict[str, Any] = {"metrics": metrics} if metrics else {}
        if self.ranks is not None:
            ranks = self.ranks
            nothing: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
            told, fields = self.guarded("workers", lambda: ranks.leave(stage, whole), nothing)
            evidence |= told
            whole = merged(whole, None, fields) if fields else whole
            if stage == "update_critic":  # verl's batch never holds them, and the actor comes next
                self.carried = {**self.carried, **fields}
        self._open.boundary(stage, whole, evidence=evidence or None)

    def _apart(self, stage: str) -> None:
        """Compare nothing with the boundary before, where the loop is not verl's.

        But for the rollout, whose rows are laid beside the prompts that were handed out last.
        """
        sampled = stage == "rollout" and self.place == "prompts"
        if not self.loop.own or sampled or stage == "prompts":
            return
        self._open.auditor.unseen()
        self._say(f"{type(self.trainer).__name__} has a loop of its own: its stages are looked at "
                  "one by one, and not what happens between them.")  # fmt: skip

    def _say(self, text: str) -> None:
        """Tell once what cannot be looked at."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    def called(self, stage: str) -> None:
        """A call of ``stage`` is made; outside of a run an update says that it is not seen."""
        if stage == "update_actor" and not self.running and "fit" not in self._off:
            self._say(f"{type(self.trainer).__name__} trains outside of a fit that began after "
                      "attaching, and nothing of it is looked at: attach before fit.")  # fmt: skip

    def validated(self, batch: Any) -> None:
        """Scored responses to held-out prompts."""
        self._open.open_step(self._step())
        self._open.boundary("validation", batch)

    def synced(self) -> None:
        """Weights went to the engine."""
        self.place, self._entered = "sync_weights", ""
        self._open.open_step(self._step())
        self._open.boundary("sync_weights", None)

    def ended(self, step: Any, metrics: Mapping[str, Any]) -> None:
        """The trainer logs the metrics of a step, which is thereby over."""
        if isinstance(step, int):
            if "training/global_step" in metrics:
                self._steps.logged(looks=self.options.looks_at(step))
            self._open.close_step(step, metrics)

    def metrics(self) -> dict[str, float]:
        """Ours, for the trainer's metrics."""
        return self._open.metrics()

    def _step(self) -> int:
        return int(getattr(self.trainer, "global_steps", 0) or 0)

    def _whole(self, batch: Any) -> Any:
        """``batch`` with what is carried along for it."""
        if not self.carried or batch is None:
            return batch
        fields, _ = parts_of(batch)
        lacking = {name: value for name, value in self.carried.items() if name not in fields}
        return merged(batch, None, lacking) if lacking else batch

    def crashed(self, stage: str, batches: Mapping[str, Any], error: BaseException) -> None:
        """verl raised in ``stage``: keep its input, say what may be wrong; once for an error."""
        session = self.session
        known = self._told is error or isinstance(error, AuditError)
        if session is None or known or not isinstance(error, Exception):
            return
        self._told = error
        if self.options.flight_recorder:
            session.guarded("flight recorder", lambda: self._keep(session, stage, batches, error),
                            None)  # fmt: skip

    def _keep(
        self, session: Session, stage: str, batches: Mapping[str, Any], error: Exception
    ) -> None:
        at_hand = {name: batch for name, batch in batches.items() if batch is not None}
        if not at_hand and self._last is not None:
            at_hand = {"input": self._last}
        earlier = [f for f in session.auditor.findings if f.step == session.auditor.step]
        told = flight.diagnosis(stage, at_hand, session.settings, earlier)
        config = plain_config(getattr(self.trainer, "config", None))
        known = known_crash(self.version.number, stage, error, config)
        told = f"{known.rstrip('.')}; {told}" if known else told
        paths, folder = [], session.keeps_in()
        if folder is not None:
            paths = flight.keep(
                folder, self._step(), stage, at_hand, trace=session.trace,
                settings=session.settings,
            )  # fmt: skip
        kept = f" Its input is kept: {', '.join(map(str, paths))}." if paths else ""
        log.error("verl raised in %s of step %s: %s\nDiagnosis: %s.%s", stage, self._step(),
                  flight.brief(error), told, kept)  # fmt: skip


def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None
