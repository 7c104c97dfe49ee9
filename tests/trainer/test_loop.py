"""Which stages a run goes through, and those on the driver; the rest is run by engine tests."""

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.reference import advantages as reference
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.loop import STAGES, Loop, stages_of

WITH_CRITIC = {"values", "update_critic"}


@pytest.mark.parametrize(
    ("name", "overrides", "left_out"),
    [
        ("quickstart", ("trainer.test_freq=5",), {*WITH_CRITIC, "kl_reward"}),
        ("quickstart", ("trainer.val_before_train=true",), {*WITH_CRITIC, "kl_reward"}),
        ("quickstart", (), {*WITH_CRITIC, "kl_reward", "validation"}),
        (
            "quickstart",
            ("trainer.test_freq=5", "actor_rollout_ref.actor.use_kl_loss=false"),
            {*WITH_CRITIC, "kl_reward", "ref_log_prob"},
        ),
        (
            "quickstart",
            ("actor_rollout_ref.actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true"),
            {*WITH_CRITIC, "validation"},
        ),
        ("ppo_quickstart", (), {"kl_reward", "validation"}),
        (
            "ppo_quickstart",
            ("algorithm.use_kl_in_reward=true", "trainer.critic_warmup=91"),
            {"validation", "update_actor"},
        ),
    ],
)
def test_only_stages_that_run_are_announced(name, overrides, left_out):
    stages = stages_of(load_config(name, list(overrides)))
    assert list(stages) == [stage for stage in STAGES if stage not in left_out]


@pytest.fixture
def scored(ragged_batch):
    """A batch with scores, values, log-probs of two policies, and groups of four."""
    batch, random = ragged_batch(rows=8), torch.Generator().manual_seed(3)
    shape = batch.batch["responses"].shape
    batch.batch["token_level_scores"] = torch.rand(shape, generator=random)
    batch.batch["values"] = torch.randn(shape, generator=random)
    batch.non_tensor_batch["uid"] = np.array(list("aaaabbbb"), dtype=object)
    return batch


def loop(*overrides):
    nothing: Any = None
    return Loop(load_config("ppo_quickstart", list(overrides)), nothing, nothing, nothing)


def test_the_kl_is_taken_off_the_scores_of_trained_tokens(scored):
    made = loop("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    tensors = made.kl_reward(scored).batch
    distance = tensors["old_log_probs"] - tensors["ref_log_prob"]
    mask = tensors["response_mask"] != 0
    taken = tensors["token_level_scores"] - tensors["token_level_rewards"]
    torch.testing.assert_close(taken[mask], 0.5 * distance[mask], atol=1e-6, rtol=0)
    assert not taken[~mask].any()
    assert made.metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_gae_is_given_the_discounts_and_the_rewards_after_the_kl(scored):
    settings = ("algorithm.gamma=0.9", "algorithm.lam=0.8")
    made = loop("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5", *settings)
    tensors = made.advantage(made.kl_reward(scored)).batch
    names = ("token_level_rewards", "values", "response_mask")
    expected = reference.gae(*(tensors[name] for name in names), gamma=0.9, lam=0.8)
    for name, want in zip(("advantages", "returns"), expected, strict=True):
        torch.testing.assert_close(tensors[name].double(), want, atol=1e-5, rtol=1e-5)
    plain = loop(*settings).advantage(scored).batch
    assert torch.equal(plain["token_level_rewards"], plain["token_level_scores"])
