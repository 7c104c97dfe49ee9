"""Faults of log-probs that one field of one batch shows: places, values, kinds of number."""

from __future__ import annotations

import numpy as np
import torch

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells, moved

BOTH = ("old_log_probs", "rollout_log_probs")
ROLLOUT = ("rollout_log_probs", "old_log_probs")
NAN = float("nan")


def _put(scene: Scene, name: str, new: torch.Tensor, *others: str) -> Truth:
    """Write a log-prob field; the cells are named by whichever of the two fields is blamed."""
    old, trained = scene.tensors[name], scene.trained()
    truth = scene.put(name, new.to(old.dtype), within=trained)
    # Whether a cell that moved by less than passes differ by is wrong is a matter of tolerance.
    for least in (1e-3, 2e-3, 5e-3):
        truth.also += (cells(name, ~((new - old).abs() <= least) & trained & (new != old)),)
    truth.also += tuple(Truth(other, truth.rows, truth.columns) for other in others)
    return truth


@seeded("old_log_prob", *BOTH, cause="shift")
def old_one_column_early(scene: Scene) -> Truth:
    """Old log-probs one column early: column t holds the log-prob of token t + 1."""
    return _put(scene, "old_log_probs", moved(scene.tensors["old_log_probs"], -1), BOTH[1])


@seeded("old_log_prob", *BOTH, cause="shift")
def old_two_columns_late(scene: Scene) -> Truth:
    """Labels and logits were both shifted: old log-probs are two columns late."""
    return _put(scene, "old_log_probs", moved(scene.tensors["old_log_probs"], 2), BOTH[1])


@seeded("ref_log_prob", "ref_log_prob", cause="shift", options={"step": 1})
def reference_one_column_late(scene: Scene) -> Truth:
    """The reference's path slices its logits one column late."""
    return _put(scene, "ref_log_prob", moved(scene.tensors["ref_log_prob"], 1))


@seeded("ref_log_prob", "ref_log_prob", cause="shift", bases=("long",), tuned=True,
        options={"step": 12})  # fmt: skip
def reference_late_after_the_policy_moved(scene: Scene) -> Truth:
    """The same when nothing is equal any more."""
    return _put(scene, "ref_log_prob", moved(scene.tensors["ref_log_prob"], 1))


@seeded("ref_log_prob", "ref_log_prob", cause="row_permutation", bases=("long",), tuned=True,
        options={"step": 12})  # fmt: skip
def reference_rows_exchanged_after_the_policy_moved(scene: Scene) -> Truth:
    """Two rows of a dynamic micro-batch change places when the order is undone."""
    new = scene.tensors["ref_log_prob"].clone()
    rows = scene.long(16)[[0, -1]]
    new[rows] = new[rows.flip(0)]
    return _put(scene, "ref_log_prob", new)


@seeded("old_log_prob", *BOTH, cause="shift", bases=("tools", "long"), tuned=True)
def some_rows_shifted(scene: Scene) -> Truth:
    """Rows of one worker, which pads its sequences, come back one column late."""
    old = scene.tensors["old_log_probs"]
    half = (torch.arange(len(old)) < len(old) // 2)[:, None]
    return _put(scene, "old_log_probs", torch.where(half, moved(old, 1), old), BOTH[1])


@seeded("rollout", *ROLLOUT, cause=("shift", "placeholder_log_prob"), stages=("old_log_prob",),
        origin=("B071",), tuned=True)  # fmt: skip
def sampled_list_too_short(scene: Scene) -> Truth:
    """The engine's list misses its first value; the tail is filled with 0.0."""
    return _put(scene, "rollout_log_probs", moved(scene.tensors["rollout_log_probs"], -1),
                "old_log_probs")  # fmt: skip


@seeded("rollout", *ROLLOUT, cause=("placeholder_log_prob", "positive_log_prob"),
        stages=("old_log_prob",), origin=("B024",), tuned=True)  # fmt: skip
def placeholder_for_the_stop_token(scene: Scene) -> Truth:
    """The stop token is appended with log-prob 0.0 and stays trainable."""
    new, rows = scene.tensors["rollout_log_probs"].clone(), scene.short()
    new[rows, scene.lengths()[rows] - 1] = 0.0
    return _put(scene, "rollout_log_probs", new, "old_log_probs")


@seeded("rollout", *ROLLOUT, cause="shift", stages=("old_log_prob",), bases=("tools",
        "critic_tools"), tuned=True)  # fmt: skip
def turns_joined_without_gaps(scene: Scene) -> Truth:
    """Log-probs of several turns are joined without the tool tokens between them."""
    old, mask = scene.tensors["rollout_log_probs"], scene.trained()
    new = torch.zeros_like(old)
    for row in range(len(old)):
        values = old[row][mask[row]]
        new[row, : len(values)] = values
    changed = cells("rollout_log_probs", (new != old) & mask)
    scene.tensors["rollout_log_probs"] = new
    everywhere = cells("rollout_log_probs", new != old)
    changed.also = (everywhere, Truth("old_log_probs", changed.rows, changed.columns))
    return changed


@seeded("old_log_prob", *BOTH, cause=("row_outlier", "shift", "cross_row_leakage"),
        origin=("B058",), tuned=True)  # fmt: skip
def label_of_the_next_sequence(scene: Scene) -> Truth:
    """Labels are rolled over the packed ids: each last token is scored as the next row's first."""
    new, last = scene.tensors["old_log_probs"].clone(), scene.lengths() - 1
    rows = torch.arange(len(new))
    new[rows, last] -= torch.from_numpy(scene.random.uniform(2.0, 7.0, len(new))).float()
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", *BOTH, cause="row_permutation", tuned=True)
def dynamic_batch_order_kept(scene: Scene) -> Truth:
    """Rows come back in the order of the micro-batches and are not put back."""
    order = torch.argsort(scene.lengths(), descending=True, stable=True)
    return _put(scene, "old_log_probs", scene.tensors["old_log_probs"][order], BOTH[1])


@seeded("values", "values", cause=("row_permutation", "mask_hole"),
        bases=("critic", "critic_tools"), origin=("B069",))  # fmt: skip
def values_masked_by_other_rows(scene: Scene) -> Truth:
    """Values are in order again, the mask they are multiplied with is not."""
    mask = torch.roll(scene.trained(), 1, 0)
    return scene.put("values", scene.tensors["values"] * mask, within=scene.trained())


@seeded("rollout", *ROLLOUT, cause="temperature_mismatch", stages=("old_log_prob",),
        bases=("cold", "cold_long"), origin=("B084",))  # fmt: skip
def divided_after_the_softmax(scene: Scene) -> Truth:
    """Sampled log-probs are divided by the temperature instead of the logits."""
    old = scene.tensors["rollout_log_probs"]
    new = scene.run.engine.temperature**-1 * old
    return _put(scene, "rollout_log_probs", new, "old_log_probs")


@seeded("old_log_prob", "old_log_probs", cause=("non_finite", "sampling_filter"), origin=("B086",))
def filtered_in_training(scene: Scene) -> Truth:
    """The trainer filters the vocabulary again, and a sampled token falls out: -inf."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(2)[:1]
    new[rows, 1] = -torch.inf
    return _put(scene, "old_log_probs", new)


@seeded("ref_log_prob", "ref_log_prob", cause="non_finite")
def reference_overflows(scene: Scene) -> Truth:
    """The half-precision reference overflows on one row: NaN."""
    new, rows = scene.tensors["ref_log_prob"].clone(), scene.long(2)[1:2]
    new[rows] = torch.where(scene.trained()[rows], NAN, new[rows])
    return _put(scene, "ref_log_prob", new)


@seeded("rollout", "rollout_log_probs", cause="non_finite")
def engine_returns_none(scene: Scene) -> Truth:
    """The engine has no log-prob for the last token of a row, and None becomes NaN."""
    new, rows = scene.tensors["rollout_log_probs"].clone(), scene.long(2)[-2:]
    new[rows, scene.lengths()[rows] - 1] = NAN
    return _put(scene, "rollout_log_probs", new)


@seeded("old_log_prob", "old_log_probs", cause="non_finite", origin=("B093",))
def nan_on_padding(scene: Scene) -> Truth:
    """A padding slot holds NaN, which multiplying by the mask does not remove."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.short()[:1]
    new[rows, -1] = NAN
    scene.tensors["old_log_probs"] = new
    return cells("old_log_probs", new.isnan())


@seeded("old_log_prob", "old_log_probs", cause=("positive_log_prob", "wrong_sign"))
def negated(scene: Scene) -> Truth:
    """The cross-entropy is stored without its minus sign."""
    return _put(scene, "old_log_probs", -scene.tensors["old_log_probs"])


@seeded("rollout", *ROLLOUT, cause="positive_log_prob", stages=("old_log_prob",))
def probabilities(scene: Scene) -> Truth:
    """The engine's probabilities are stored instead of their logarithms."""
    old = scene.tensors["rollout_log_probs"]
    return _put(scene, "rollout_log_probs", torch.where(scene.trained(), old.exp(), 0.0))


@seeded("old_log_prob", *BOTH, cause="positive_log_prob")
def logits_of_the_label(scene: Scene) -> Truth:
    """The label's logit is stored, the normalisation is missing."""
    old, random = scene.tensors["old_log_probs"], scene.random
    norm = torch.from_numpy(random.uniform(2.5, 4.5, old.shape)).to(old.dtype)
    new = torch.where(scene.trained(), old + norm, old)
    truth = _put(scene, "old_log_probs", new, BOTH[1])
    above = cells("old_log_probs", (new > 0) & scene.trained())
    truth.also = (*truth.also, above)
    return truth


@seeded("rollout", *ROLLOUT, cause=("sum_not_per_token", "positive_log_prob"),
        stages=("old_log_prob",), tuned=True)  # fmt: skip
def sequence_sum_on_every_token(scene: Scene) -> Truth:
    """Each token carries the log-prob of its whole response."""
    old, mask = scene.tensors["rollout_log_probs"], scene.trained()
    total = (old * mask).sum(1, keepdim=True)
    return _put(scene, "rollout_log_probs", torch.where(mask, total, 0.0), "old_log_probs")


@seeded("old_log_prob", *BOTH, cause=("placeholder_log_prob", "positive_log_prob",
        "field_forgotten"), tuned=True)  # fmt: skip
def micro_batch_not_filled(scene: Scene) -> Truth:
    """The last micro-batch is never written into the output buffer: zeros."""
    new = scene.tensors["old_log_probs"].clone()
    new[-3:] = 0.0
    return _put(scene, "old_log_probs", new, BOTH[1])


@seeded("old_log_prob", "old_log_probs", "ref_log_prob", "rollout_log_probs",
        cause=("non_finite", "bad_row", "row_outlier"), stages=("ref_log_prob",
        "update_actor"), origin=("B091",), tuned=True)  # fmt: skip
def one_token_nearly_impossible(scene: Scene) -> Truth:
    """Actor and reference are so far apart on one token that the KL overflows."""
    new, rows = scene.tensors["old_log_probs"].clone(), scene.long(3)[:1]
    new[rows, 2] = -96.0
    return _put(scene, "old_log_probs", new, "ref_log_prob", "rollout_log_probs")


@seeded("rollout", *ROLLOUT, cause=("non_finite", "bad_row", "row_outlier"),
        stages=("old_log_prob", "update_actor"), origin=("B092",), tuned=True)  # fmt: skip
def ratio_overflows(scene: Scene) -> Truth:
    """One stale log-prob makes the importance ratio overflow."""
    new, rows = scene.tensors["rollout_log_probs"].clone(), scene.long(2)[2:3]
    new[rows, 1] = -101.0
    return _put(scene, "rollout_log_probs", new, "old_log_probs")


@seeded("old_log_prob", "entropys", cause=("wrong_sign", "non_finite", "positive_log_prob"),
        tuned=True)  # fmt: skip
def entropy_negated(scene: Scene) -> Truth:
    """Entropy is the sum of p log p without its minus sign."""
    new = -scene.tensors["entropys"]
    return scene.put("entropys", new, within=scene.trained())


@seeded("old_log_prob", "entropys", cause=("temperature_mismatch", "wrong_normaliser"))
def entropy_summed_over_shards(scene: Scene) -> Truth:
    """Every vocabulary shard adds its own softmax's entropy: it exceeds log of the vocabulary."""
    new = scene.tensors["entropys"] * 4.0
    limit = float(np.log(scene.options.vocab))
    truth = scene.put("entropys", new, within=scene.trained())
    truth.also = (cells("entropys", (new > limit) & scene.trained()),)
    return truth


@seeded("old_log_prob", "old_log_probs", "rollout_log_probs", cause=("precision", "wrong_dtype"),
        levels=("fail", "warn", "info"))  # fmt: skip
def half_precision_pass(scene: Scene) -> Truth:
    """The log-prob pass runs in bfloat16 although float32 is configured."""
    old = scene.tensors["old_log_probs"]
    noise = torch.from_numpy(scene.random.normal(0.0, 0.01, old.shape)).float()
    new = torch.where(scene.trained(), (old + noise).clamp(max=0.0), old)
    scene.tensors["old_log_probs"] = new.bfloat16()
    return Truth("old_log_probs")
