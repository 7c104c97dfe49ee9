"""What is not as in verl's own runs: a clear message, and a training that goes on unharmed.

Settings that do not exist are in test_options.py and test_plugin.py, two attaches and other objects
than trainers in test_attach.py, V0 of another version and a folder that cannot be written in
test_verl_v0.py.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.dump.trace import Trace
from dataproto_audit.dump.trace_meta import place_of
from dataproto_audit.integrations import verl_versions
from dataproto_audit.integrations.verl_run import VerlRun

from .conftest import config, make

QUIET = {"trainer__val_before_train": False, "trainer__test_freq": 0}


def sampling(trainer: Any, change: Callable[[Any], None]) -> None:
    """Let ``change`` have what the rollout returns."""
    sample = trainer.async_rollout_manager.generate_sequences

    def generate(prompts: Any) -> Any:
        out = sample(prompts)
        change(out)
        return out

    trainer.async_rollout_manager.generate_sequences = generate


def audited(trainer: Any) -> Any:
    """The run of a trainer that trains through."""
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert len(trainer.trained) == 1
    run = open_run("run")
    assert run.summary["switched_off"] == {}
    return run


# -- subclasses ------------------------------------------------------------------------------------


def renamed(verl: ModuleType, steps: int = 1) -> Any:
    """A trainer whose loop has other names for two stages."""

    class Mine(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def score_again(self, batch: Any) -> Any:
            return self._added(self.sim.old_log_prob, batch, "old_log_probs")

        def learn(self, batch: Any) -> None:
            self.trained.append(batch)

        def fit(self) -> None:
            for self.global_steps in range(1, steps + 1):
                self.sim = verl.SimulatedStep(self.options, lambda used: used)
                batch = self._prompts()
                gen = self.repeated(self._get_gen_batch(batch))
                gen = self.async_rollout_manager.generate_sequences(gen)
                gen.meta_info.pop("timing", None)
                batch = self.repeated(batch).union(gen)
                scores, _ = verl.extract_reward(batch)
                batch = batch.union(self.score_again(batch))
                batch.batch["token_level_scores"] = scores
                batch.batch["token_level_rewards"] = scores
                batch = verl.compute_advantage(batch, adv_estimator="grpo", config=self.sim)
                self.learn(batch)
                self.logger.log(
                    data={"training/global_step": self.global_steps}, step=self.global_steps
                )

    return make(verl, kind=Mine)


def test_stages_under_other_names_are_said(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    run = audited(renamed(verl))
    assert run.summary["unseen"] == ["old_log_prob", "update_actor"]
    assert run.summary["observed"]["advantage.after"] == 1
    assert run.findings() == []
    assert "nothing was seen of old_log_prob, update_actor in 1 steps: Mine does not" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"stages": ["rollout", "advantage"]}, {"every_n_steps": 2}],
    ids=["stages", "steps"],
)
def test_what_was_left_out_is_not_missed(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    trainer = make(verl, steps=2)
    with attach(trainer, run_dir="run", **settings):
        trainer.fit()
    assert open_run("run").summary["unseen"] == []
    assert "nothing was seen" not in caplog.text


def test_an_actor_that_waits_for_its_critic_is_not_missed(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = renamed(verl)
    trainer.config.trainer.critic_warmup = 3
    assert audited(trainer).summary["unseen"] == ["old_log_prob"]


def test_an_error_in_looking_back_does_not_stop_training(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VerlRun, "_unseen", lambda *_: 1 / 0)
    trainer = make(verl)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert len(trainer.trained) == 1
    assert "DPA904 unseen failed" in caplog.text


# -- agent loops -----------------------------------------------------------------------------------


class Trajectory:
    """What only its author knows how to read."""


def test_fields_of_a_custom_agent_loop_are_let_through(verl: ModuleType) -> None:
    def change(out: Any) -> None:
        rows = len(out)
        out.batch["value_heads"] = torch.rand(rows, 3, 2)
        out.batch["halves"] = torch.rand(rows, 5).half()
        out.non_tensor_batch["trajectory"] = np.fromiter(
            (Trajectory() for _ in range(rows)), dtype=object
        )
        out.non_tensor_batch["turns"] = np.fromiter(
            ([{"role": "tool"}] * row for row in range(rows)), dtype=object
        )
        out.meta_info["loop"] = Trajectory()

    trainer = make(verl, **QUIET)
    sampling(trainer, change)
    run = audited(trainer)
    assert run.findings() == []
    assert {"value_heads", "halves", "trajectory", "turns"} <= set(run.summary["undeclared_fields"])


def test_meta_that_holds_itself_is_recorded_without_end(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def change(out: Any) -> None:
        state: dict[str, Any] = {"turns": ["a turn of this length"] * 9}
        state["parent"] = [state, state]
        out.meta_info["loop"] = state

    trainer = make(verl, **QUIET)
    sampling(trainer, change)
    run = audited(trainer)
    assert run.findings() == []
    assert "DPA90" not in caplog.text
    boundaries = Trace("run").step(1).boundaries
    told = [b for b in boundaries if "loop" in b.meta]
    assert len(told) > 10
    for boundary in told:
        assert boundary.meta["loop"]["turns"] == ["a turn of this length"] * 9
    assert sum(place_of(b.head["meta"]["loop"]) is None for b in told) == 1


@pytest.mark.parametrize("name", ["rollout_log_probs", "__num_turns__"])
def test_a_field_that_may_be_missing_is_not_missed(verl: ModuleType, name: str) -> None:
    def change(out: Any) -> None:
        out.batch.pop(name, None) if name in out.batch else out.non_tensor_batch.pop(name, None)

    trainer = make(verl, **QUIET)
    sampling(trainer, change)
    run = audited(trainer)
    assert run.findings() == []


@pytest.mark.parametrize("name", ["position_ids", "response_mask", "prompts"])
def test_a_field_that_must_not_be_missing_is_named_where_it_should_have_come(
    verl: ModuleType, name: str
) -> None:
    trainer = make(verl, **QUIET)
    sampling(trainer, lambda out: out.batch.pop(name))
    with attach(trainer, run_dir="run"), suppress(KeyError):  # verl needs some of them, too
        trainer.fit()
    found = open_run("run").findings()[0]
    assert (found.code, found.stage, found.field) == ("DPA101", "rollout", name)


# -- versions --------------------------------------------------------------------------------------


def test_an_untried_version_of_v1_gets_structure_checks_only(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verl_versions, "installed", lambda: "1.0.0")
    sys.modules.pop("transfer_queue", None)
    module = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    tracking = importlib.import_module("verl.utils.tracking").Tracking()
    trainer = module.PPOTrainer(config(trainer__v1={"trainer_mode": "sync"}), tracking, None, 1)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    sys.modules.pop("transfer_queue", None)
    assert "verl 1.0.0 is not one of the versions" in caplog.text
    assert attached.runs[0].closed is not None
    assert attached.runs[0].closed.auditor.level == "shape"
    assert open_run("run").findings() == []
