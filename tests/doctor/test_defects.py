"""Every known defect is hit by a minimal configuration, and not by its neighbour."""

import pytest

from dataproto_audit.codes import CODES
from dataproto_audit.doctor.defects import DEFECTS, HANGS, RECORDER, defects_hit

A, R, M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
REMAX = ("algorithm.adv_estimator=remax",)
RPP = ("algorithm.adv_estimator=reinforce_plus_plus",)
ENGINE = ("trainer.use_legacy_worker_impl=disable",)
DYNAMIC = (f"{A}.use_dynamic_bsz=True",)
MODEL = ("reward.reward_model.enable=True",)
POOL = (*MODEL, "reward.reward_model.enable_resource_pool=True")
SDPA = (f"{A}.ulysses_sequence_parallel_size=2", f"{M}.override_config.attn_implementation=sdpa")
GAE = ("algorithm.adv_estimator=gae", *ENGINE)
FLASH = f"{M}.override_config.attn_implementation=flash_attention_2"
MODE = f"{A}.loss_agg_mode=seq-mean-token-mean"
SENT = f"{A}.policy_loss.loss_mode="

HITS = [
    ("D1", ("trainer.critic_warmup=2",), (f"{R}.free_cache_engine=False",)),
    ("D2", REMAX, ("algorithm.adv_estimator=rloo",)),
    ("D3", REMAX, ("algorithm.adv_estimator=rloo",)),
    ("D4", (*REMAX, *MODEL), POOL),
    ("D5", POOL, ("reward.reward_model.enable_resource_pool=False",)),
    ("D6", (f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=k3+"), (f"{A}.kl_loss_type=k3",)),
    ("D6", ("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=k1+"),
     ("algorithm.use_kl_in_reward=False",)),
    ("D7", ("algorithm.adv_estimator=optimal_token_baseline",), ("algorithm.adv_estimator=opo",)),
    ("D8", (*RPP, f"{R}.multi_turn.enable=True"), (f"{R}.multi_turn.enable=False",)),
    ("D8", (*RPP, f"{R}.agent.default_agent_loop=tool_agent"),
     ("algorithm.adv_estimator=grpo",)),
    ("D9", DYNAMIC, ENGINE),
    ("D9", DYNAMIC, ("trainer.n_gpus_per_node=1",)),
    ("D10", DYNAMIC, (f"{A}.use_dynamic_bsz=False",)),
    ("D11", (*GAE, "critic.ppo_micro_batch_size_per_gpu=16"),
     ("critic.ppo_micro_batch_size_per_gpu=128",)),
    ("D12", (f"{SENT}gspo",), (MODE,)),
    ("D12", (f"{SENT}sapo",), (f"{SENT}vanilla",)),
    ("D13", (*ENGINE, f"{M}.use_remove_padding=False"), (f"{M}.use_remove_padding=True",)),
    ("D14", SDPA, (FLASH,)),
    ("D17", (*ENGINE, f"{SENT}geo_mean", f"{A}.ppo_micro_batch_size_per_gpu=16"),
     (f"{A}.ppo_micro_batch_size_per_gpu=128",)),
    ("D18", GAE, ("trainer.use_legacy_worker_impl=enable",)),
    ("D17", (*ENGINE, *DYNAMIC, f"{SENT}geo_mean"), (f"{SENT}gspo",)),
    ("D15", REMAX, ("algorithm.adv_estimator=grpo",)),
    ("D15", REMAX, MODEL),  # rollouts then come without a score
]  # fmt: skip


def hit(plan):
    return {problem.defect for problem in defects_hit(plan)}


@pytest.mark.parametrize(("number", "overrides", "neighbour"), HITS)
def test_a_defect_is_hit_and_its_neighbour_is_not(plan, number, overrides, neighbour):
    assert number in hit(plan(*overrides))
    assert number not in hit(plan(*overrides, *neighbour))


def test_every_defect_that_a_configuration_can_show_is_triggered_above():
    assert {d.number for d in DEFECTS if d.hit} == {number for number, *_ in HITS}


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
def test_a_plain_configuration_hits_none(plan, version):
    assert hit(plan(version=version)) == set()


def test_what_0_9_1_mended_is_not_said_of_it(plan):
    mended = {d.number for d in DEFECTS} - {"D5", "D12", "D16", "D17"}
    for number, overrides, _ in HITS:
        if number in mended:
            assert number not in hit(plan(*overrides, version="0.9.1"))
    assert hit(plan(f"{SENT}gspo", version="0.9.1")) == set()
    assert hit(plan(f"{SENT}geo_mean", version="0.9.1")) == {"D12", "D17"}
    assert hit(plan(f"{SENT}geo_mean")) == {"D12"}  # legacy workers weight them by rows
    assert hit(plan(*POOL, version="0.9.1")) == {"D5"}


def test_what_finds_a_defect_exists():
    for defect in DEFECTS:
        for name in filter(None, defect.found_by.split(", ")):
            assert name in (RECORDER, HANGS) or name in CODES
        assert defect.text.endswith((".", ")."))
