"""Divisibility and micro-batch arithmetic: each rule broken alone, and healthy neighbours quiet."""

import pytest

from dataproto_audit.doctor.arithmetic import cut_of, lines, problems

A, R, REF, M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref", "model"))
ENGINE = "trainer.use_legacy_worker_impl=disable"
DYNAMIC = f"{A}.use_dynamic_bsz=True"
MEGATRON = (f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2",
            f"{A}.megatron.pipeline_model_parallel_size=2")  # fmt: skip


def found(plan):
    return [(problem.level, problem.code) for problem in problems(plan)]


QUIET = [
    (), (ENGINE,), (DYNAMIC,), MEGATRON, (f"{A}.ulysses_sequence_parallel_size=2",),
    (f"{A}.use_kl_loss=True",), ("algorithm.adv_estimator=gae",), ("trainer.nnodes=2",),
    (DYNAMIC, f"{A}.ppo_max_token_len_per_gpu=1024"), (f"{R}.n=1", "algorithm.adv_estimator=gae",
     f"{A}.ppo_micro_batch_size_per_gpu=16", "critic.ppo_micro_batch_size_per_gpu=16"),
    (DYNAMIC, "~actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
     f"~{R}.log_prob_micro_batch_size_per_gpu"),
    (DYNAMIC, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ppo_max_token_len_per_gpu=512"),
]  # fmt: skip


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
@pytest.mark.parametrize("overrides", QUIET)
def test_what_divides_is_quiet(plan, overrides, version):
    assert found(plan(*overrides, version=version)) == []


@pytest.mark.parametrize(
    ("overrides", "level", "code"),
    [
        ((*MEGATRON, f"{A}.megatron.pipeline_model_parallel_size=3"), "fail", "DPA854"),
        (("data.train_batch_size=129", f"{R}.n=1", f"{A}.ppo_mini_batch_size=129",
          "algorithm.adv_estimator=gae"), "fail", "DPA854"),
        ((f"{R}.agent.num_workers=7",), "fail", "DPA854"),
        ((f"{A}.ppo_mini_batch_size=1024",), "fail", "DPA854"),
        ((f"{A}.ppo_micro_batch_size_per_gpu=7",), "fail", "DPA854"),
        ((f"~{A}.ppo_micro_batch_size_per_gpu",), "fail", "DPA851"),
        ((f"{A}.ppo_micro_batch_size=64",), "fail", "DPA851"),
        ((f"~{R}.log_prob_micro_batch_size_per_gpu",), "fail", "DPA851"),
        ((f"{R}.log_prob_micro_batch_size=64",), "fail", "DPA851"),
        ((f"{A}.use_kl_loss=True", f"~{REF}.log_prob_micro_batch_size_per_gpu"), "fail", "DPA851"),
        ((ENGINE, f"{R}.log_prob_micro_batch_size_per_gpu=7"), "fail", "DPA854"),
        ((f"{A}.ppo_mini_batch_size=96",), "warn", "DPA854"),
        ((ENGINE, f"{A}.ppo_mini_batch_size=96"), "fail", "DPA854"),
        ((f"{R}.n=1",), "warn", "DPA855"),
        ((f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=False"), "fail",
         "DPA851"),
        ((ENGINE, f"{R}.log_prob_use_dynamic_bsz=True"), "fail", "DPA851"),
        ((DYNAMIC, f"{A}.ppo_max_token_len_per_gpu=1023"), "fail", "DPA856"),
        ((ENGINE, DYNAMIC, f"{A}.ppo_max_token_len_per_gpu=1023"), "warn", "DPA856"),
        (("algorithm.adv_estimator=gae", "~critic"), "fail", "DPA851"),
    ],
)  # fmt: skip
def test_one_broken_rule_is_named(plan, overrides, level, code):
    assert (level, code) in found(plan(*overrides))


def test_legacy_workers_round_a_mini_batch_down(plan):
    uneven = (f"{A}.ppo_mini_batch_size=1", f"{R}.n=12", f"{A}.ppo_micro_batch_size_per_gpu=1")
    legacy, engine = plan(*uneven), plan(*uneven, ENGINE)
    [problem] = problems(legacy)
    assert problem.level == "warn"
    assert "takes 1 rows a rank" in problem.text
    assert ("fail", "DPA854") in found(engine)


def test_v1_fills_the_batch_up(plan):
    odd = ("data.train_batch_size=500",)
    made = plan(*odd, version="0.9.1")
    assert cut_of(made).rows == 4096
    assert "filled up to 4096" in lines(made)[1]
    assert found(made) == []
    assert ("warn", "DPA854") in found(plan(*odd))


def test_the_arithmetic_in_words(plan):
    said = lines(plan(*MEGATRON, f"{A}.ppo_micro_batch_size_per_gpu=16"))
    assert said == [
        "ranks: 8 = dp 2 x tp 2 x pp 2 x cp 1",
        "rows: 512 prompts x n 8 = 4096; 2048 a rank",
        "mini-batches: 4 an epoch, of 512 rows a rank",
        "micro-batches: 32 a mini-batch, of 16 rows",
    ]
    [dynamic] = [line for line in lines(plan(DYNAMIC)) if "dynamic" in line]
    assert "limit 16384 tokens; longest row 1024" in dynamic
    assert dynamic.endswith("at least 8")
