"""Whole runs with a critic on Ray: a healthy one with a warm-up of the critic, its resume, seeded
faults in the critic's half; and the same loop on Megatron."""

import numpy as np
import pytest
import torch

import dataproto_audit as da
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.run import run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_for_all")]

SMALL = [
    "data.train_batch_size=32",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "warmup.steps=20",
    "warmup.batch_size=16",
    "trainer.collective_timeout_s=300",
]
LOOP = [
    "prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob", "values",
    "kl_reward", "advantage", "update_critic", "update_actor", "sync_weights",
]  # fmt: skip
ALL = ["trainer.critic_warmup=2", "algorithm.use_kl_in_reward=true", "algorithm.lam=0.95",
       "critic.ppo_epochs=2"]  # fmt: skip
LAYOUTS = {
    "tp": ("tensor_model_parallel_size=2",),
    # Four layers, of which each of the two stages holds two chunks of one.
    "vpp": ("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"),
    "cp": ("context_parallel_size=2",),
}


@pytest.fixture(scope="module")
def go(scored_by_letters, ray_for_all):
    """``go(folder, ...)``: a run and its opened folder."""

    def start(folder, *overrides, callbacks=None):
        given = [*SMALL, *scored_by_letters, *overrides, f"trainer.run_dir={folder}"]
        config = load_config("ppo_quickstart", given)
        return run(config, callbacks=callbacks), da.open_run(folder)

    return start


@pytest.fixture(scope="module")
def healthy(go, tmp_path_factory):
    """Three steps, of which the first trains the critic alone: ``(result, opened, folder)``."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    steps = ["trainer.total_training_steps=3", "trainer.save_freq=2"]
    return *go(folder, *ALL, *steps), folder


def test_a_run_with_a_critic_ends_without_any_finding(healthy):
    result, opened, _ = healthy
    summary = result.summary
    assert result.stopped_by is None
    assert summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert summary["outcomes"]["failed"] == 0
    assert summary["undeclared_fields"] == []
    assert summary["stages"] == ["sync_weights", *LOOP[:-1]]
    # One sync before the first step, and in the first step no update of the policy.
    assert summary["boundaries"] == 1 + 3 * (2 * len(LOOP) - 2) - 2
    outcomes = opened.table("outcomes")
    passed = outcomes[outcomes.kind == "passed"]
    for check in (
        "values_finite", "no_placeholder_values", "returns_recomputed", "kl_in_reward",
        "first_values", "value_loss_recomputed",
    ):  # fmt: skip
        assert set(passed[passed.check == check].step) == {1, 2, 3}, check


def test_only_the_critic_learns_in_its_warm_up(healthy):
    _, opened, _ = healthy
    assert set(opened.metric("actor/grad_norm").index) == {2, 3}
    assert set(opened.metric("critic/vf_loss").index) == {1, 2, 3}
    lr = opened.metric("actor/lr")
    assert lr[2] == pytest.approx(6e-5), "the policy's own warm-up begins with its first update"
    assert opened.metric("critic/lr")[3] == pytest.approx(3e-4)
    assert opened.metric("critic/values/mean")[1] == 0.0
    assert opened.metric("critic/values/mean")[2] != 0.0
    assert set(opened.metric("critic/vf_explained_var").index) == {1, 2, 3}


def test_its_tables_and_fields_are_the_declared_ones(healthy):
    _, opened, _ = healthy
    ranks = opened.table("ranks")
    assert {"values", "update_critic"} <= set(ranks.stage)
    loss = opened.table("loss")
    assert (loss[loss.term == "vf"].groupby("step").size() == 2).all()
    assert (loss.difference < 1e-5).all()
    fields = opened.table("fields")
    for stage in ("values", "kl_reward", "advantage", "update_critic"):
        measured = set(fields[fields.stage == stage].field)
        declared = STAGES[stage]
        assert set(declared.adds) - {"token_level_rewards"} <= measured, stage
        assert measured <= {*declared.adds, *declared.may_add, *declared.changes}, stage
        assert measured <= set(FIELDS)


def test_a_resumed_run_repeats_the_next_step_exactly(go, healthy, tmp_path):
    _, first, folder = healthy
    at = f"trainer.resume_from_path={folder / 'checkpoints' / 'step_000002'}"
    _, second = go(
        tmp_path / "resumed", *ALL, at, "trainer.resume_mode=path", "trainer.total_training_steps=3"
    )
    for metric in (
        "critic/score/mean", "critic/values/mean", "critic/vf_loss", "critic/grad_norm",
        "actor/grad_norm", "actor/pg_loss", "actor/reward_kl_penalty",
    ):  # fmt: skip
        assert first.metric(metric)[3] == second.metric(metric)[3], metric


def shifted(batch):
    values = batch.batch["values"]
    moved = torch.roll(values, 1, dims=1)
    moved[:, 0] = 0.0
    batch.batch["values"] = moved


def behind(batch):
    """The values behind each token, as with the end of a slice that is one too high."""
    values = batch.batch["values"]
    batch.batch["values"] = torch.cat([values[:, 1:], values[:, -1:]], 1)
    last = batch.batch["response_mask"].sum(1) - 1
    rows = torch.arange(len(last))
    batch.batch["values"][rows, last] = values[rows, last] + 0.01


def lost(batch):
    batch.batch["returns"] = torch.zeros_like(batch.batch["returns"])


@pytest.mark.parametrize(
    ("stage", "spoil", "at", "code", "field", "causes"),
    [
        ("values", shifted, "values", "DPA414", "values", ("row_permutation",)),
        pytest.param(
            "advantage",
            lost,
            "advantage",
            "DPA408",
            "returns",
            ("row_permutation", "wrong_discount"),  # zeros are also what rows without reward have
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "values",
            behind,
            "update_critic",
            "DPA505",
            "values",
            ("shift",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_in_the_critic_s_half_stops_the_run_at_its_stage(
    go, tmp_path, stage, spoil, at, code, field, causes
):
    def hook(step, name, batch):
        if (step, name) == (2, stage):
            spoil(batch)

    quick = ["critic.optim.lr=0.02", "critic.optim.lr_warmup_steps=0"]  # values that differ
    result, opened = go(
        tmp_path / "run", *quick, "trainer.total_training_steps=3", callbacks=Callbacks([hook])
    )
    finding = result.stopped_by.findings[0]
    assert (finding.step, finding.stage, finding.field) == (2, at, field)
    assert finding.code == code
    assert finding.causes[0] in causes
    assert len(finding.rows) > 8
    assert result.summary["steps"] == 1
    assert opened.table("findings").code[0] == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "critic"),
    [("tp", "megatron"), ("tp", "fsdp2"), ("vpp", "megatron"), ("cp", "megatron")],
)
def test_megatron_and_mixed_roles_end_without_any_finding_and_go_on(go, tmp_path, sizes, critic):
    actor = "actor_rollout_ref.actor"
    layers = "actor_rollout_ref.model.tiny.num_hidden_layers=4"
    layout = [f"{actor}.strategy=megatron", f"critic.strategy={critic}", "trainer.save_freq=1",
              *(f"{actor}.megatron.{size}" for size in LAYOUTS[sizes]), layers]  # fmt: skip
    result, opened = go(tmp_path / "run", *layout, *ALL, "trainer.total_training_steps=2")
    assert result.summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert (result.summary["backend"], result.summary["steps"]) == ("megatron", 2)
    assert set(opened.metric("critic/vf_loss").index) == {1, 2}
    # In the same layout the next step is the same, and FSDP goes on from there, too.
    at = f"trainer.resume_from_path={tmp_path / 'run' / 'checkpoints' / 'step_000001'}"
    resumed = [*ALL, at, "trainer.resume_mode=path", "trainer.total_training_steps=2"]
    _, again = go(tmp_path / "again", *layout, *resumed)
    _, other = go(tmp_path / "other", *resumed, "trainer.n_gpus_per_node=1", layers)
    for metric in ("critic/vf_loss", "critic/values/mean", "critic/score/mean"):
        value = opened.metric(metric)[2]
        assert again.metric(metric)[2] == value, metric
        if metric != "critic/vf_loss":  # mini-batches are drawn for each data-parallel rank
            assert np.isclose(other.metric(metric)[2], value, atol=1e-4), metric
