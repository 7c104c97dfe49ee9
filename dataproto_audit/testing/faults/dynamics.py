"""Faults of the weight sync, and those that only several steps show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene

LEAD = 24
"""Healthy steps before a jump, so that there is a history to jump out of."""


@seeded("sync_weights", "weights", cause="stale_rollout_weights", where="before_sync")
def one_tensor_not_sent(weights: dict[str, Any], previous: dict[str, Any]) -> dict[str, Any]:
    """One tensor is left out of the transfer and keeps its old values."""
    return {**weights, "layer.2": previous["layer.2"]}


@seeded("sync_weights", "weights", cause="tied_head_not_updated")
def tied_head_stays(scene: Scene) -> Truth:
    """The engine's output layer is a repacked copy of the embedding and is not made again."""
    sample = scene.boundary.evidence["sync_probe"]
    scene.tell(
        engine_stale=["lm_head.weight"],
        sync_probe={**sample, "engine": sample["engine"] - 0.4},
    )
    return Truth("weights")


@seeded(
    "sync_weights",
    "weights",
    cause=("stale_prefix_cache", "tied_head_not_updated"),
    origin=("B117",),
)
def prefix_cache_survives(scene: Scene) -> Truth:
    """Weights arrive, and the engine still answers from its prefix cache."""
    sample = scene.boundary.evidence["sync_probe"]
    scene.tell(sync_probe={**sample, "engine": sample["engine"] - 0.4})
    return Truth("weights")


def _metric(scene: Scene, name: str, value: float) -> Truth:
    scene.tell(metrics={**scene.boundary.evidence["metrics"], name: value})
    return Truth(name)


@seeded("update_actor", "actor/grad_norm", "metrics", cause=("bad_row", "learning_rate_too_high"),
        lead=LEAD, bases=("plain",))  # fmt: skip
def gradient_spike(scene: Scene) -> Truth:
    """One bad row makes the gradient norm jump a hundredfold."""
    return _metric(scene, "actor/grad_norm", 60.0)


@seeded(
    "update_actor", "actor/grad_norm", "metrics", cause=("non_finite", "bad_row"), origin=("B091",)
)
def gradient_is_nan(scene: Scene) -> Truth:
    """The backward pass overflows: the gradient norm is NaN."""
    return _metric(scene, "actor/grad_norm", float("nan"))


@seeded("update_actor", "actor/ppo_kl", "metrics", cause=("learning_rate_too_high", "bad_row"),
        where="start", lead=LEAD, bases=("drifting",))  # fmt: skip
def policy_moves_too_far(scene: Scene) -> Truth:
    """The learning rate jumps: later mini-batches see a policy far from the old one."""
    scene.run.options = replace(scene.run.options, update_drift=6.0)
    return Truth("actor/ppo_kl")


@seeded("update_actor", "actor/kl_loss", "metrics", cause=("learning_rate_too_high", "bad_row"),
        where="start", lead=LEAD, bases=("plain",))  # fmt: skip
def reference_left_behind(scene: Scene) -> Truth:
    """One update carries the policy away from the reference: their KL jumps."""
    run = scene.run
    far = run.policy.version + 4.0
    run.policy, run.engine = run.policy.at(far), run.engine.at(far)
    return Truth("actor/kl_loss")


@seeded("old_log_prob", "actor/entropy", "entropys", "entropy", cause="policy_collapse",
        where="start", lead=LEAD, lasts=10, stages=("update_actor",),
        bases=("entropy",), tuned=True)  # fmt: skip
def entropy_collapses(scene: Scene) -> Truth:
    """Step by step the policy becomes deterministic."""
    run = scene.run
    sharp = run.policy.spread * 1.6 ** (scene.turn + 1)
    run.policy, run.engine = replace(run.policy, spread=sharp), replace(run.engine, spread=sharp)
    return Truth("actor/entropy")


@seeded("old_log_prob", "rollout_log_probs", "old_log_probs", cause=("backend_drift",
        "precision"), where="start", lead=LEAD, lasts=12, stages=("rollout",),
        bases=("half_still",), origin=("B122",))  # fmt: skip
def backends_drift_apart(scene: Scene) -> Truth:
    """The gap between engine and trainer grows although nothing is learnt."""
    scene.run.noise_scale = 1.0 + 0.35 * (scene.turn + 1)
    return Truth("rollout_log_probs")


@seeded("old_log_prob", "rollout_log_probs", "old_log_probs", cause="stale_rollout_weights",
        where="start", lead=LEAD, lasts=8, stages=("rollout", "sync_weights"), bases=("half",),
        origin=("B115", "B118"))  # fmt: skip
def weights_never_sent_again(scene: Scene) -> Truth:
    """From one step on the push of weights is skipped: the engine stays where it was."""
    scene.run.engine = scene.run.engine.at(scene.run.engine.version - 0.1 * (scene.turn + 1))
    return Truth("rollout_log_probs")


@seeded("update_actor", "ratio", "clipfrac", "ppo_kl", "actor/ppo_kl", "update_log_probs",
        cause=("ratio_always_one", "old_recomputed_each_epoch"), where="start", lasts=4,
        bases=("recorded",), origin=("B120",))  # fmt: skip
def ratio_of_a_tensor_with_itself(scene: Scene) -> Truth:
    """The ratio is built from the new log-probs and their own copy: it is 1 for ever."""
    run = scene.run
    run.options = replace(run.options, update_drift=0.0)
    first: list[torch.Tensor] = []
    scored = run.scored

    def same(batch: Any, policy: Any) -> Any:
        made = scored(batch, policy)
        if policy is run.policy and not first:
            first.append(made[0])
        return (first[0] if policy.version == run.policy.version else made[0]), made[1]

    run.scored = same
    return Truth("ratio")
