"""Faults of group-relative advantages and of what is shared by all estimators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.testing.faults.registry import DEFAULT_BASES, Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells

ADV = ("advantages", "returns")
RULE = "wrong_group_normalisation"
CLOSE = 2e-3
"""Differences below this are no difference that anyone would call wrong."""


def spread(scene: Scene, per_row: Tensor) -> Truth:
    """Write one advantage per row on its trained tokens, returns alike."""
    return written(scene, torch.where(scene.trained(), per_row[:, None], 0.0).float())


def written(scene: Scene, new: Tensor) -> Truth:
    """Write advantages and returns; the truth is the trained cells that moved."""
    old = scene.tensors["advantages"]
    scene.tensors["advantages"] = new
    scene.tensors["returns"] = new.clone()
    moved = ((new - old).abs() > CLOSE) | (new.isnan() != old.isnan())
    return cells("advantages", moved)


def _scores(scene: Scene) -> Tensor:
    total: Tensor = scene.tensors["token_level_rewards"].double().sum(1)
    return total


def _groups(scene: Scene) -> list[Tensor]:
    uid = scene.arrays["uid"]
    return [torch.from_numpy(np.flatnonzero(uid == one)) for one in dict.fromkeys(uid.tolist())]


def grouped(scene: Scene, groups: list[Tensor], *, std: str = "unbiased") -> Tensor:
    """(S - mean) / std over ``groups`` of rows."""
    scores = _scores(scene)
    out = torch.zeros_like(scores)
    for rows in groups:
        own = scores[rows]
        scale = {"unbiased": own.std(unbiased=True), "population": own.std(unbiased=False),
                 "batch": scores.std(), "none": torch.tensor(1.0)}[std]  # fmt: skip
        out[rows] = (own - own.mean()) / (scale + (0.0 if std == "none" else 1e-6))
    return out


def _own(scene: Scene) -> Tensor:
    """The advantage of each row as it is."""
    on, values = scene.trained(), scene.tensors["advantages"].double()
    return torch.where(on, values, 0.0).sum(1) / on.sum(1).clamp(min=1)


def _constant_group(scene: Scene) -> Tensor:
    """The first group in which all scores are equal."""
    scores = _scores(scene)
    return next(rows for rows in _groups(scene) if len(set(scores[rows].tolist())) == 1)


def _strides(scene: Scene) -> list[Tensor]:
    rows = torch.arange(len(scene.batch))
    return list(rows.reshape(-1, scene.options.n))


@seeded("advantage", *ADV, "uid", cause=("tiled_groups", RULE, "row_permutation"),
        bases=("plain", "long"), origin=("B045", "B046"))  # fmt: skip
def grouped_by_stride(scene: Scene) -> Truth:
    """Groups are n consecutive rows, although balancing has reordered the batch."""
    return spread(scene, grouped(scene, _strides(scene)))


@seeded("advantage", *ADV, cause=RULE, origin=("B047",), tuned=True)
def centred_on_the_batch(scene: Scene) -> Truth:
    """A fallback view makes one group of the whole batch."""
    return spread(scene, grouped(scene, [torch.arange(len(scene.batch))]))


@seeded("advantage", *ADV, cause=("row_permutation", "tiled_groups"))
def advantages_one_row_late(scene: Scene) -> Truth:
    """Advantages are computed in another row order than the batch's."""
    per_row = torch.roll(grouped(scene, _groups(scene)), 1)
    return spread(scene, per_row)


@seeded("advantage", *ADV, cause=RULE)
def population_std(scene: Scene) -> Truth:
    """The group's population std is used instead of the unbiased one."""
    return spread(scene, grouped(scene, _groups(scene), std="population"))


@seeded("advantage", *ADV, cause=RULE)
def not_divided_by_std(scene: Scene) -> Truth:
    """Advantages are centred and not divided by the std, although configured."""
    return spread(scene, grouped(scene, _groups(scene), std="none"))


@seeded("advantage", *ADV, cause=RULE, bases=("no_std",))
def divided_by_std(scene: Scene) -> Truth:
    """Advantages are divided by the std, although that is switched off."""
    return spread(scene, grouped(scene, _groups(scene)))


@seeded("advantage", *ADV, cause=RULE, tuned=True)
def divided_by_batch_std(scene: Scene) -> Truth:
    """The mean is the group's, the std is the whole batch's."""
    return spread(scene, grouped(scene, _groups(scene), std="batch"))


@seeded("advantage", *ADV, cause=(RULE, "wrong_sign"), tuned=True)
def sign_flipped(scene: Scene) -> Truth:
    """The baseline less the score: good answers are punished."""
    return written(scene, -scene.tensors["advantages"])


@seeded("advantage", "advantages", cause="advantage_off_mask", origin=("B103",))
def advantages_on_padding(scene: Scene) -> Truth:
    """Advantages are spread over the padded row instead of over the trained tokens."""
    per_row = grouped(scene, _groups(scene)).float()
    old = scene.tensors["advantages"]
    new = per_row[:, None].expand_as(old).clone()
    return scene.put("advantages", new, within=~scene.trained())


@seeded("advantage", "advantages", cause="advantage_off_mask", stages=("values",),
        origin=("B042",))  # fmt: skip
def advantage_one_past_the_end(scene: Scene) -> Truth:
    """The end index is one too high: one advantage survives after the stop token."""
    new, rows, lengths = scene.tensors["advantages"].clone(), scene.short(), scene.lengths()
    rows = rows[new[rows, 0] != 0]
    new[rows, lengths[rows]] = new[rows, 0]
    return scene.put("advantages", new)


@seeded("advantage", *ADV, cause=(RULE, "non_finite"), origin=("B050",),
        bases=DEFAULT_BASES, tuned=True)  # fmt: skip
def noise_divided_by_its_std(scene: Scene) -> Truth:
    """A constant group's std is rounding noise, and dividing by it makes order-one values."""
    rewards = scene.tensors["token_level_rewards"].clone()
    rows = _constant_group(scene)
    last = scene.lengths() - 1
    rewards[rows[-1], last[rows[-1]]] -= 1e-7
    scene.tensors["token_level_rewards"] = rewards
    scores = _scores(scene)[rows]
    per_row = _own(scene)
    per_row[rows] = (scores - scores.mean()) / scores.std()
    return spread(scene, per_row)


@seeded("advantage", *ADV, cause=("zero_advantage", RULE), origin=("B049",), bases=("rloo_single",),
        tuned=True)  # fmt: skip
def zero_in_groups_of_one(scene: Scene) -> Truth:
    """The vectorised estimator gives groups of one row 0: nothing is learnt."""
    return spread(scene, torch.zeros(len(scene.batch)))


@seeded("advantage", *ADV, cause="non_finite", bases=DEFAULT_BASES, tuned=True)
def constant_group_without_eps(scene: Scene) -> Truth:
    """A group whose rewards are all equal is divided by a std of 0."""
    per_row = _own(scene)
    per_row[_constant_group(scene)] = float("nan")
    return spread(scene, per_row)


@seeded("advantage", *ADV, cause=RULE, origin=("B043",), tuned=True)
def baseline_of_other_rewards(scene: Scene) -> Truth:
    """Length-corrected rewards are compared with the mean of the uncorrected ones."""
    scores, out = _scores(scene), torch.zeros(len(scene.batch), dtype=torch.float64)
    corrected = scores * (1.0 - 0.05 * scene.lengths())
    for rows in _groups(scene):
        out[rows] = (corrected[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
    return spread(scene, out)


@seeded("advantage", *ADV, cause=RULE, bases=("passk",), origin=("B053",), tuned=True)
def other_rows_keep_their_score(scene: Scene) -> Truth:
    """Pass@k: only the best row should have an advantage, the others keep their scores."""
    per_row = _own(scene)
    return spread(scene, torch.where(per_row == 0, _scores(scene) + 0.25, per_row))


@seeded("advantage", *ADV, cause=RULE, bases=("rloo",))
def baseline_includes_the_row(scene: Scene) -> Truth:
    """Leave-one-out with the row itself left in: advantages are too small by (n - 1) / n."""
    return spread(scene, grouped(scene, _groups(scene), std="none"))


@seeded("advantage", *ADV, cause=(RULE, "field_forgotten"), bases=("remax",),
        tuned=True)  # fmt: skip
def greedy_baseline_not_subtracted(scene: Scene) -> Truth:
    """ReMax without its baseline: advantages are returns."""
    old = scene.tensors["advantages"]
    scene.tensors["advantages"] = scene.tensors["returns"].clone()
    return cells("advantages", (scene.tensors["advantages"] - old).abs() > CLOSE)


@seeded("advantage", *ADV, cause=("wrong_whitening", RULE), bases=("rpp_baseline",),
        tuned=True)  # fmt: skip
def not_whitened(scene: Scene) -> Truth:
    """REINFORCE++ with a baseline, centred by group and not whitened over the batch."""
    return spread(scene, grouped(scene, _groups(scene), std="none"))


@seeded("advantage", "rollout_is_weights", cause=("is_weights_inverted", "wrong_sign"),
        bases=("corrected_stale",), tuned=True)  # fmt: skip
def importance_weights_inverted(scene: Scene) -> Truth:
    """Weights are rollout over old instead of old over rollout."""
    old = scene.tensors["rollout_is_weights"]
    new = torch.where(old > 0, 1.0 / old.clamp(min=1e-3), 0.0)
    return scene.put("rollout_is_weights", new)
