"""Boundaries of the V0 trainer, seen through the stand-in: all of them, quiet when healthy."""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.integrations import verl_versions
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.options import Options

from .conftest import make

EACH_STEP = ["prompts.after", "rollout.before", "rollout.after", "union.after"]
SIDES = ("before", "after")


def sides(*stages: str) -> list[str]:
    return [f"{stage}.{when}" for stage in stages for when in SIDES]


def critic() -> dict[str, Any]:
    return {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True,
            "actor_rollout_ref__actor__use_kl_loss": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "stages"),
    [
        ({}, Options(), ["balance", "reward", "old_log_prob", "ref_log_prob", "advantage",
                         "update_actor"]),
        ({"trainer__balance_batch": False, "actor_rollout_ref__actor__use_kl_loss": False},
         Options(reference=False), ["reward", "old_log_prob", "advantage", "update_actor"]),
        (critic(), Options(critic=True, kl_in_reward=True, estimator="gae"),
         ["balance", "reward", "old_log_prob", "ref_log_prob", "values", "kl_reward", "advantage",
          "update_critic", "update_actor"]),
        ({"algorithm__rollout_correction": {"bypass_mode": True}}, Options(bypass=True),
         ["balance", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor"]),
        ({"algorithm__rollout_correction": {"bypass_mode": False, "rollout_rs": "sequence"}},
         Options(), ["balance", "reward", "old_log_prob", "ref_log_prob", "advantage",
                     "update_actor"]),
    ],
    ids=["grpo", "unbalanced", "gae", "bypass", "correction"],
)  # fmt: skip
def test_every_boundary_is_seen_and_healthy_runs_are_quiet(
    verl: ModuleType, changes: dict[str, Any], options: Options, stages: list[str]
) -> None:
    trainer = make(verl, steps=2, options=options, **changes)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    expected = dict.fromkeys([*EACH_STEP, *sides(*stages)], 2)
    assert attached.observed == {**expected, "sync_weights.after": 3, "validation.after": 3}
    run = open_run("run")
    assert run.findings() == []
    assert run.summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert run.summary["switched_off"] == {}
    assert run.summary["not_hooked"] == []
    assert run.summary["unseen"] == []
    assert run.summary["steps"] == 2
    assert 0 < run.summary["audit_cpu_share"] <= 1
    assert run.summary["audit_cpu_s"] < run.summary["run_cpu_s"]


def test_outcomes_are_in_the_tables_by_step(verl: ModuleType) -> None:
    trainer = make(verl, steps=2)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    outcomes = open_run("run").table("outcomes")
    assert sorted(outcomes["step"].unique()) == [0, 1, 2]
    assert set(outcomes[outcomes["step"] == 0]["stage"]) >= {"sync_weights", "validation"}
    assert "actor/grad_norm" in set(open_run("run").table("steps")["metric"])


def test_metrics_go_through_the_trainers_own(verl: ModuleType) -> None:
    trainer = make(verl)
    with attach(trainer, tables=False):
        trainer.fit()
    step, logged = trainer.logger.logged[-1]
    assert step == 1
    assert logged["audit/findings_fail"] == 0
    assert logged["audit/boundaries"] > 15
    assert logged["critic/score/mean"] >= 0


def test_metrics_can_be_left_out(verl: ModuleType) -> None:
    trainer = make(verl)
    with attach(trainer, tables=False, metrics=False):
        trainer.fit()
    assert not [name for name in trainer.logger.logged[-1][1] if name.startswith("audit/")]


def test_an_untried_version_gets_structure_checks_only(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verl_versions, "installed", lambda: "0.8.0")
    trainer = make(verl)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert "verl 0.8.0 is not one of the versions" in caplog.text
    assert "0.7.1, 0.9.1" in caplog.text
    assert attached.observed["advantage.after"] == 1
    assert attached.runs[0].closed is not None
    assert attached.runs[0].closed.auditor.level == "shape"
    assert len(trainer.trained) == 1


def test_remax_sends_greedy_rows_along(verl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9.1: one call for sampled and greedy rows; only the sampled ones are the rollout."""
    import numpy as np

    monkeypatch.setattr(verl_versions, "installed", lambda: "0.9.1")
    trainer = make(verl)
    manager = trainer.async_rollout_manager
    plain = manager.generate_sequences
    audited: list[Any] = []

    def generate(prompts: DataProto) -> DataProto:
        return audited[0](prompts)

    def both(prompts: DataProto) -> DataProto:
        sampled = plain(prompts.slice(0, 16))
        greedy = plain(prompts.slice(0, 16)).slice(0, 4)
        sampled.meta_info = greedy.meta_info
        return DataProto.concat([sampled, greedy])

    def with_greedy(prompts: DataProto) -> DataProto:
        prompts.non_tensor_batch["__do_sample__"] = np.ones(16, dtype=bool)
        more = prompts.slice(0, 4)
        more.non_tensor_batch["__do_sample__"] = np.zeros(4, dtype=bool)
        out = generate(DataProto.concat([prompts, more])).slice(0, 16)
        out.pop(non_tensor_batch_keys=["__do_sample__"]) if "__do_sample__" in (
            out.non_tensor_batch
        ) else None
        return out

    manager.generate_sequences = both
    with attach(trainer, run_dir="run") as attached:
        audited.append(manager.generate_sequences)
        manager.generate_sequences = with_greedy
        trainer.fit()
    assert attached.observed["rollout.after"] == 1
    assert open_run("run").findings() == []


def test_a_second_greedy_call_is_no_rollout(verl: ModuleType) -> None:
    """0.7.1: ReMax asks again, with ``do_sample`` False, and joins the answer for a moment."""
    trainer = make(verl)
    repeat = trainer.repeated

    def repeated(batch: Any) -> Any:
        fields = [] if batch.batch is None else list(batch.batch.keys())
        if "responses" not in fields:
            greedy = repeat(batch)
            greedy.meta_info = {**greedy.meta_info, "do_sample": False}
            if "raw_prompt" in greedy.non_tensor_batch:
                trainer.async_rollout_manager.generate_sequences(greedy)
        return repeat(batch)

    trainer.repeated = repeated
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed["rollout.after"] == 1
    assert attached.observed["union.after"] == 1
    assert open_run("run").findings() == []


def test_scores_of_a_greedy_rollout_are_no_union(verl: ModuleType) -> None:
    """0.7.1: with a colocated reward model ReMax joins scores to its baseline, too (D4)."""
    trainer = make(verl)
    manager, asked = trainer.async_rollout_manager, []
    sample = manager.generate_sequences

    def generate(prompts: DataProto) -> DataProto:
        asked.append(prompts)
        return sample(prompts)

    def asleep() -> None:
        greedy = DataProto(non_tensor_batch=dict(asked[0].non_tensor_batch))
        greedy.meta_info["do_sample"] = False
        out = manager.generate_sequences(greedy)
        own = DataProto.from_dict({"dummy_tensor": torch.zeros(len(out), 1)})
        own.union(out).union(DataProto.from_dict({"more_scores": torch.zeros(len(out), 1)}))

    manager.generate_sequences = generate
    trainer.checkpoint_manager.sleep_replicas = asleep
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert len(asked) == 2
    assert attached.observed["union.after"] == 1
    assert open_run("run").findings() == []


def test_reports_in_a_read_only_place_do_not_stop_training(
    verl: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    trainer = make(verl)
    with caplog.at_level(logging.ERROR), attach(trainer, run_dir="file/run") as attached:
        trainer.fit()
    assert "the checks go on" in caplog.text
    assert attached.observed["advantage.after"] == 1
    assert len(trainer.trained) == 1
