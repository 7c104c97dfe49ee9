"""Whole runs whose models stand on Megatron: four ranks with vLLM, roles on two engines, and the
metrics of a step next to FSDP's."""

import json

import pytest

import dataproto_audit as da
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.run import run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("ray_for_all")]

SMALL = [
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "warmup.batch_size=16",
    "trainer.collective_timeout_s=300",
    "audit.on_fail=record",
]
MIXED = {
    ("fsdp2", "megatron"): "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
    ("megatron", "fsdp2"): "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
}


@pytest.fixture
def policy(tmp_path):
    """Twenty supervised steps teach next to nothing: most groups have equal rewards."""
    file = tmp_path / "policy.yaml"
    file.write_text("ignore: [DPA413]")
    return f"audit.policy={file}"


def go(name, folder, *overrides):
    result = run(load_config(name, [*SMALL, *overrides, f"trainer.run_dir={folder}"]))
    return result.summary, da.open_run(folder)


def metrics(opened, step):
    table = opened.table("steps")
    table = table[table.step == step]
    return dict(zip(table.metric, table.value, strict=True))


def test_four_megatron_ranks_with_vllm_end_well_and_go_on_in_another_layout(tmp_path, policy):
    folder = tmp_path / "run"
    summary, opened = go(
        "megatron_tp2pp2", folder, policy, "warmup.steps=20", "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.save_freq=2",
    )  # fmt: skip
    assert (summary["backend"], summary["world_size"], summary["steps"]) == ("megatron", 4, 2)
    assert summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert summary["outcomes"]["failed"] == 0
    assert summary["outcomes"]["passed"] > 150
    assert metrics(opened, 1)["training/rollout_log_probs_diff_max"] < 1e-4
    ranks = opened.table("ranks")
    update = ranks[ranks.stage == "update_actor"]
    # A mini-batch of 16 rows in micro-batches of 4 on two stages: 1 / (4 + 1) of the time idle.
    assert set(update.bubble.round(6)) == {0.2}
    summary, opened = go(
        "quickstart", folder, policy, "warmup.steps=20", "trainer.total_training_steps=3",
        "trainer.resume_mode=auto", "actor_rollout_ref.rollout.name=hf",
    )  # fmt: skip
    assert (summary["backend"], summary["resumed_after"], summary["steps"]) == ("fsdp2", 2, 3)
    assert summary["findings"]["fail"] == 0
    assert json.loads((folder / "summary.json").read_text())["world_size"] == 2


def test_a_pipeline_with_vllm_ends_well(tmp_path, policy):
    """The ready configuration with smaller batches: weights of both stages reach the engine."""
    summary, opened = go(
        "megatron_pp", tmp_path / "run", policy, "warmup.steps=20",
        "trainer.total_training_steps=3", "audit.sync_probe_every=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    )  # fmt: skip
    assert (summary["backend"], summary["world_size"], summary["steps"]) == ("megatron", 2, 3)
    assert summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert summary["outcomes"]["failed"] == 0
    for step in (1, 2, 3):  # the engine scored with the weights that the ranks have
        assert metrics(opened, step)["training/rollout_log_probs_diff_max"] < 1e-4
    ranks = opened.table("ranks")
    assert set(ranks[ranks.stage == "update_actor"].bubble.round(6)) == {0.2}


@pytest.mark.parametrize(("actor", "ref"), MIXED)
def test_roles_on_two_engines_agree_at_step_1(tmp_path, policy, actor, ref):
    summary, opened = go(
        "quickstart", tmp_path / "run", policy, "warmup.steps=20",
        "trainer.total_training_steps=2", "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.actor.strategy={actor}", f"actor_rollout_ref.ref.strategy={ref}",
        MIXED[actor, ref],
    )  # fmt: skip
    assert (summary["backend"], summary["findings"]["fail"]) == (actor, 0)
    outcomes = opened.table("outcomes")
    (first,) = outcomes[(outcomes.check == "old_ref_first") & (outcomes.step == 1)].kind
    assert first == "passed"
    rows = opened.table("rows")
    assert rows[rows.step == 1].old_ref_gap_max.max() <= 1e-5
    assert rows[rows.step == 2].old_ref_gap_max.max() > 1e-5, "the policy has moved"


def test_metrics_of_the_first_step_equal_those_of_fsdp(tmp_path, scored_by_letters):
    """One mini-batch: mini-batches are drawn per data-parallel rank, of which FSDP has more."""
    found = {}
    for name in ("quickstart", "megatron_quickstart"):
        _, opened = go(
            name, tmp_path / name, "warmup.steps=0", "trainer.total_training_steps=1",
            "actor_rollout_ref.rollout.name=hf", "trainer.seed=0", "data.seed=0",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            *scored_by_letters,
        )  # fmt: skip
        found[name] = metrics(opened, 1)
    theirs, ours = found.values()
    skipped = ("timing_s/", "audit/", "perf/", "global_seqlen/")
    compared = [name for name in theirs if not name.startswith(skipped)]
    assert {"actor/grad_norm", "actor/pg_loss", "actor/entropy", "critic/score/mean"} <= set(
        compared
    )
    assert theirs["actor/grad_norm"] > 1e-3
    for name in compared:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
