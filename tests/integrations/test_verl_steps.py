"""Runs in which nothing was looked at say so when they end."""

from types import ModuleType
from typing import Any

import pytest

from dataproto_audit import attach, open_run
from dataproto_audit.integrations.verl_steps import Steps

from .conftest import make

NONE = "no step of training was seen"


def silent(verl: ModuleType, *, prompts: bool, updates: bool) -> Any:
    """A trainer that logs by itself; with other names for where a step begins and ends."""

    class Mine(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def prepared(self, batch: Any) -> Any:
            return verl.RayPPOTrainer._get_gen_batch(self, batch)

        def learn(self, batch: Any) -> None:
            self.trained.append(batch)

        def fit(self) -> None:
            for self.global_steps in (1, 2):
                self.sim = verl.SimulatedStep(self.options, lambda used: used)
                batch = self._prompts()
                prepare = self._get_gen_batch if prompts else self.prepared
                gen = self.async_rollout_manager.generate_sequences(self.repeated(prepare(batch)))
                batch = self.repeated(batch).union(gen)
                scores, _ = verl.extract_reward(batch)
                old, _ = self._compute_old_log_prob(batch)
                batch = batch.union(old)
                batch.batch["token_level_scores"] = scores
                batch.batch["token_level_rewards"] = scores
                batch = verl.compute_advantage(batch, adv_estimator="grpo", config=self.sim)
                (self._update_actor if updates else self.learn)(batch)

    return make(verl, kind=Mine)


def test_a_loop_whose_steps_nobody_sees_begin(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = silent(verl, prompts=False, updates=False)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed == {}
    assert f"{NONE}: Mine had none left to do, or does not call _get_gen_batch" in caplog.text
    summary = open_run("run").summary
    assert summary["unseen"] == [
        "prompts", "rollout", "union", "reward", "old_log_prob", "advantage", "update_actor",
    ]  # fmt: skip


def test_steps_are_counted_where_nobody_logs(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = silent(verl, prompts=True, updates=False)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert open_run("run").summary["unseen"] == ["update_actor"]
    assert "nothing was seen of update_actor in 2 steps" in caplog.text


def test_all_seen_is_quiet(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = silent(verl, prompts=True, updates=True)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert open_run("run").summary["unseen"] == []
    assert "was seen" not in caplog.text


def test_a_run_that_only_validates_misses_nothing(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl, steps=0, trainer__val_only=True)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert open_run("run").summary["unseen"] == []
    assert NONE not in caplog.text


def test_a_run_that_raises_first_misses_nothing(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl)
    trainer._get_gen_batch = lambda batch: 1 / 0
    with attach(trainer, run_dir="run"), pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert open_run("run").summary["unseen"] == []
    assert NONE not in caplog.text


def unseen(steps: Steps, *, whole: bool = True, trains: bool = True) -> list[str]:
    return steps.unseen(
        "T", ["rollout", "reward"], ["rollout.after"], begins_by="b", whole=whole, trains=trains
    )


def test_a_step_that_was_broken_off_does_not_count() -> None:
    steps = Steps()
    steps.began(1, looks=True)
    assert unseen(steps, whole=False) == []
    assert unseen(steps) == ["reward"]
    steps.logged(looks=True)
    assert unseen(steps, whole=False) == ["reward"]


def test_steps_that_are_left_out_miss_nothing(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    steps.began(2, looks=False)
    steps.logged(looks=False)
    assert unseen(steps) == []
    assert caplog.records == []


def test_of_no_step_at_all_every_stage_is_missed() -> None:
    assert unseen(Steps()) == ["reward"]
    assert unseen(Steps(), trains=False) == []
    assert unseen(Steps(), whole=False) == []


# -- calls that are looked up in several places ----------------------------------------------------


def test_a_call_that_a_base_class_looks_up_is_hooked(verl: ModuleType) -> None:
    """The module of the subclass does not have verl's functions; that of its base does."""

    class Mine(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def fit(self) -> None:
            super().fit()

    trainer = make(verl, kind=Mine)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed["kl_reward.after"] == 0
    assert attached.observed["advantage.after"] == 1
    assert open_run("run").summary["not_hooked"] == []


def test_a_call_that_is_nowhere_is_named(verl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(verl, "apply_kl_penalty")
    trainer = make(verl)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert open_run("run").summary["not_hooked"] == ["apply_kl_penalty"]
