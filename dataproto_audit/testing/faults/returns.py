"""Faults of estimators with a recursion over tokens: GAE and REINFORCE++."""

from __future__ import annotations

from typing import Any

import torch

from dataproto_audit.reference import advantages as estimators
from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells

ADV = ("advantages", "returns")
CRITIC = ("critic", "critic_tools")
CLOSE = 2e-5
"""Differences below this are rounding."""


def _written(scene: Scene, advantages: torch.Tensor, returns: torch.Tensor | None = None) -> Truth:
    truths = []
    for name, new in (("advantages", advantages), ("returns", returns)):
        if new is not None:
            old = scene.tensors[name]
            scene.tensors[name] = new.float()
            truths.append(cells(name, ((new - old).abs() > CLOSE) & scene.trained()))
    first, *others = [truth for truth in truths if truth.rows]
    first.also = tuple(others)
    return first


def _gae(scene: Scene, **how: Any) -> Truth:
    parts = (scene.tensors[name] for name in ("token_level_rewards", "values", "response_mask"))
    return _written(scene, *estimators.gae(*parts, **how))


@seeded("advantage", *ADV, cause=("gae_over_masked", "advantage_off_mask"),
        bases=("critic_tools",), origin=("B101",), tuned=True)  # fmt: skip
def recursion_over_tool_tokens(scene: Scene) -> Truth:
    """GAE walks over tool tokens as if they were actions."""
    rewards, values = scene.tensors["token_level_rewards"], scene.tensors["values"]
    advantages, returns = estimators.gae(
        rewards, values, scene.attended().long(), lam=0.9, whitened=False
    )
    mask = scene.tensors["response_mask"]
    whitened = estimators.whiten(advantages, mask)
    return _written(scene, whitened, torch.where(mask != 0, returns, 0.0))


@seeded("advantage", *ADV, cause=("wrong_discount", "wrong_group_normalisation"), bases=CRITIC,
        tuned=True)  # fmt: skip
def discounted_although_gamma_is_one(scene: Scene) -> Truth:
    """The discount of another configuration is used: 0.95 instead of 1."""
    return _gae(scene, gamma=0.95)


@seeded("advantage", *ADV, cause=("wrong_discount", "wrong_group_normalisation"), bases=CRITIC,
        tuned=True)  # fmt: skip
def lambda_of_another_configuration(scene: Scene) -> Truth:
    """GAE's lambda is 0.8 instead of 1."""
    return _gae(scene, lam=0.8)


@seeded("advantage", "advantages", cause=("wrong_whitening", "wrong_group_normalisation"),
        bases=CRITIC, origin=("B103",), tuned=True)  # fmt: skip
def whitened_with_padding(scene: Scene) -> Truth:
    """Mean and variance of the whitening count padding slots too."""
    raw = _raw(scene)
    return _written(scene, (raw - raw.mean()) / raw.var().sqrt())


_whitened_otherwise = seeded(
    "advantage",
    "advantages",
    cause=("wrong_whitening", "wrong_group_normalisation"),
    bases=CRITIC,
    tuned=True,
)


@_whitened_otherwise
def whitened_per_rank(scene: Scene) -> Truth:
    """Each rank whitens its own rows."""
    raw, mask = _raw(scene), scene.tensors["response_mask"]
    chunks = zip(raw.chunk(scene.options.ranks), mask.chunk(scene.options.ranks), strict=True)
    return _written(scene, torch.cat([estimators.whiten(x, on) for x, on in chunks]))


@_whitened_otherwise
def whitening_forgotten(scene: Scene) -> Truth:
    """GAE advantages are used as they are."""
    return _written(scene, _raw(scene))


@seeded("advantage", "returns", "advantages",
        cause=("wrong_whitening", "wrong_group_normalisation"),
        bases=CRITIC, tuned=True)  # fmt: skip
def returns_from_whitened_advantages(scene: Scene) -> Truth:
    """Returns are formed after the whitening, so the critic learns another scale."""
    old = scene.tensors["returns"]
    new = torch.where(scene.trained(), scene.tensors["advantages"] + scene.tensors["values"], 0.0)
    scene.tensors["returns"] = new
    return cells("returns", ((new - old).abs() > CLOSE) & scene.trained())


@seeded(
    "advantage",
    *ADV,
    cause=("gae_over_masked", "advantage_off_mask"),
    bases=CRITIC,
    origin=("B042",),
    tuned=True,
)
def value_after_the_end(scene: Scene) -> Truth:
    """The last token bootstraps from the value of the column behind it."""
    rewards = scene.tensors["token_level_rewards"].clone()
    values, rows = scene.tensors["values"], torch.arange(len(scene.batch))
    last = scene.lengths() - 1
    behind = (last + 1).clamp(max=values.shape[1] - 1)
    rewards[rows, last] += torch.where(behind > last, values[rows, behind], 0.0)
    return _written(scene, *estimators.gae(rewards, values, scene.tensors["response_mask"]))


@seeded("advantage", "returns", "advantages", cause=("returns_reset_at_gap", "gae_over_masked"),
        bases=("rpp_tools",))  # fmt: skip
def returns_lost_before_a_tool_reply(scene: Scene) -> Truth:
    """The running return starts at 0 again at every tool token: earlier turns get nothing."""
    rewards, on = scene.tensors["token_level_rewards"].double(), scene.trained()
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        running = torch.where(on[:, column], rewards[:, column] + running, 0.0)
        returns[:, column] = running
    old = scene.tensors["returns"]
    advantages = estimators.whiten(returns, scene.tensors["response_mask"])
    changed = cells("advantages", ((advantages - scene.tensors["advantages"]).abs() > CLOSE) & on)
    scene.tensors["advantages"] = advantages.float()
    scene.tensors["returns"] = returns.float()
    truth = cells("returns", ((returns - old).abs() > CLOSE) & on)
    truth.also = (changed,)
    return truth


def _raw(scene: Scene) -> torch.Tensor:
    parts = (scene.tensors[name] for name in ("token_level_rewards", "values", "response_mask"))
    return estimators.gae(*parts, whitened=False)[0]
