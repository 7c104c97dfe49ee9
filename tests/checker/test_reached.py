"""How far a batch has come, read off its fields."""

from __future__ import annotations

import numpy as np
import pytest

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.reached import (
    UNSEEN,
    first_difference,
    producer,
    seen_at,
    stages_reached,
)
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.probes import Settings
from dataproto_audit.testing.recipes import cook

TOKENS = ("prompts", "responses", "attention_mask")
NO = Settings()


def view(*names: str) -> BatchView:
    arrays = {name: np.ones((2, 3)) for name in names}
    return BatchView.of({"batch": arrays})


@pytest.mark.parametrize(
    ("names", "settings", "stages"),
    [
        ((), NO, []),
        (("uid", "raw_prompt"), NO, ["prompts"]),
        (TOKENS, NO, ["rollout"]),
        (("rollout_log_probs",), NO, ["rollout"]),
        (("something_of_my_own",), NO, ["rollout"]),
        ((*TOKENS, "uid"), NO, ["rollout", "union"]),
        (TOKENS, Settings(world_size=2), ["rollout", "dispatch"]),
        (TOKENS, Settings(micro_batch_size=2), ["rollout", "dispatch"]),
        (TOKENS, Settings(max_token_len=20), ["rollout", "dispatch"]),
        (TOKENS, Settings(cp_size=2), ["rollout", "dispatch"]),
        ((*TOKENS, "is_pad"), NO, ["rollout", "dispatch"]),
        (("uid",), Settings(world_size=2), ["prompts"]),
        ((*TOKENS, "token_level_scores"), NO, ["rollout", "reward"]),
        ((*TOKENS, "old_log_probs"), NO, ["rollout", "old_log_prob"]),
        ((*TOKENS, "ref_log_prob"), NO, ["rollout", "ref_log_prob"]),
        ((*TOKENS, "values"), NO, ["rollout", "values"]),
        ((*TOKENS, "token_level_rewards"), NO, ["rollout", "advantage"]),
        ((*TOKENS, "token_level_rewards"), Settings(use_kl_in_reward=True),
         ["rollout", "kl_reward", "advantage"]),
        ((*TOKENS, "advantages"), NO, ["rollout", "advantage", "update_actor"]),
        ((*TOKENS, "advantages"), Settings(adv_estimator="gae"),
         ["rollout", "values", "advantage", "update_actor"]),
        ((*TOKENS, "values", "returns"), NO,
         ["rollout", "values", "advantage", "update_critic"]),
    ],
)  # fmt: skip
def test_the_table(names: tuple[str, ...], settings: Settings, stages: list[str]) -> None:
    assert stages_reached(view(*names), settings) == stages


def test_stages_that_leave_no_mark_are_never_reached() -> None:
    whole = BatchView.of(cook("T", []))
    settings = Settings(world_size=2, use_kl_in_reward=True, adv_estimator="gae")
    reached = stages_reached(whole, settings)
    assert reached == [s for s in STAGES if s not in (*UNSEEN, "prompts")]


def test_a_stage_sees_what_was_there_when_it_ended() -> None:
    whole = BatchView.of(cook("T", []))
    assert "token_level_scores" not in seen_at("union", whole)
    assert "token_level_scores" in seen_at("reward", whole)
    assert "uid" in seen_at("union", whole)
    assert set(seen_at("update_actor", whole).names) == set(whole.names)
    part = seen_at("rollout", whole)
    assert (part.rows, part.prompt, part.response) == (6, 4, 5)
    assert part.whole is whole
    assert part.meta == whole.meta


def test_rewards_are_seen_where_either_of_their_writers_ended() -> None:
    whole = BatchView.of(cook("T", []))
    assert "token_level_rewards" in seen_at("kl_reward", whole)
    assert "token_level_rewards" not in seen_at("reward", whole)


def test_who_wrote_a_field() -> None:
    assert producer("advantages") == "advantage"
    assert producer("something_of_my_own") == "rollout"
    assert first_difference(["advantages", "old_log_probs"]) == "old_log_prob"
