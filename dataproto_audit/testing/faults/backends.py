"""Faults between two passes over the same tokens: engine and trainer, actor and reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dataproto_audit.testing.faults.logprobs import BOTH, ROLLOUT, _put
from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, objects, rows_of
from dataproto_audit.testing.toy_policy import extended, prompt_hash

COLD = ("cold", "cold_long")
SHIFTED_WEIGHTS = 0.5
"""Version of other weights: far enough to show, near enough to be the same model."""


@seeded("old_log_prob", *BOTH, cause="temperature_mismatch", where="start", bases=COLD,
        stages=("rollout",), origin=("B082",))  # fmt: skip
def trainer_ignores_temperature(scene: Scene) -> Truth:
    """Training log-probs come from unscaled logits although sampling uses a temperature."""
    run = scene.run
    run.policy, run.reference = (replace(p, temperature=1.0) for p in (run.policy, run.reference))
    return Truth("old_log_probs")


@seeded("ref_log_prob", "ref_log_prob", "old_log_probs", cause="temperature_mismatch",
        where="start", bases=COLD, options={"step": 1}, tuned=True)  # fmt: skip
def reference_ignores_temperature(scene: Scene) -> Truth:
    """Only the reference's logits are not divided by the temperature."""
    scene.run.reference = replace(scene.run.reference, temperature=1.0)
    return Truth("ref_log_prob")


@seeded("rollout", *ROLLOUT, cause="sampling_filter", where="start", stages=("old_log_prob",),
        origin=("B085",), tuned=True)  # fmt: skip
def filter_not_reported(scene: Scene) -> Truth:
    """The engine filters by top-p and renormalises, and nobody configured or reports it."""
    scene.run.engine = replace(scene.run.engine, top_p=0.8)
    return Truth("rollout_log_probs")


@seeded("rollout", "sampling.top_p", "sampling", *ROLLOUT,
        cause=("sampling_filter", "engine_setting"), where="sampling", stages=("old_log_prob",),
        origin=("B085",))  # fmt: skip
def other_top_p(sampling: dict[str, object]) -> dict[str, object]:
    """The engine is asked for a top-p that the configuration does not have."""
    return {**sampling, "top_p": 0.8}


@seeded("old_log_prob", *BOTH, cause="dropout_on", origin=("B088",), tuned=True)
def dropout_while_scoring(scene: Scene) -> Truth:
    """The actor scores in training mode: dropout scatters its log-probs to both sides."""
    old = scene.tensors["old_log_probs"]
    noise = torch.from_numpy(scene.random.normal(0.0, 0.4, old.shape)).float()
    return _put(scene, "old_log_probs", (old + noise).clamp(max=-1e-4), BOTH[1])


@seeded("ref_log_prob", "ref_log_prob", "old_log_probs", cause="dropout_on", options={"step": 1},
        origin=("B088",), tuned=True)  # fmt: skip
def dropout_in_the_reference(scene: Scene) -> Truth:
    """Dropout is active in the reference: at step 1 it scatters around the actor."""
    old = scene.tensors["ref_log_prob"]
    noise = torch.from_numpy(scene.random.normal(0.0, 0.8, old.shape)).float()
    return _put(scene, "ref_log_prob", (old + noise).clamp(max=-1e-4), "old_log_probs")


@seeded("ref_log_prob", "ref_log_prob", "old_log_probs", cause="reference_not_frozen",
        where="start", options={"step": 1})  # fmt: skip
def reference_of_another_checkpoint(scene: Scene) -> Truth:
    """The reference is not the checkpoint that the actor starts from."""
    scene.run.reference = scene.run.reference.at(SHIFTED_WEIGHTS)
    return Truth("ref_log_prob")


@seeded("ref_log_prob", "ref_log_prob", "actor/kl_loss", cause="reference_not_frozen",
        where="start", lasts=4, stages=("update_actor",), tuned=True)  # fmt: skip
def reference_follows_the_actor(scene: Scene) -> Truth:
    """The adapter is not switched off: the reference is the actor, and their KL stays 0."""
    scene.run.reference = scene.run.policy
    return Truth("ref_log_prob")


@seeded("old_log_prob", *ROLLOUT, cause="stale_rollout_weights", where="start",
        stages=("rollout", "sync_weights"), origin=("B115", "B121"))  # fmt: skip
def engine_holds_other_weights(scene: Scene) -> Truth:
    """The engine woke up with weights of long ago, as after a resume or a deep sleep."""
    scene.run.engine = scene.run.engine.at(scene.run.engine.version - SHIFTED_WEIGHTS)
    return Truth("rollout_log_probs")


def _other_weights(scene: Scene) -> torch.Tensor:
    """The engine's log-probs ``[rows, response]`` had it held other weights."""
    width = scene.tensors["prompts"].shape[1]
    used = scene.tensors["attention_mask"][:, :width].numpy() != 0
    hashes = prompt_hash(scene.tensors["prompts"].numpy(), used)
    policy = scene.run.engine.at(scene.run.engine.version - SHIFTED_WEIGHTS)
    made = torch.from_numpy(policy.score(hashes, scene.tensors["responses"].numpy())[0]).float()
    return torch.where(scene.trained(), made, 0.0)


@seeded("rollout", *ROLLOUT, "weight_version", cause=("stale_rollout_weights",
        "stale_prefix_cache"), stages=("old_log_prob",), origin=("B117",), tuned=True)  # fmt: skip
def rows_of_before_the_sync(scene: Scene) -> Truth:
    """Rows that finished around a sync are scored with cached prefixes of the old weights."""
    late = torch.arange(len(scene.batch)) >= len(scene.batch) // 2
    scene.arrays["weight_version"] = objects([5 - int(flag) for flag in late])
    old = scene.tensors["rollout_log_probs"]
    new = torch.where(late[:, None], _other_weights(scene), old)
    truth = _put(scene, "rollout_log_probs", new, "old_log_probs")
    return Truth(truth.field, truth.rows, also=(Truth("weight_version", truth.rows),))


@seeded("old_log_prob", *BOTH, "weight_version", "old_log_prob_version",
        cause="stale_rollout_weights", where="start", stages=("rollout", "update_actor"),
        origin=("B119",))  # fmt: skip
def old_policy_recomputed_with_new_weights(scene: Scene) -> Truth:
    """Old log-probs come from weights that generated nothing; nothing corrects for it."""
    scene.run.engine = scene.run.engine.at(scene.run.engine.version - 0.3)
    return Truth("old_log_probs")


@seeded("rollout", *ROLLOUT, cause=("row_outlier", "bad_row", "cross_row_leakage"),
        stages=("old_log_prob",), origin=("B080",), tuned=True)  # fmt: skip
def engine_wrong_on_one_row(scene: Scene) -> Truth:
    """The engine miscomputes a few prompts by several nats, which a mean hides."""
    new, rows = scene.tensors["rollout_log_probs"].clone(), scene.long(2)[3:4]
    new[rows] -= torch.where(scene.trained()[rows], 6.5, 0.0)
    return _put(scene, "rollout_log_probs", new, "old_log_probs")


@seeded("old_log_prob", *BOTH, cause="precision", origin=("B081",), tuned=True)
def autocast_around_one_token(scene: Scene) -> Truth:
    """A promise of exactly equal passes is broken by autocast around the log-probs."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(3)[-1:]
    new[rows, 2] -= 0.0231
    scene.meta["true_on_policy"] = 1
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", *BOTH, cause=("precision", "row_outlier"), origin=("B074",), tuned=True)
def scores_depend_on_padding(scene: Scene) -> Truth:
    """A kernel gives a long row other log-probs with padding than without."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(4)[:1]
    new[rows, :4] += torch.tensor([-0.02, -0.09, -0.03, -0.25])
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", *BOTH, cause=("row_outlier", "shift", "cross_row_leakage"),
        origin=("B060",), tuned=True)  # fmt: skip
def wrong_label_at_the_context_split(scene: Scene) -> Truth:
    """Labels are rolled after the context-parallel cut: the token at the cut has a wrong one."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(4)
    new[rows, 2] -= 6.0
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", *BOTH, cause=("shift", "row_outlier"), origin=("B064",), tuned=True)
def second_shard_scored_against_first_labels(scene: Scene) -> Truth:
    """Under sequence parallelism the second shard is scored against unsliced labels."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(4)
    wrong = torch.from_numpy(scene.random.uniform(-9.0, -5.0, new.shape)).float()
    new[rows, 3:] = torch.where(scene.trained()[rows, 3:], wrong[rows, 3:], new[rows, 3:])
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", *BOTH, cause="cross_row_leakage", tuned=True)
def packed_rows_attend_to_their_neighbours(scene: Scene) -> Truth:
    """Packed rows see the row before them in the pack, which attention does not cut off."""
    width, responses = scene.tensors["prompts"].shape[1], scene.tensors["responses"].numpy()
    used = scene.tensors["attention_mask"][:, :width].numpy() != 0
    prompts, attended = scene.tensors["prompts"].numpy(), scene.attended().numpy()
    hashes = prompt_hash(prompts, used)
    for row in range(1, len(hashes), 2):
        prefix = hashes[row - 1 : row]
        for token in responses[row - 1][attended[row - 1]]:
            prefix = extended(prefix, np.asarray([token]))
        for token in prompts[row][used[row]]:
            prefix = extended(prefix, np.asarray([token]))
        hashes[row] = prefix[0]
    scored = torch.from_numpy(scene.run.policy.score(hashes, responses)[0]).float()
    odd = (torch.arange(len(hashes)) % 2 == 1)[:, None] & scene.attended()
    truth = _put(scene, "old_log_probs", torch.where(odd, scored, scene.tensors["old_log_probs"]))
    rows = rows_of("old_log_probs", (odd & scene.trained()).any(1).numpy()).rows
    return Truth("old_log_probs", rows, truth.columns,
                 also=(Truth("rollout_log_probs", rows, truth.columns),))  # fmt: skip


@seeded("update_actor", "update_log_probs", "old_log_probs", "log_probs", "ratio",
        cause="precision", where="start", stages=("old_log_prob",), origin=("B076",),
        tuned=True)  # fmt: skip
def log_softmax_outside_autocast(scene: Scene) -> Truth:
    """The update takes its log-softmax in another precision: one offset everywhere."""
    scene.run.adjust["update_log_probs"] = lambda new: new.float() - 0.0125
    return Truth("update_log_probs")


@seeded("update_actor", "update_log_probs", "old_log_probs", "log_probs", "ratio",
        cause=("precision", "dropout_on"), where="start", stages=("old_log_prob",),
        origin=("B075",), tuned=True)  # fmt: skip
def some_rows_scored_otherwise(scene: Scene) -> Truth:
    """A few rows have another log-prob in the update than in the pass before it."""

    def adjusted(new: torch.Tensor) -> torch.Tensor:
        out = new.float().clone()
        out[2:5] -= 1.2e-3
        return out

    scene.run.adjust["update_log_probs"] = adjusted
    return Truth("update_log_probs")


@seeded("update_actor", "update_log_probs", "old_log_probs", "ratio", cause="dropout_on",
        where="start", origin=("B076",))  # fmt: skip
def dropout_in_the_update(scene: Scene) -> Truth:
    """Dropout is on in the update and off in the pass before it."""
    random = scene.random

    def adjusted(new: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(random.normal(0.0, 0.4, new.shape)).float()
        return (new.float() + noise).clamp(max=-1e-4)

    scene.run.adjust["update_log_probs"] = adjusted
    return Truth("update_log_probs")


@seeded("update_actor", "update_log_probs", "old_log_probs", "ratio", cause="row_permutation",
        where="start", bases=("plain", "long"), tuned=True)  # fmt: skip
def old_log_probs_of_other_rows_in_the_update(scene: Scene) -> Truth:
    """Micro-batches shuffle the new log-probs and not the old ones they are compared with."""
    scene.run.adjust["update_log_probs"] = lambda new: new.float().roll(1, 0)
    return Truth("update_log_probs")


@seeded("old_log_prob", "entropys", "entropy", "update_entropys", cause="temperature_mismatch",
        bases=COLD, stages=("update_actor",), origin=("B087",), tuned=True)  # fmt: skip
def entropy_before_the_temperature(scene: Scene) -> Truth:
    """Entropy is taken from the logits before they are divided by the temperature."""
    plain = replace(scene.run.policy, temperature=1.0)
    scene.tensors["entropys"] = scene.run.scored(scene.batch, plain)[1]
    return Truth("entropys")
