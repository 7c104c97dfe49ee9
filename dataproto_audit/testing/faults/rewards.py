"""Faults of rewards: where they sit, what they carry, the KL inside them."""

from __future__ import annotations

import torch

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells, objects, rows_of

SCORES = ("token_level_scores", "token_level_rewards")
WITH_KL = ("kl_reward", "kl_reward_tools")


def _rows(truth: Truth) -> Truth:
    """Only the rows of it: the row's sum is wrong, and not where it sits."""
    return Truth(truth.field, truth.rows)


def _placed(scene: Scene, rows: torch.Tensor, column: torch.Tensor) -> Truth:
    """Move the scores of ``rows`` to ``column``; both the old and the new cell may be named."""
    old = scene.tensors["token_level_scores"]
    rows = rows[old[rows].sum(1) != 0]
    new = old.clone()
    new[rows] = 0.0
    new[rows, column[rows]] = old[rows].sum(1)
    scene.tensors["token_level_scores"] = new
    truth = cells("token_level_scores", (new != 0) & (old == 0))
    truth.also = (cells("token_level_scores", new != old),)
    return truth


@seeded("reward", *SCORES, cause=("reward_on_padding", "reward_shifted"), origin=("B039",))
def reward_one_past_the_end(scene: Scene) -> Truth:
    """The reward's index is the length instead of the length less one: the first pad."""
    lengths = scene.lengths()
    short = torch.nonzero(lengths < scene.attended().shape[1]).squeeze(1)
    return _placed(scene, short, lengths)


@seeded("reward", *SCORES, cause="reward_shifted")
def reward_before_the_stop_token(scene: Scene) -> Truth:
    """The reward sits on the last content token, one before the stop token."""
    lengths = scene.lengths()
    return _placed(scene, torch.nonzero(lengths > 1).squeeze(1), lengths - 2)


@seeded("reward", *SCORES, cause="reward_on_padding", bases=("aborted",),
        origin=("B037", "B038"))  # fmt: skip
def reward_of_an_empty_response(scene: Scene) -> Truth:
    """An aborted response has length 0, so its reward lands on column -1 and moves its group."""
    new = scene.tensors["token_level_scores"].clone()
    rows = torch.nonzero(scene.lengths() == 0).squeeze(1)
    new[rows, -1] = 0.9
    scores = scene.arrays["score"].copy()
    scores[rows.numpy()] = 0.9
    scene.arrays["score"] = scores
    return scene.put("token_level_scores", new)


@seeded("reward", *SCORES, cause=("reward_shifted", "reward_on_padding", "mask_on_tool"),
        bases=("critic_tools", "rpp_tools"), origin=("B101",))  # fmt: skip
def reward_on_a_tool_token(scene: Scene) -> Truth:
    """The reward sits on a tool's token, which the estimator masks away."""
    tool = scene.attended() & ~scene.trained()
    rows = torch.nonzero(tool.any(1)).squeeze(1)
    return _placed(scene, rows, tool.int().argmax(1))


@seeded("reward", *SCORES, cause=("reward_on_every_token", "reward_shifted"),
        tuned=True)  # fmt: skip
def reward_on_every_token(scene: Scene) -> Truth:
    """The scalar score is broadcast over all tokens of the response."""
    old = scene.tensors["token_level_scores"]
    new = torch.where(scene.attended(), old.sum(1, keepdim=True), 0.0)
    return scene.put("token_level_scores", new)


@seeded("reward", *SCORES, cause=("reward_lost", "broadcast_reward", "reward_rows_shifted"),
        origin=("B013",))  # fmt: skip
def one_score_for_the_batch(scene: Scene) -> Truth:
    """The reward function returned one value, and it was broadcast to all rows."""
    old = scene.tensors["token_level_scores"]
    last = torch.zeros_like(old, dtype=torch.bool)
    last[torch.arange(len(old)), scene.lengths() - 1] = True
    value = 1.0 if float(old.sum()) < len(old) / 2 else 0.0
    return _rows(scene.put("token_level_scores", torch.where(last, value, 0.0)))


@seeded("reward", *SCORES, cause=("reward_lost", "broadcast_reward"))
def two_rewards_added(scene: Scene) -> Truth:
    """The model's score and the function's score are the same and are added."""
    return _rows(scene.put("token_level_scores", 2.0 * scene.tensors["token_level_scores"]))


@seeded("reward", *SCORES, cause="reward_lost")
def rewards_of_long_rows_lost(scene: Scene) -> Truth:
    """A worker that times out on long rows leaves their token-level scores at 0."""
    old = scene.tensors["token_level_scores"]
    long = (scene.lengths() > 2)[:, None]
    return _rows(scene.put("token_level_scores", torch.where(long, 0.0, old)))


@seeded("reward", *SCORES, "score", cause=("reward_rows_shifted", "row_permutation"))
def rewards_one_row_late(scene: Scene) -> Truth:
    """Scores come back in the order of completion and are attached one row late."""
    old, lengths = scene.tensors["token_level_scores"], scene.lengths()
    total = torch.roll(old.sum(1), 1)
    new = torch.zeros_like(old)
    new[torch.arange(len(old)), lengths - 1] = total
    scene.tensors["token_level_scores"] = new
    return rows_of("token_level_scores", (total != old.sum(1)).numpy())


@seeded("reward", *SCORES, "score", cause="non_finite")
def reward_service_returns_nan(scene: Scene) -> Truth:
    """The reward service fails on one row and returns NaN."""
    new, row = scene.tensors["token_level_scores"].clone(), 5
    column = int(scene.lengths()[row]) - 1
    new[row, column] = float("nan")
    scores = scene.arrays["score"].copy()
    scores[row] = float("nan")
    scene.arrays["score"] = scores
    scene.tensors["token_level_scores"] = new
    return Truth("token_level_scores", (row,), {row: (column,)},
                 also=(Truth("score", (row,)),))  # fmt: skip


@seeded("advantage", "advantages", "scorable", *SCORES, cause=("unscorable_counted",
        "wrong_group_normalisation"), stages=("reward",), origin=("B052",), tuned=True)  # fmt: skip
def unscorable_rows_count_as_zero(scene: Scene) -> Truth:
    """A row that nothing could score gets reward 0 instead of being left out."""
    flags = [1] * len(scene.batch)
    row = int(torch.nonzero(scene.tensors["advantages"].any(1))[0])
    flags[row] = 0
    scene.arrays["scorable"] = objects(flags)
    return Truth("advantages", (row,))


@seeded("kl_reward", "token_level_rewards", cause=("field_forgotten", "wrong_kl_estimator"),
        stages=("advantage",), bases=WITH_KL, tuned=True)  # fmt: skip
def kl_penalty_forgotten(scene: Scene) -> Truth:
    """KL in the reward is configured, and the rewards are the scores."""
    new = scene.tensors["token_level_scores"].clone()
    return scene.put("token_level_rewards", new)


@seeded("kl_reward", "token_level_rewards", cause=("wrong_kl_estimator", "wrong_sign"),
        stages=("advantage",), bases=WITH_KL, tuned=True)  # fmt: skip
def kl_penalty_rewards_distance(scene: Scene) -> Truth:
    """The arguments of the KL are swapped: distance to the reference is rewarded."""
    scores = scene.tensors["token_level_scores"]
    return scene.put("token_level_rewards", 2 * scores - scene.tensors["token_level_rewards"])


@seeded("kl_reward", "token_level_rewards", cause=("mask_on_tool", "wrong_kl_estimator",
        "mask_on_padding"), stages=("advantage",), bases=("kl_reward_tools",),
        origin=("B020",), tuned=True)  # fmt: skip
def kl_penalty_on_tool_tokens(scene: Scene) -> Truth:
    """The penalty is not masked, so it covers tool output too."""
    gap = scene.tensors["old_log_probs"] - scene.tensors["ref_log_prob"]
    new = scene.tensors["token_level_scores"] - 0.01 * gap
    return scene.put("token_level_rewards", new, within=~scene.trained())


@seeded("kl_reward", "token_level_scores", "token_level_rewards", cause=("field_overwritten",
        "wrong_kl_estimator"), bases=WITH_KL, tuned=True)  # fmt: skip
def kl_penalty_in_place(scene: Scene) -> Truth:
    """The penalty is taken off the scores in place: both fields carry it."""
    old, new = scene.tensors["token_level_scores"], scene.tensors["token_level_rewards"].clone()
    scene.tensors["token_level_scores"] = new
    return cells("token_level_scores", new != old)
