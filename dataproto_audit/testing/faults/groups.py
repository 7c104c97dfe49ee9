"""Faults of groups: uids, their sizes and their order."""

from __future__ import annotations

import numpy as np

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, objects, rows_of, unlike

UID = ("uid", "prompts", "raw_prompt")


@seeded("union", *UID, cause=("uid_after_repeat", "split_group"), stages=("rollout", "prompts"),
        origin=("B044",), tuned=True)  # fmt: skip
def uid_per_row(scene: Scene) -> Truth:
    """Ids are drawn after the repeat: every row is a group of its own."""
    scene.arrays["uid"] = objects([f"u{row}" for row in range(len(scene.batch))])
    return Truth("uid", tuple(range(len(scene.batch))))


@seeded("prompts", "uid", cause="uid_reused", stages=("union",))
def two_prompts_share_a_uid(scene: Scene) -> Truth:
    """An id taken from the data set's index occurs twice in the batch."""
    uid = scene.arrays["uid"].copy()
    uid[1] = uid[0]
    scene.arrays["uid"] = uid
    return Truth("uid", (0, 1), also=(Truth("uid", (1,)),))


@seeded("union", "uid", cause="split_group", tuned=True)
def one_row_leaves_its_group(scene: Scene) -> Truth:
    """A retried sample gets a fresh id, so its group is one short."""
    uid, n = scene.arrays["uid"].copy(), scene.options.n
    uid[n + 1] = "retried"
    scene.arrays["uid"] = uid
    group = tuple(range(n, 2 * n))
    return Truth("uid", (n + 1,), also=(Truth("uid", group),))


@seeded("union", "uid", cause="row_permutation")
def uids_one_row_late(scene: Scene) -> Truth:
    """One response was dropped in between: all ids behind it are one row late."""
    old = scene.arrays["uid"]
    new = np.roll(old, 1)
    scene.arrays["uid"] = new
    return rows_of("uid", unlike(old, new))


@seeded("rollout", "rows", "batch_size", "", "responses", cause=("not_repeated", "rows_lost"),
        stages=("union",))  # fmt: skip
def another_n(scene: Scene) -> Truth:
    """The engine is asked for one sample less per prompt than configured."""
    n, rows = scene.options.n, len(scene.batch)
    kept = np.array([row for row in range(rows) if row % n])
    scene.batch = scene.batch.select_idxs(kept)
    return Truth("rows")


@seeded("union", "uid", cause=("split_group", "uid_reused"), origin=("B047",),
        tuned=True)  # fmt: skip
def mixed_group_sizes(scene: Scene) -> Truth:
    """A buffer fills groups unevenly: one has a row more and another a row less."""
    uid, n = scene.arrays["uid"].copy(), scene.options.n
    uid[n] = uid[0]
    scene.arrays["uid"] = uid
    return Truth("uid", (n,), also=(Truth("uid", tuple(range(2 * n))),))


@seeded("union", "raw_prompt", "prompts", "prompt_ids", "uid", cause="row_permutation",
        stages=("reward",), tuned=True)  # fmt: skip
def texts_of_other_prompts(scene: Scene) -> Truth:
    """Prompt texts are attached in another order than the ids: rewards will be wrong."""
    old = scene.arrays["raw_prompt"]
    n = scene.options.n
    for name in ("raw_prompt", "prompt_ids", "reward_model"):
        scene.arrays[name] = np.roll(scene.arrays[name], n)
    return rows_of("raw_prompt", unlike(old, scene.arrays["raw_prompt"]))


@seeded("advantage", "token_level_rewards", "token_level_scores", "dead_groups",
        cause=("dead_groups", "broadcast_reward"), where="start", lasts=6, stages=("reward",
        "update_actor"), bases=("recorded",), options={"equal_groups": True},
        origin=("B057",))  # fmt: skip
def no_group_differs_for_steps(scene: Scene) -> Truth:
    """Two samples per prompt and a binary reward: for steps no group has any variance."""
    return Truth("token_level_rewards")
