"""Boundaries of the V1 trainer, seen through the stand-in: all of them, quiet when healthy."""

import importlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.dump.trace import Trace
from dataproto_audit.integrations import verl_versions
from dataproto_audit.integrations.verl_v1_store import grouped, uid_of
from dataproto_audit.testing.options import Options

from .conftest import config

SYNC = {"trainer__v1": {"trainer_mode": "sync"}}


@pytest.fixture
def v1(verl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the trainer."""
    monkeypatch.setattr(verl_versions, "installed", lambda: "0.9.1")
    sys.modules.pop("transfer_queue", None)
    yield importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    del sys.modules["transfer_queue"]


def make(v1: ModuleType, *, steps: int = 1, options: Options | None = None, **changes: Any) -> Any:
    tracking = importlib.import_module("verl.utils.tracking").Tracking()
    return v1.PPOTrainer(config(**{**SYNC, **changes}), tracking, options, steps)


def sides(*stages: str) -> list[str]:
    return [f"{stage}.{when}" for stage in stages for when in ("before", "after")]


STEP = ["prompts.after", "rollout.after", "reward.after"]
GRPO = ["balance", "old_log_prob", "ref_log_prob", "advantage", "update_actor"]
GAE = ["balance", "old_log_prob", "ref_log_prob", "values", "kl_reward", "advantage",
       "update_critic", "update_actor"]  # fmt: skip
CRITIC = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True,
          "actor_rollout_ref__actor__use_kl_loss": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "stages"),
    [({}, Options(), GRPO),
     (CRITIC, Options(critic=True, kl_in_reward=True, estimator="gae"), GAE)],
    ids=["grpo", "gae"],
)  # fmt: skip
def test_every_boundary_is_seen_and_healthy_runs_are_quiet(
    v1: ModuleType, changes: dict[str, Any], options: Options, stages: list[str]
) -> None:
    trainer = make(v1, steps=2, options=options, **changes)
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    run = open_run("run")
    assert [str(f) for f in run.findings() if f.severity != "info"] == []
    expected = dict.fromkeys([*STEP, *sides(*stages)], 2)
    assert attached.observed == {**expected, "sync_weights.after": 2, "validation.after": 1}
    assert run.summary["switched_off"] == {}
    assert run.summary["not_hooked"] == []
    assert "audit/boundaries" in trainer.logger.logged[-1][1]
    assert "actor/grad_norm" in set(run.table("steps")["metric"])


def shuffled(rows: int) -> list[int]:
    return [int(row) for row in np.random.default_rng(5).permutation(rows)]


def stale(trainer: Any) -> None:
    trainer.stale = 2
    trainer.config.trainer.v1.trainer_mode = "colocate_async"


def padded(trainer: Any) -> None:
    trainer.pads = 2


def late(trainer: Any) -> None:
    trainer.arrival = shuffled


@pytest.mark.parametrize("change", [late, padded, stale])
def test_arrival_padding_rows_and_staleness_are_healthy(
    v1: ModuleType, change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(v1, steps=2)
    change(trainer)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert [str(f) for f in open_run("run").findings() if f.severity != "info"] == []
    assert open_run("run").summary["switched_off"] == {}
    assert caplog.messages == []


def changed(trainer: Any, method: str, change: Callable[[Any], Any]) -> None:
    original = getattr(trainer, method)
    setattr(trainer, method, lambda batch, metrics: change(original(batch, metrics)))


def test_a_dropped_key_is_found_where_it_is_dropped(v1: ModuleType) -> None:
    trainer = make(v1)
    changed(trainer, "_compute_ref_log_prob", lambda meta: meta.select_keys(meta.keys[:-1]))
    with attach(trainer, run_dir="run"):
        trainer.fit()
    found = [f for f in open_run("run").findings() if f.severity == "fail"]
    assert (found[0].stage, found[0].step) == ("ref_log_prob", 1)


def test_a_key_dropped_between_stages_is_found_at_the_next_entry(v1: ModuleType) -> None:
    trainer = make(v1)
    with attach(trainer, run_dir="run"):
        changed(trainer, "_compute_ref_log_prob", lambda meta: meta.select_keys(meta.keys[:-1]))
        trainer.fit()
    found = [f for f in open_run("run").findings() if f.severity == "fail"]
    assert (found[0].stage, found[0].when, found[0].code) == ("advantage", "before", "DPA113")


def test_values_under_swapped_keys_are_found_by_row(v1: ModuleType) -> None:
    trainer = make(v1)
    queue: Any = sys.modules["transfer_queue"]

    def swapped(meta: Any) -> Any:
        rows = [queue.STORE["train"][key] for key in meta.keys]
        pairs = [(a, b) for a in range(len(rows)) for b in range(a)
                 if len(rows[a]["responses"]) == len(rows[b]["responses"]) > 2]  # fmt: skip
        first, second = (rows[row] for row in pairs[0])
        expected.update(pairs[0])
        name = "old_log_probs"
        first[name], second[name] = second[name], first[name]
        return meta

    expected: set[int] = set()
    changed(trainer, "_compute_old_log_prob", swapped)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    found = [f for f in open_run("run").findings() if f.severity == "fail"]
    assert found[0].stage == "old_log_prob"
    assert {row for f in found if f.stage == "old_log_prob" for row in f.rows} >= expected


def test_keys_in_another_order_are_found(v1: ModuleType) -> None:
    trainer = make(v1)
    changed(trainer, "_compute_ref_log_prob", lambda meta: meta.select_keys(meta.keys[::-1]))
    with attach(trainer, run_dir="run"):
        trainer.fit()
    found = [f for f in open_run("run").findings() if f.severity == "fail"]
    assert found[0].stage == "ref_log_prob"


def test_an_error_of_ours_is_logged_once_and_training_goes_on(
    v1: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(v1, steps=3)
    with attach(trainer, run_dir="run"), monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transfer_queue")
        trainer.fit()
    assert len(trainer.trained) == 3
    assert len([m for m in caplog.messages if "DPA904" in m]) == 1
    off = open_run("run").summary["switched_off"]
    assert len(off) > 1
    assert "_update_actor" in off


def test_an_error_of_verl_goes_on_and_its_input_is_kept(
    v1: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(v1)

    def broken(batch: Any, metrics: Any) -> Any:
        raise RuntimeError("no values today")

    trainer._compute_ref_log_prob = broken
    with attach(trainer, run_dir="run"), pytest.raises(RuntimeError, match="no values today"):
        trainer.fit()
    assert "verl raised in ref_log_prob of step 1" in caplog.text
    kept = Trace("run").step(1).boundaries[-1]
    assert (kept.stage, kept.part) == ("ref_log_prob", "input")


def test_stages_that_are_left_out_are_not_read(v1: ModuleType) -> None:
    queue: Any = sys.modules["transfer_queue"]
    trainer = make(v1, steps=2, trainer__val_before_train=False)
    with attach(trainer, run_dir="run", stages=("update_actor",), every_n_steps=2) as attached:
        trainer.fit()
    assert len(queue.READS) == 2
    assert set(attached.observed) == {"prompts.after", "update_actor.before", "update_actor.after"}


def test_the_store_and_the_random_states_are_as_without_us(v1: ModuleType) -> None:
    queue: Any = sys.modules["transfer_queue"]
    seen: list[dict[str, dict[str, Any]]] = []

    def kept(meta: Any) -> Any:
        seen.append({key: dict(row) for key, row in queue.STORE["train"].items()})
        return meta

    def run(*, audited: bool) -> Any:
        queue.STORE.clear()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        trainer = make(v1)
        changed(trainer, "_update_actor", kept)
        if audited:
            with attach(trainer, tables=False):
                trainer.fit()
        else:
            trainer.fit()
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert run(audited=True) == run(audited=False)
    with_us, without = seen
    assert list(with_us) == list(without)
    for key, row in with_us.items():
        assert list(row) == list(without[key])
        for name, value in row.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, without[key][name])


def test_detach_restores_every_original(v1: ModuleType) -> None:
    trainer = make(v1)
    owners = (trainer, v1, trainer.replay_buffer, trainer.checkpoint_manager)
    before = [dict(vars(owner)) for owner in owners]
    attached = attach(trainer, tables=False)
    assert [dict(vars(owner)) for owner in owners] != before
    attached.detach()
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_trainer_made_later_is_attached_to(v1: ModuleType) -> None:
    with attach(run_dir="run") as attached:
        make(v1).fit()
    assert attached.observed["update_actor.after"] == 1


def test_rows_of_a_prompt_are_put_side_by_side() -> None:
    keys = ["b_1_0", "a_0_0", "b_0_1", "a_10_0", "b_0_0", "a_2_0"]
    assert [keys[row] for row in grouped(keys)] == [
        "b_0_0", "b_0_1", "b_1_0", "a_0_0", "a_2_0", "a_10_0",
    ]  # fmt: skip
    assert uid_of("no_form") == "no_form"


def test_a_second_local_update_is_left_out_and_said(
    v1: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = make(v1)
    trainer.local_trigger_step = 1
    with attach(trainer, run_dir="run") as attached:
        trainer.fit()
    assert attached.observed["update_actor.after"] == 0
    assert "parameter_sync_step is larger than 1" in caplog.text
