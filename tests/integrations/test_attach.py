"""Attaching and detaching: what is replaced comes back, twice is once, nothing is harmed."""

import importlib
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.auditor import Auditor
from dataproto_audit.codes import UsageError
from dataproto_audit.integrations.session import Session
from dataproto_audit.protocol import DataProto

from .conftest import make

NAMES = ("compute_advantage", "apply_kl_penalty", "extract_reward", "compute_data_metrics")


def originals(verl: ModuleType, trainer: Any) -> dict[str, Any]:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    tracking = importlib.import_module("verl.utils.tracking").Tracking
    return {
        **{name: vars(verl)[name] for name in NAMES},
        **{f"helper.{k}": v for k, v in vars(helper).items() if callable(v)},
        "log": vars(tracking)["log"],
        "union": vars(DataProto)["union"],
        "init": vars(verl.RayPPOTrainer)["__init__"],
        "trainer": dict(vars(trainer)),
        "manager": dict(vars(trainer.async_rollout_manager)),
        "engine": dict(vars(trainer.checkpoint_manager)),
    }


def test_detach_restores_every_original(verl: ModuleType) -> None:
    trainer = make(verl)
    before = originals(verl, trainer)
    attached = attach(trainer, tables=False)
    assert originals(verl, trainer) != before
    attached.detach()
    assert originals(verl, trainer) == before
    attached.detach()
    assert originals(verl, trainer) == before


def test_a_detached_trainer_trains_unseen(verl: ModuleType) -> None:
    trainer = make(verl)
    attached = attach(trainer, tables=False)
    attached.detach()
    trainer.fit()
    assert attached.observed == {}
    assert len(trainer.trained) == 1


def test_attaching_twice_is_attaching_once(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl)
    with attach(trainer, tables=False) as one:
        other = attach(trainer, level="shape", tables=False)
        trainer.fit()
    assert "audited already" in caplog.text
    assert "without effect are level='shape'." in caplog.text
    assert one.observed["advantage.after"] == other.observed["advantage.after"] == 1
    assert other.runs == []


def test_a_block_inside_does_not_end_the_attachment_around_it(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(tables=False) as waiting:
        first = make(verl)
        with attach(first, tables=False) as inner:
            first.fit()
        assert inner.observed["advantage.after"] == 1
        first.fit()
        second = make(verl)
        second.fit()
        assert waiting.observed["advantage.after"] == 2  # the last run of each trainer
        assert waiting.observed["sync_weights.after"] == 4
    assert "without effect" not in caplog.text
    assert "fit" not in vars(first)


def test_two_that_wait_are_told_apart_by_who_came_first(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(tables=False) as outer:
        with attach(tables=False, every_n_steps=2) as inner:
            trainer = make(verl)
        trainer.fit()
        assert outer.observed["advantage.after"] == inner.observed["advantage.after"] == 1
        assert "without effect are every_n_steps=2." in caplog.text
        make(verl).fit()
        assert outer.observed["advantage.after"] == 2
    assert inner.observed["advantage.after"] == 1


def test_one_that_came_later_audits_once_the_first_has_ended(verl: ModuleType) -> None:
    trainer = make(verl)
    attach(trainer, tables=False).detach()
    with attach(trainer, tables=False) as second:
        trainer.fit()
    assert second.observed["advantage.after"] == 1


def test_two_trainers_are_told_apart(verl: ModuleType) -> None:
    first, second = make(verl), make(verl, steps=2)
    with attach(first, tables=False) as one, attach(second, tables=False) as two:
        first.fit()
        second.fit()
    assert one.observed["advantage.after"] == 1
    assert two.observed["advantage.after"] == 2


def test_without_a_trainer_it_waits_for_one(verl: ModuleType) -> None:
    constructor = vars(verl.RayPPOTrainer)["__init__"]
    with attach(tables=False) as attached:
        trainer = make(verl)
        trainer.fit()
    assert attached.observed["rollout.after"] == 1
    assert vars(verl.RayPPOTrainer)["__init__"] is constructor
    make(verl).fit()
    assert attached.observed["rollout.after"] == 1


def test_waiting_begins_before_the_import(verl: ModuleType) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        del sys.modules[name]
    with attach(tables=False) as attached:
        again = importlib.import_module("verl.trainer.ppo.ray_trainer")
        assert again is not verl
        make(again).fit()
    assert attached.observed["rollout.after"] == 1
    assert not [finder for finder in sys.meta_path if "OnImport" in type(finder).__name__]


def test_a_subclass_with_a_fit_of_its_own(verl: ModuleType) -> None:
    class Mine(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def fit(self) -> None:
            super().fit()

    trainer = make(verl, kind=Mine)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed["advantage.after"] == 1
    assert open_run("run").findings() == []


def test_a_loop_of_its_own_is_looked_at_stage_by_stage(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """As DAPO does: groups are dropped between two stages, which is no finding."""

    class Filtering(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def fit(self) -> None:
            self.global_steps, metrics = 1, {}
            self.sim = verl.SimulatedStep(self.options, lambda used: used)
            batch = self._prompts()
            gen = self.repeated(self._get_gen_batch(batch))
            gen = self.async_rollout_manager.generate_sequences(gen)
            gen.meta_info.pop("timing", None)
            batch = self.repeated(batch).union(gen)
            batch = batch.select_idxs(list(range(4, 16)))
            self.sim.options = verl.Options(prompts=3)
            self._balance_batch(batch, metrics=metrics)
            scores, _ = verl.extract_reward(batch)
            old, _ = self._compute_old_log_prob(batch)
            old.batch.pop("entropys")
            batch = batch.union(old).union(self._compute_ref_log_prob(batch))
            batch.batch["token_level_scores"] = scores
            batch.batch["token_level_rewards"] = scores
            batch = verl.compute_advantage(batch, adv_estimator="grpo", config=self.sim)
            self._update_actor(batch)
            self.logger.log(data=metrics, step=1)

    trainer = make(verl, kind=Filtering)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed["update_actor.after"] == 1
    assert open_run("run").findings() == []
    assert "Filtering has a loop of its own" in caplog.text


def test_managers_may_come_after_attaching(verl: ModuleType) -> None:
    plain = make(verl)
    trainer = verl.RayPPOTrainer(plain.config, plain.logger)
    with attach(trainer, tables=False) as attached:
        trainer.init_workers()
        trainer.fit()
    assert attached.observed["rollout.after"] == 1
    assert attached.observed["sync_weights.after"] == 2


def test_other_objects_are_refused() -> None:
    with pytest.raises(UsageError, match="no trainer that can be attached to") as caught:
        attach(object())
    assert caught.value.code == "DPA859"
    assert "PPOTrainer" in str(caught.value)


def test_a_class_is_refused(verl: ModuleType) -> None:
    with pytest.raises(UsageError, match="RayPPOTrainer is a class") as caught:
        attach(verl.RayPPOTrainer)
    assert caught.value.code == "DPA859"
    assert "attach() without one" in str(caught.value)


def test_wrong_settings_are_refused(verl: ModuleType) -> None:
    trainer = make(verl)
    with pytest.raises(UsageError, match="on_fail"):
        attach(trainer, on_fail="maybe")
    assert "fit" not in vars(trainer)


# -- safety ----------------------------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    numbers = np.random.get_state()
    return (random.getstate(), numbers[1].tobytes(), numbers[2], torch.get_rng_state().tolist())


def marks(batch: Any) -> dict[str, tuple[int, int]]:
    fields = batch["batch"] if isinstance(batch, dict) else (batch.batch if batch else None)
    return {name: (id(t), t._version) for name, t in (fields.items() if fields is not None else ())}


def test_audit_calls_leave_random_states_and_tensors_alone(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    judge = Auditor.boundary
    calls = Session.boundary

    def drawing(self: Any, stage: str, batch: Any, **kwargs: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return judge(self, stage, batch, **kwargs)

    def watched(self: Any, stage: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = state(), marks(batch)
        calls(self, stage, batch, *args, **kwargs)
        assert (state(), marks(batch)) == before
        judged.append(stage)

    monkeypatch.setattr(Auditor, "boundary", drawing)
    monkeypatch.setattr(Session, "boundary", watched)
    with attach(make(verl), run_dir="run") as attached:
        attached.runs[0].trainer.fit()
    assert len(judged) > 15


def test_training_is_the_same_with_and_without(verl: ModuleType) -> None:
    plain, audited = make(verl, steps=2), make(verl, steps=2)
    torch.manual_seed(1)
    plain.fit()
    torch.manual_seed(1)
    with attach(audited, run_dir="run"):
        audited.fit()
    for one, other in zip(plain.trained, audited.trained, strict=True):
        assert set(one.batch.keys()) == set(other.batch.keys())
        for name, tensor in one.batch.items():
            assert torch.equal(tensor, other.batch[name]), name


@pytest.mark.parametrize("broken", ["boundary", "begin_step", "end_step"])
def test_an_error_of_ours_is_told_once_and_training_goes_on(
    verl: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Auditor, broken, fail)
    trainer = make(verl, steps=3)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert len(trainer.trained) == 3
    told = [r.getMessage() for r in caplog.records if "DPA904" in r.getMessage()]
    assert told
    assert len(told) == len(set(told))
    assert attached.runs[0].closed is None or attached.runs[0].closed.off


def test_a_fault_of_ours_at_every_boundary_is_told_once(
    verl: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Auditor, "boundary", lambda *_, **__: 1 / 0)
    trainer = make(verl, steps=2)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert len([r for r in caplog.records if "DPA904" in r.getMessage()]) == 1
    off = open_run("run").summary["switched_off"]
    assert len(off) > 10
    assert set(off.values()) == {"ZeroDivisionError: division by zero"}
    [end] = [line for line in capsys.readouterr().err.splitlines() if "switched off" in line]
    assert end.count("boundary ") == 3
    assert f" and {len(off) - 3} more" in end


def test_our_start_failing_does_not_stop_training(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *_, **__: 1 / 0)
    trainer = make(verl)
    with attach(trainer):
        trainer.fit()
    assert len(trainer.trained) == 1
    assert "DPA904" in caplog.text


# -- gates -----------------------------------------------------------------------------------------


def test_every_n_steps(verl: ModuleType) -> None:
    trainer = make(verl, steps=5, trainer__test_freq=0)
    with attach(trainer, run_dir="run", every_n_steps=2) as attached:
        trainer.fit()
    assert attached.observed["advantage.after"] == 3
    outcomes = open_run("run").table("outcomes")
    seen = outcomes[outcomes["stage"] == "advantage"]["step"].unique()
    assert sorted(seen) == [1, 3, 5]
    assert open_run("run").findings() == []
    assert len(open_run("run").metric("actor/grad_norm")) == 5


def test_some_stages(verl: ModuleType) -> None:
    trainer = make(verl, steps=2)
    with attach(trainer, run_dir="run", stages=["rollout", "advantage"]) as attached:
        trainer.fit()
    assert set(attached.observed) == {
        "prompts.after", "rollout.before", "rollout.after", "advantage.before", "advantage.after",
    }  # fmt: skip
    assert open_run("run").findings() == []


@pytest.mark.parametrize("stage", ["union", "balance", "reward", "old_log_prob", "update_actor"])
def test_one_stage_alone_is_quiet(verl: ModuleType, stage: str) -> None:
    trainer = make(verl)
    with attach(trainer, run_dir="run", stages=stage) as attached:
        trainer.fit()
    assert attached.observed[f"{stage}.after"] == 1
    assert open_run("run").findings() == []


def test_other_ranks_stay_alone(verl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    trainer = make(verl)
    with attach(trainer, ranks=(0,)) as attached:
        trainer.fit()
    assert attached.observed == {}
    assert "fit" not in vars(trainer)


def test_level_off_observes_nothing_that_costs(verl: ModuleType) -> None:
    trainer = make(verl)
    with attach(trainer, level="off") as attached:
        trainer.fit()
    assert attached.runs == []
    assert "fit" not in vars(trainer)


@pytest.mark.parametrize("critic", [False, True])
def test_a_sample_of_rows_is_quiet_and_whole_in_groups(verl: ModuleType, critic: bool) -> None:
    from dataproto_audit.testing.options import Options

    changes: dict[str, Any] = {}
    options = Options()
    if critic:
        changes = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True,
                   "actor_rollout_ref__actor__use_kl_loss": False}  # fmt: skip
        options = Options(critic=True, kl_in_reward=True, estimator="gae")
    trainer = make(verl, options=options, **changes)
    with attach(trainer, run_dir="run", rows=8):
        trainer.fit()
    run = open_run("run")
    assert run.findings() == []
    assert len(run.table("rows")) == 8
    assert sorted(run.table("groups")["rows"]) == [4, 4]


def test_a_sample_still_finds_what_it_holds(verl: ModuleType) -> None:
    trainer = make(verl, trainer__val_before_train=False, trainer__test_freq=0)
    original = trainer._compute_old_log_prob

    def shifted(batch: Any) -> Any:
        out, more = original(batch)
        out.batch["old_log_probs"] = torch.roll(out.batch["old_log_probs"], 1, 1)
        return out, more

    trainer._compute_old_log_prob = shifted
    with attach(trainer, run_dir="run", rows=8):
        trainer.fit()
    assert "old_log_prob" in {f.stage for f in open_run("run").findings() if f.severity == "fail"}


def test_an_object_whose_class_has_no_fit_is_refused() -> None:
    call = lambda *_: None  # noqa: E731 - four names for one stand-in
    made = SimpleNamespace(fit=call, _get_gen_batch=call, _compute_old_log_prob=call,
                           _update_actor=call)  # fmt: skip
    with pytest.raises(UsageError, match="its class has no fit") as caught:
        attach(made)
    assert caught.value.code == "DPA859"
