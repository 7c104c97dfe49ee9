"""Whole runs on Ray with real engines: a healthy one and its resume, a seeded fault, drills.

The runs of this module share one Ray. Those that only need some engine use the small `hf` one.
"""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

import dataproto_audit as da
from dataproto_audit.cli import _injected
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.testing.faults import FAULTS
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.run import run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_for_all")]

SMALL = [
    "data.train_batch_size=8",
    "data.val_batch_size=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "warmup.steps=20",
    "warmup.batch_size=16",
    "trainer.total_training_steps=3",
]
HF = [*SMALL, "actor_rollout_ref.rollout.name=hf"]
LOOP = [
    "prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob",
    "advantage", "update_actor", "sync_weights",
]  # fmt: skip


def configured(run_dir, overrides):
    return load_config("quickstart", [*overrides, f"trainer.run_dir={run_dir}"])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Six steps with checkpoints and validation: ``(result, folder)``.

    Twenty supervised steps teach next to nothing, so most groups have equal rewards, rightly told.
    """
    folder = tmp_path_factory.mktemp("runs") / "healthy"
    policy = folder.parent / "policy.yaml"
    policy.write_text("ignore: [DPA413]")
    extra = ["trainer.total_training_steps=6", "trainer.save_freq=3", "trainer.test_freq=6",
             f"audit.policy={policy}"]  # fmt: skip
    return run(configured(folder, [*SMALL, *extra])), folder


def test_a_healthy_run_ends_without_any_finding(healthy):
    result, folder = healthy
    summary = result.summary
    assert result.stopped_by is None
    assert summary["findings"] == {"fail": 0, "warn": 0, "info": 0}
    assert summary["outcomes"]["failed"] == 0
    assert summary["outcomes"]["passed"] > 500
    assert set(summary["stages"]) == {*LOOP, "validation"}
    # One sync before the first step; in each step all stages are left, and all but the first, whose
    # batch is made there, and the last, which carries no batch, are entered; one validation.
    assert summary["boundaries"] == 1 + 6 * (2 * len(LOOP) - 2) + 1
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


def test_its_tables_hold_every_step_and_every_outcome(healthy):
    result, folder = healthy
    opened = da.open_run(folder)
    assert opened.ok
    assert opened.finished
    rows = opened.table("rows")
    assert rows.groupby("step").size().to_dict() == dict.fromkeys(range(1, 7), 32)
    assert (rows.rollout_old_gap_max < 1e-3).all()
    groups = opened.table("groups")
    assert (groups.rows == 4).all()
    outcomes = opened.table("outcomes")
    silent = outcomes[outcomes.kind == "not_checkable"]
    to_come = (
        "fewer than",
        "no earlier steps",
        "not recorded: metrics",
        "setting unknown",
        "field",
    )
    few_tokens = silent.check.eq("entropy_of_the_sampled")
    assert (few_tokens | silent.reason.str.startswith(to_come)).all()
    kinds = outcomes.kind.value_counts().to_dict()
    counted = {kind: n for kind, n in result.summary["outcomes"].items() if n}
    assert kinds == counted
    loss = opened.table("loss")
    assert set(loss.term) == {"pg", "kl", "total"}
    assert (loss.difference < 1e-5).all()
    ranks = opened.table("ranks")
    assert set(ranks.stage) == {"old_log_prob", "ref_log_prob", "update_actor"}
    assert set(ranks["rank"]) == {0, 1}


def test_the_measured_evolution_of_fields_is_the_declared_one(healthy):
    _, folder = healthy
    fields = da.open_run(folder).table("fields")
    for stage, part in fields.groupby("stage"):
        declared = STAGES[stage]
        measured = set(part.field)
        allowed = {*declared.adds, *declared.may_add, *declared.changes}
        if declared.fresh:
            allowed |= set(declared.reads)
        assert measured <= allowed, stage
        assert set(declared.adds) <= measured, stage
        for name in measured:
            assert name in FIELDS


def test_a_resumed_run_repeats_the_next_step_exactly(healthy, tmp_path):
    _, folder = healthy
    overrides = [
        *SMALL, "trainer.total_training_steps=5", "trainer.resume_mode=path",
        f"trainer.resume_from_path={folder / 'checkpoints' / 'step_000003'}",
    ]  # fmt: skip
    result = run(configured(tmp_path / "resumed", overrides))
    assert result.summary["steps"] == 5
    first, second = da.open_run(folder), da.open_run(tmp_path / "resumed")
    for metric in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/kl_loss"):
        for step in (4, 5):
            assert first.metric(metric)[step] == second.metric(metric)[step], (metric, step)


def injected(fault, tmp_path, overrides=SMALL):
    config = configured(tmp_path / "run", [*overrides, f"audit.inject={fault}@2"])
    return run(config, callbacks=_injected(config.audit.inject)), tmp_path / "run"


CODE_OF = {
    "log_prob_shift": "DPA304",
    "mask_on_pad": "DPA205",
    "tiled_groups": "DPA404",
    "reward_on_pad": "DPA405",
    "stale_rollout_weights": "DPA605",
    "other_temperature": "DPA111",
}


@pytest.mark.parametrize(
    "fault",
    [
        "stale_rollout_weights",
        *(pytest.param(n, marks=pytest.mark.slow) for n in FAULTS if n != "stale_rollout_weights"),
    ],
)
def test_a_seeded_fault_stops_the_run_in_its_step_at_its_stage(fault, tmp_path):
    result, folder = injected(fault, tmp_path)
    finding = result.stopped_by.findings[0]
    assert (finding.step, finding.stage, finding.field) == (
        2,
        FAULTS[fault].stage,
        FAULTS[fault].field,
    )
    assert finding.code == CODE_OF[fault]
    assert finding.causes
    assert result.summary["steps"] == 1
    opened = da.open_run(folder)
    assert opened.table("findings").code[0] == finding.code
    assert set(opened.table("steps").step) == {0, 1, 2}
    if finding.rows:
        rows = opened.table("rows").query("step == 2")
        flagged = rows[rows["flags"].str.contains(finding.code)]
        assert len(flagged) == len(finding.rows)


def drill(tmp_path, overrides, callbacks=None, error=RunError):
    folder = tmp_path / "run"
    with pytest.raises(error) as caught:
        run(configured(folder, overrides), callbacks=callbacks)
    opened = da.open_run(folder)
    return caught.value, opened


def kill(name):
    """A callback that ends one process of that actor class as step 2 enters the update."""

    def hook(step, stage, batch):
        if (step, stage) == (2, "advantage"):
            for process in psutil.Process().children(recursive=True):
                if f"ray::{name}" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    return

    return Callbacks(after_stage=[hook])


def test_a_killed_worker_is_named_and_the_finished_step_is_kept(tmp_path):
    error, opened = drill(tmp_path, HF, kill("TrainWorker"))
    assert error.code == "DPA864"
    assert "no checkpoint to go on from (trainer.save_freq=-1)" in str(error)
    assert opened.last_step == 1
    assert len(opened.table("rows")) == 32


def test_a_killed_rollout_engine_is_named(tmp_path):
    error, opened = drill(tmp_path, HF, kill("HfEngine"))
    assert error.code == "DPA865"
    assert opened.last_step == 1


REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "


@pytest.mark.parametrize(
    ("body", "code", "fragment"),
    [
        ("1 / 0", "DPA860", "ZeroDivisionError"),
        pytest.param("float('nan')", "DPA861", "nan", marks=pytest.mark.slow),
        pytest.param("'good'", "DPA861", "good", marks=pytest.mark.slow),
    ],
)
def test_a_broken_reward_function_is_named_with_its_row(tmp_path, body, code, fragment):
    file = tmp_path / "reward.py"
    file.write_text(REWARD + body + "\n")
    overrides = [*HF, f"reward.custom_reward_function.path={file}",
                 "reward.custom_reward_function.name=compute_score"]  # fmt: skip
    error, _ = drill(tmp_path, overrides)
    assert error.code == code
    assert fragment in str(error)
    assert "row 0" in str(error)


def test_a_second_run_into_the_same_folder_is_refused(healthy):
    _, folder = healthy
    before = sorted(path.name for path in Path(folder).iterdir())
    with pytest.raises(UsageError, match="DPA801"):
        run(configured(folder, HF))
    assert sorted(path.name for path in Path(folder).iterdir()) == before
