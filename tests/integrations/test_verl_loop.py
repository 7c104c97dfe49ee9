"""Loops of subclasses: what lies between two calls is judged in verl's own loop only."""

import asyncio
from types import ModuleType
from typing import Any

import pytest

from dataproto_audit import attach, open_run
from dataproto_audit.integrations.verl_loop import Loop
from dataproto_audit.integrations.verl_versions import MODULE

from .conftest import make

QUIET = {"trainer__val_before_train": False, "trainer__test_freq": 0}
SAID = "has a loop of its own"


def of(cls: Any, verl: ModuleType, **changes: Any) -> Any:
    """A trainer of this class, ready for ``fit``."""
    return make(verl, kind=cls, steps=2, **QUIET, **changes)


def filtering(verl: ModuleType) -> Any:
    """As DAPO does: groups are dropped between two calls."""

    class Filtering(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def step(self) -> None:
            self.sim = verl.SimulatedStep(self.options, lambda used: used)
            batch = self._prompts()
            gen = self.repeated(self._get_gen_batch(batch))
            gen = self.async_rollout_manager.generate_sequences(gen)
            batch = self.repeated(batch).union(gen)
            self.sim.options = verl.Options(prompts=3)
            self.learn(batch.select_idxs(list(range(4, 16))))

        def learn(self, batch: Any) -> None:
            metrics: dict[str, Any] = {}
            self._balance_batch(batch, metrics=metrics)
            scores, _ = verl.extract_reward(batch)
            old, _ = self._compute_old_log_prob(batch)
            old.batch.pop("entropys")
            batch = batch.union(old).union(self._compute_ref_log_prob(batch))
            batch.batch["token_level_scores"] = scores
            batch.batch["token_level_rewards"] = scores
            batch = verl.compute_advantage(batch, adv_estimator="grpo", config=self.sim)
            self._update_actor(batch)
            self.logger.log(data=metrics, step=self.global_steps)

    return Filtering


def delegating(verl: ModuleType) -> Any:
    """``fit`` calls none of the stages itself."""

    class Delegating(filtering(verl)):  # type: ignore[misc]
        def fit(self) -> None:
            for self.global_steps in (1, 2):
                self.step()

    return Delegating


def decorated(verl: ModuleType) -> Any:
    """``fit`` is a function of no code that could be read."""

    class Loop:
        def __call__(self, trainer: Any) -> None:
            for trainer.global_steps in (1, 2):
                trainer.step()

    class Decorated(filtering(verl)):  # type: ignore[misc]
        def fit(self) -> None:
            Loop()(self)

    return Decorated


@pytest.mark.parametrize("kind", [delegating, decorated])
def test_a_loop_may_be_kept_anywhere(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    trainer = of(kind(verl), verl)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    run = open_run("run")
    assert run.findings() == []
    assert run.summary["switched_off"] == {}
    assert attached.observed["update_actor.after"] == 2
    assert caplog.text.count(SAID) == 1


def test_a_loop_that_replaces_the_one_of_an_object(verl: ModuleType) -> None:
    trainer = of(filtering(verl), verl)

    def fit() -> None:
        for trainer.global_steps in (1, 2):
            trainer.step()

    trainer.fit = fit
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert open_run("run").findings() == []
    assert attached.observed["update_actor.after"] == 2
    assert trainer.fit is fit


def test_what_a_call_itself_does_wrong_is_found_in_any_loop(verl: ModuleType) -> None:
    class Broken(delegating(verl)):  # type: ignore[misc]
        def _balance_batch(self, batch: Any, metrics: Any) -> None:
            super()._balance_batch(batch, metrics)
            batch.batch["responses"] = batch.batch["responses"].flip(0)

    trainer = of(Broken, verl)
    with attach(trainer, run_dir="run", on_fail="record"):
        trainer.fit()
    assert "DPA106" in {f.code for f in open_run("run").findings() if f.stage == "balance"}


@pytest.mark.parametrize("deep", [False, True])
def test_verls_own_loop_inside_another_one_is_known(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, deep: bool
) -> None:
    """Between two stages rows are mixed, which is a finding there."""

    class Mine(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        def fit(self) -> None:
            self.run() if deep else super().fit()

        def run(self) -> None:
            super().fit()

    trainer = of(Mine, verl)
    compute = trainer._compute_ref_log_prob

    def mixing(batch: Any) -> Any:
        made = compute(batch)
        batch.batch["responses"] = batch.batch["responses"].flip(0)
        return made

    with attach(trainer, run_dir="run", on_fail="record"):
        trainer.fit()
    assert SAID not in caplog.text
    assert open_run("run").findings() == []
    trainer = of(Mine, verl)
    # The hook is below: what it does to the batch happens between two stages.
    with attach(trainer, run_dir="mixed", on_fail="record"):
        compute = trainer._compute_ref_log_prob
        trainer._compute_ref_log_prob = mixing
        trainer.fit()
    assert "DPA113" in {finding.code for finding in open_run("mixed").findings()}


def test_rollouts_that_overlap_the_step_before(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """As one step off policy does: the next rows are sampled while these are trained on."""

    class Ahead(filtering(verl)):  # type: ignore[misc]
        async def sampled(self) -> Any:
            self.ahead = verl.SimulatedStep(self.options, lambda used: used)
            held, self.sim = self.sim, self.ahead
            batch = self._prompts()
            gen = self.repeated(self._get_gen_batch(batch))
            self.sim = held
            gen = await self.async_rollout_manager.generate_sequences(gen)
            return self.repeated(batch).union(gen)

        async def fit(self) -> None:
            self.sim, self.global_steps = None, 1
            following = asyncio.create_task(self.sampled())
            for self.global_steps in (1, 2):
                batch, self.sim = await following, self.ahead
                self.checkpoint_manager.update_weights(self.global_steps)
                following = asyncio.create_task(self.sampled())
                await asyncio.sleep(0)
                self.learn(batch)
            await following

    trainer = of(Ahead, verl)
    manager = trainer.async_rollout_manager
    sample = manager.generate_sequences

    async def slow(prompts: Any) -> Any:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        held, trainer.sim = trainer.sim, trainer.ahead
        made = sample(prompts)
        trainer.sim = held
        return made

    manager.generate_sequences = slow
    with attach(trainer, run_dir="run", on_fail="record") as attached:
        asyncio.run(trainer.fit())
    run = open_run("run")
    assert run.findings() == []
    assert run.summary["switched_off"] == {}
    assert attached.observed["rollout.before"] >= 2
    assert attached.observed["update_actor.after"] == 2
    assert caplog.text.count(SAID) == 1


def test_whose_loop_it_is(verl: ModuleType) -> None:
    class Plain(verl.RayPPOTrainer):  # type: ignore[name-defined, misc]
        pass

    trainer = of(Plain, verl)
    assert not Loop(trainer, "fit", MODULE).own
    assert Loop(trainer, "fit", MODULE).home is verl.RayPPOTrainer
    theirs = Loop(of(delegating(verl), verl), "fit", MODULE)
    assert theirs.own
    theirs.counts(theirs.trainer, 1)
    assert not theirs.own
    assert not theirs.elsewhere
    theirs.counts(theirs.trainer, -1)
    theirs.counts(trainer, 1)
    assert theirs.own
    assert theirs.elsewhere


# -- trainers inside of one another ----------------------------------------------------------------


def test_a_trainer_inside_that_nobody_audits_does_not_mix_in(verl: ModuleType) -> None:
    trainer, inner = make(verl, **QUIET), make(verl, steps=2, **QUIET)
    update = trainer._update_actor

    def with_another(batch: Any) -> Any:
        inner.fit()
        return update(batch)

    trainer._update_actor = with_another
    with attach(trainer, run_dir="run", on_fail="record") as attached:
        trainer.fit()
    assert open_run("run").findings() == []
    assert len(inner.trained) == 2
    assert set(attached.observed.values()) == {1, 2}
    assert [key for key, n in attached.observed.items() if n == 2] == ["sync_weights.after"]


def test_one_inside_that_raises_is_left_again(verl: ModuleType) -> None:
    trainer, inner = make(verl, **QUIET), make(verl, **QUIET)
    inner._update_actor = lambda batch: 1 / 0
    update = trainer._update_actor

    def with_another(batch: Any) -> Any:
        with pytest.raises(ZeroDivisionError):
            inner.fit()
        return update(batch)

    trainer._update_actor = with_another
    with attach(trainer, run_dir="run", on_fail="record") as attached:
        trainer.fit()
    assert attached.observed["update_actor.after"] == 1


# -- attaching and detaching while it runs ---------------------------------------------------------


def test_attaching_within_fit_is_said(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl, steps=3, **QUIET)
    update, made = trainer._update_actor, []

    def attaching(batch: Any) -> Any:
        if not made:
            made.append(attach(trainer, run_dir="run"))
        return update(batch)

    trainer._update_actor = attaching
    trainer.fit()
    assert caplog.text.count("trains outside of a fit that began after attaching") == 1
    assert made[0].observed == {}
    trainer.fit()  # the next one is seen
    made[0].detach()
    assert made[0].observed["update_actor.after"] == 3


def test_attaching_before_fit_says_nothing_of_that(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert "outside of a fit" not in caplog.text


@pytest.mark.parametrize(
    "stage", ["_update_actor", "_compute_old_log_prob", "_get_gen_batch", "_validate"]
)
def test_detaching_within_a_stage_is_quiet(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    trainer = make(verl, steps=2)
    call, made = getattr(trainer, stage), []

    def detaching(*args: Any) -> Any:
        result = call(*args)
        made[0].detach()
        return result

    setattr(trainer, stage, detaching)
    made.append(attach(trainer, run_dir="run"))
    trainer.fit()
    assert len(trainer.trained) == 2
    assert caplog.records == []
    assert getattr(trainer, stage) is detaching
    assert open_run("run").summary["switched_off"] == {}
