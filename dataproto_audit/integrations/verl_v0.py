"""Boundaries of verl's ``RayPPOTrainer``: which call is which stage, and what passes through it.

Its ``fit`` calls methods of the trainer, functions of its module and of the rollout correction, the
rollout manager and the checkpoint manager; each of these calls is a side of a stage. The batch
itself lives in a local variable of ``fit``, so a field that a stage returned but that ``fit``
stores only later (the scores) is carried along here until it is there.

Not covered: what happens inside the workers, and trainers with a loop of their own that renames
these calls; what was seen is counted in the summary.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from dataproto_audit.integrations.patches import Args, Kwargs
from dataproto_audit.integrations.verl_batches import (
    first,
    merged,
    metrics_of,
    parts_of,
    rows_of,
    sampled_part,
)

if TYPE_CHECKING:
    from dataproto_audit.integrations.verl_run import VerlRun

log = logging.getLogger("dataproto_audit")

Where = Literal["merged", "in place", "returned"]
"""Where the batch is after the call: input and result side by side, the input, or the result."""

TRAINER: dict[str, tuple[str, Where]] = {
    "_balance_batch": ("balance", "in place"),
    "_compute_old_log_prob": ("old_log_prob", "merged"),
    "_compute_ref_log_prob": ("ref_log_prob", "merged"),
    "_compute_values": ("values", "merged"),
    "_update_critic": ("update_critic", "in place"),
    "_update_actor": ("update_actor", "in place"),
}
FUNCTIONS: dict[str, tuple[str, Where]] = {
    "apply_kl_penalty": ("kl_reward", "returned"),
    "compute_advantage": ("advantage", "returned"),
}
CORRECTIONS: dict[str, tuple[str, Where]] = {"apply_bypass_mode": ("old_log_prob", "in place")}
"""Calls that are one stage each, by whom ``fit`` looks them up on."""


class Call:
    """Around one of verl's calls; subclasses say what it means. ``run`` guards what they do."""

    def __init__(self, run: VerlRun, name: str) -> None:
        self.run, self.name = run, name

    def on(self) -> bool:
        """True while the trainer of this run is the one at work."""
        return self.run.acting()

    def before(self, args: Args, kwargs: Kwargs) -> None:
        """Look at the input."""
        self.run.guarded(self.name, lambda: self.entering(args, kwargs), None)

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """Look at the result, which goes on to the caller as it is."""
        self.run.guarded(self.name, lambda: self.left(args, kwargs, result), None)
        return result

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """verl raised: keep the input."""
        self.run.crashed(self.place(), {"input": first(args, kwargs)}, error)

    def place(self) -> str:
        """The stage, for a report."""
        return self.run.place

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """What the call is about to do."""

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """What the call has done."""


class StageCall(Call):
    """A call that is one stage of the training step."""

    def __init__(self, run: VerlRun, name: str, stage: str, where: Where) -> None:
        super().__init__(run, name)
        self.stage, self.where = stage, where

    def on(self) -> bool:
        """Only in the training step."""
        self.run.called(self.stage)
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage that this call is."""
        return self.stage

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """The batch enters the stage."""
        self.run.enter(self.stage, first(args, kwargs))

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """The batch leaves the stage."""
        batch = first(args, kwargs)
        returned = result[0] if isinstance(result, tuple) else result
        if self.where == "merged":
            batch = merged(batch, returned)
        elif self.where == "returned":
            batch = returned
        self.run.leave(self.stage, batch, metrics_of(returned))


class PromptsCall(Call):
    """``_get_gen_batch(batch)``: the batch of the data loader with its uids, before it is split."""

    def on(self) -> bool:
        """Only in the training step."""
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage that this call is."""
        return "prompts"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """A step begins."""
        self.run.begin(first(args, kwargs))


class RolloutCall(Call):
    """``generate_sequences(batch)`` of the rollout manager, which ReMax uses twice, or for more."""

    def on(self) -> bool:
        """Only in the training step."""
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage that this call is."""
        return "rollout"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Repeated prompts enter."""
        batch = first(args, kwargs)
        if not self._greedy(batch):
            self.run.enter("rollout", sampled_part(batch, self._sampled(batch)))

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Responses leave."""
        batch = first(args, kwargs)
        if self._greedy(batch):
            self.run.baselines.append(result)
            return
        self.run.leave("rollout", sampled_part(result, self._sampled(batch)))
        self.run.joins = True

    def _greedy(self, batch: Any) -> bool:
        """True for the second call of ReMax."""
        if self.run.version.baseline != "second call":
            return False
        return getattr(batch, "meta_info", {}).get("do_sample") is False

    def _sampled(self, batch: Any) -> int | None:
        """Number of sampled rows where greedy ones follow behind them; None where all are."""
        flags = getattr(batch, "non_tensor_batch", {}).get("__do_sample__")
        return None if flags is None else sum(bool(flag) for flag in flags)


class UnionCall(Call):
    """``DataProto.union``: the first one with responses after the rollout joins prompts and them.

    In between ReMax of 0.7.1 joins its greedy rollout for a moment, and scores to that.
    """

    def on(self) -> bool:
        """Only in the training step."""
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage, where this is the union that joins prompts and responses."""
        return "union" if self.run.joins else self.run.place

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """Keep both sides."""
        sides = dict(zip(("left", "right"), (*args, *kwargs.values()), strict=False))
        self.run.crashed(self.place(), sides, error)

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Prompts and responses are one batch now."""
        right = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        if not self.run.joins or any(right is baseline for baseline in self.run.baselines):
            return
        if "responses" in parts_of(right)[0]:
            self.run.joins = False
            self.run.leave("union", result)


class RewardCall(Call):
    """``extract_reward(batch)``: in a step the stage ``reward``, in validation its last call."""

    def place(self) -> str:
        """The stage that this call belongs to."""
        return "validation" if self.run.validating else "reward"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Responses enter, unless a reward model has been asked for them already."""
        if not self.run.validating:
            self.run.enter("reward", first(args, kwargs))

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Scores leave beside the batch."""
        batch, (scores, extra) = first(args, kwargs), result
        known = {"token_level_scores": scores}
        if self.run.validating:
            self.run.validated(merged(batch, None, known))
            return
        self.run.carried = known
        self.run.leave("reward", merged(batch, None, known, rows_of(batch, extra)))


class EnteringCall(Call):
    """A call by which a stage begins and another one by which it ends."""

    def __init__(self, run: VerlRun, name: str, stage: str) -> None:
        super().__init__(run, name)
        self.stage = stage

    def on(self) -> bool:
        """Only in the training step, and not for the greedy rows that ReMax scores in between."""
        return super().on() and not self.run.validating and not self.run.joins

    def place(self) -> str:
        """The stage that begins."""
        return self.stage

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """The batch enters."""
        self.run.enter(self.stage, first(args, kwargs))


class SyncCall(Call):
    """``update_weights`` of the checkpoint manager. It carries no rows."""

    def on(self) -> bool:
        """Not where validation wakes the engine up again."""
        return super().on() and not self.run.validating

    def place(self) -> str:
        """The stage that this call is."""
        return "sync_weights"

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """Keep the last batch of the step: the call itself has none."""
        self.run.crashed(self.place(), {}, error)

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Weights were sent."""
        self.run.synced()


class ValidationCall(Call):
    """``_validate()``: its inner calls are no stages of the step."""

    def place(self) -> str:
        """The stage that this call is."""
        return "validation"

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Validation begins."""
        self.run.validating = True

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Validation is over."""
        self.run.validating = False

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """Validation is over, too."""
        self.run.validating = False
        self.run.crashed(self.place(), {}, error)


class MetricsCall(Call):
    """``compute_data_metrics(...)``: what it returns is merged into the metrics of the step."""

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """The same metrics and ours."""
        return self.run.guarded(self.name, lambda: {**result, **self.run.metrics()}, result)


class TrackingCall(Call):
    """``Tracking.log(data, step)``: the step is over and these are its metrics."""

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Close the step."""
        named = dict(zip(("self", "data", "step"), args, strict=False)) | dict(kwargs)
        self.run.ended(named.get("step"), named.get("data") or {})


class InitCall(Call):
    """``init_workers()`` makes the managers whose calls are stages."""

    def on(self) -> bool:
        """Always: it comes before ``fit``."""
        return True

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Hook into the managers."""
        self.run.hook_managers()


class FitCall(Call):
    """``fit()``: the run."""

    def on(self) -> bool:
        """Unless the run is going on already (a subclass calling ``super().fit()``)."""
        return not self.run.running

    def place(self) -> str:
        """Where the run was last."""
        return self.run.place

    def entering(self, args: Args, kwargs: Kwargs) -> None:
        """Open tables, begin."""
        self.run.start()

    def left(self, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Close everything."""
        self.run.finish(whole=True)

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """Something between the stages raised, or one of them did and has been kept already."""
        self.run.crashed(self.place(), {}, error)
        self.run.finish(error)
