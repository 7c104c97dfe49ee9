"""Real runs of verl on a CPU, audited by environment only; ``make test-verl`` makes what they need.

The models are random and tiny; what the runs show is that every boundary is seen, that nothing is
said about a healthy run, and that the trained weights are the same bit by bit with the audit on.
"""

import re
from pathlib import Path

import pytest

from dataproto_audit import open_run

from .runs import ROLES, Finished, python, run, toy

pytestmark = [pytest.mark.verl, pytest.mark.engine]

STEP = ("prompts.after", "rollout.before", "rollout.after", "union.after")
GRPO = ("balance", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")
VALIDATES = ("trainer.val_before_train=True", "trainer.test_freq=1")


def boundaries(*stages: str) -> set[str]:
    sides = {f"{stage}.{when}" for stage in stages for when in ("before", "after")}
    return {*STEP, *sides, "sync_weights.after", "validation.after"}


def weights(done: Finished) -> list[str]:
    """Fingerprints of the weights that the rollout engine was sent, in order."""
    return re.findall(r"tiny weights \S+ [0-9a-f]{16}", done.log)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data for 0.7.1."""
    return made("0.7.1", tmp_path_factory)


def made(version: str, factory: pytest.TempPathFactory) -> Path:
    """Model and data, in a folder of their own."""
    assert python(version).exists(), "run `make test-verl`, which makes the environment"
    folder = factory.mktemp(f"toy-{version}-")
    toy(version, folder)
    return folder


def healthy(folder: Path, done: Finished, version: str, expected: set[str]) -> None:
    """The run ended well, was seen wholly, and nothing was said about it."""
    assert done.code == 0, done.log[-5000:]
    audited = open_run(folder)
    said = [str(f) for f in audited.findings() if f.severity != "info"]
    assert not said, "\n".join(said)
    observed = audited.summary["observed"]
    assert set(observed) == expected
    each = {observed[name] for name in observed if not name.startswith(("sync", "validation"))}
    assert each == {2}
    assert audited.summary["not_hooked"] == []
    assert audited.summary["switched_off"] == {}
    assert audited.summary["verl"] == version
    assert "audit/boundaries" in done.log


def test_grpo_with_legacy_workers_is_seen_and_healthy(data: Path) -> None:
    done = run("0.7.1", data, *VALIDATES, DATAPROTO_AUDIT_RUN_DIR=str(data / "grpo"))
    healthy(data / "grpo", done, "0.7.1", boundaries(*GRPO))


ENGINE = (
    "trainer.use_legacy_worker_impl=disable", f"{ROLES}.model.use_remove_padding=True",
    f"{ROLES}.actor.use_dynamic_bsz=True", f"{ROLES}.actor.ppo_max_token_len_per_gpu=120",
    f"{ROLES}.ref.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.ref.log_prob_max_token_len_per_gpu=120",
    f"{ROLES}.rollout.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.rollout.log_prob_max_token_len_per_gpu=120",
)  # fmt: skip
GAE = (
    "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True",
    f"{ROLES}.actor.use_kl_loss=False", f"{ROLES}.rollout.n=1",
    f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2",
    f"{ROLES}.rollout.log_prob_micro_batch_size_per_gpu=2",
    f"{ROLES}.ref.log_prob_micro_batch_size_per_gpu=2",
    "critic.ppo_mini_batch_size=2", "critic.ppo_micro_batch_size_per_gpu=2",
)  # fmt: skip
CRITIC = ("balance", "reward", "old_log_prob", "ref_log_prob", "values", "kl_reward", "advantage",
          "update_critic", "update_actor")  # fmt: skip
EXACT = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
V0 = ("trainer.use_v1=False", f"{ROLES}.model.use_remove_padding=True")
FP32 = tuple(f"++{ROLES}.{r}.fsdp_config.mixed_precision={EXACT}" for r in ("actor", "ref"))
LEGACY = ("critic.model.use_remove_padding=False",
          "critic.model.enable_gradient_checkpointing=False")  # fmt: skip


@pytest.mark.parametrize(
    ("version", "overrides", "stages"),
    [
        ("0.7.1", ENGINE, GRPO),
        ("0.7.1", (*GAE, *LEGACY), CRITIC),
        ("0.9.1", (*V0, *FP32), GRPO),
        ("0.9.1", (*V0, *GAE), CRITIC),
    ],
    ids=["0.7.1-engine-dynamic", "0.7.1-gae-legacy", "0.9.1-v0-fp32", "0.9.1-v0-gae"],
)
def test_other_runs_are_seen_and_healthy(
    version: str,
    overrides: tuple[str, ...],
    stages: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made(version, tmp_path_factory)
    critic = (f"critic.model.path={folder}/model",) if stages is CRITIC else ()
    done = run(
        version, folder, *VALIDATES, *overrides, *critic,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"),
    )  # fmt: skip
    healthy(folder / "run", done, version, boundaries(*stages))


def test_weights_are_the_same_without_the_audit(data: Path) -> None:
    """One row a prompt, so that what is sampled for a row does not depend on who asks first, and no
    critic, whose last layer verl draws without a seed."""
    overrides = (
        *VALIDATES, "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLES}.rollout.n=1",
        f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    audited = run("0.7.1", data, *overrides, DATAPROTO_AUDIT_RUN_DIR=str(data / "rpp"))
    plain = run("0.7.1", data, *overrides, audit=False)
    healthy(data / "rpp", audited, "0.7.1", boundaries(*GRPO))
    assert plain.code == 0, plain.log[-5000:]
    assert "audit/" not in plain.log
    assert len(weights(audited)) == 3
    assert weights(plain) == weights(audited)


FAULTS = {
    "reference_hot": "ref_log_prob",  # first, because step 1 has policy and reference equal
    "tiled": "rollout",
    "uid_late": "rollout",
    "mask_all": "rollout",
    "positions_shifted": "rollout",
    "attends_padding": "rollout",
    "rollout_zeros": "rollout",
    "union_rows": "union",
    "uid_rolled": "balance",
    "rows_mixed": "balance",
    "reward_shifted": "reward",
    "reward_rows": "reward",
    "old_shifted": "old_log_prob",
    "old_rows": "old_log_prob",
    "batch_norm": "advantage",
    "sign_flipped": "advantage",
    "update_writes": "update_actor",
}
"""Faults inside verl (without_gpu/seeded_faults.py), one in each step, and their stages."""


def test_faults_inside_verl_are_found_at_their_stage_in_their_step(data: Path) -> None:
    quiet = len(FAULTS) + 1
    seeded = ",".join(f"{step}:{name}" for step, name in enumerate(FAULTS, 1))
    done = run(
        "0.7.1", data, "trainer.val_before_train=False", "trainer.test_freq=-1", steps=quiet,
        DATAPROTO_AUDIT_RUN_DIR=str(data / "faults"), SEEDED=seeded,
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    found = [f for f in open_run(data / "faults").findings() if f.severity == "fail"]
    stages = {
        name: next((f.stage for f in found if f.step == step), None)
        for step, name in enumerate(FAULTS, 1)
    }
    assert stages == FAULTS
    assert [f for f in found if f.step == quiet] == []


def test_the_crash_of_remax_in_0_7_1_is_explained(data: Path) -> None:
    """Its greedy rollout leaves ``score`` in the batch, and the union of step 1 fails."""
    done = run(
        "0.7.1", data, "trainer.val_before_train=False", "trainer.test_freq=-1",
        "algorithm.adv_estimator=remax", DATAPROTO_AUDIT_RUN_DIR=str(data / "remax"),
    )  # fmt: skip
    assert done.code != 0
    assert "verl raised in union of step 1: AssertionError: `score`" in done.log
    assert "DPA115 at union: score" in done.log.partition("Diagnosis:")[2]
    kept = {p.name for p in (data / "remax" / "trace" / "step_000001" / "union").iterdir()}
    assert kept == {"left.pkl", "right.pkl"}
    assert open_run(data / "remax").summary["error"].startswith("AssertionError: `score`")


JUDGED = {f"DPA{code}" for code in (501, 502, 503, 701, 702, 703, 704, 705, 706)}
LEGACY_UNSEEN = {"DPA503", "DPA704", "DPA706"}
"""Its losses have no normaliser; micro-batches are cut by rows there, and rows are padded."""
TWO = ("trainer.n_gpus_per_node=2", f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2")


@pytest.mark.parametrize(
    ("version", "overrides", "unseen"),
    [
        ("0.7.1", (), LEGACY_UNSEEN),
        ("0.7.1", ENGINE, set()),
        ("0.9.1", (*V0, *FP32), {"DPA704"}),
    ],
    ids=["0.7.1-legacy", "0.7.1-engine-dynamic", "0.9.1-v0-fp32"],
)
def test_workers_that_are_looked_into_are_healthy(
    version: str,
    overrides: tuple[str, ...],
    unseen: set[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made(version, tmp_path_factory)
    done = run(
        version, folder, *VALIDATES, *overrides,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
    )  # fmt: skip
    healthy(folder / "run", done, version, boundaries(*GRPO))
    assert passed(folder / "run") & JUDGED == JUDGED - unseen
    assert not (folder / "run" / "ranks").exists()


def passed(folder: Path) -> set[str]:
    """Codes that passed in the update of every step."""
    outcomes = open_run(folder).table("outcomes")
    update = outcomes[outcomes["stage"] == "update_actor"]
    good = update[update["kind"] == "passed"].groupby("code")["step"].nunique()
    return set(good[good == 2].index)


def test_two_ranks_tell_of_their_own_rows(data: Path) -> None:
    done = run(
        "0.7.1", data, *TWO, "trainer.val_before_train=False", "trainer.test_freq=-1",
        DATAPROTO_AUDIT_RUN_DIR=str(data / "two"), DATAPROTO_AUDIT_WORKERS="1",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    assert passed(data / "two") & JUDGED == JUDGED - LEGACY_UNSEEN
    assert not [f for f in open_run(data / "two").findings() if f.severity != "info"]


def test_faults_inside_workers_are_found_in_their_update(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made("0.9.1", tmp_path_factory)
    done = run(
        "0.9.1", folder, *V0, *FP32, "trainer.val_before_train=False", "trainer.test_freq=-1",
        steps=4, DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
        WORKER_FAULTS="dropped,scaled,packed",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    found = [f for f in open_run(folder / "run").findings() if f.severity == "fail"]
    codes = {step: {f.code for f in found if f.step == step} for step in (1, 2, 3, 4)}
    assert "DPA703" in codes[1]
    assert codes[2] == {"DPA502"}
    assert "DPA706" in codes[3]
    assert codes[4] == set()
    assert {f.stage for f in found} == {"update_actor"}


V1_STEP = {"prompts.after", "rollout.after", "reward.after"}
DYNAMIC_V1 = (
    *ENGINE[1:], "critic.ppo_max_token_len_per_gpu=120",
    "critic.forward_max_token_len_per_gpu=120",
)  # fmt: skip
V1 = ("trainer.use_v1=True", f"{ROLES}.model.use_remove_padding=True")
V1_FSDP2 = (
    *V1, "trainer.n_gpus_per_node=2", f"{ROLES}.rollout.n_gpus_per_node=2",
    f"{ROLES}.actor.strategy=fsdp2", f"{ROLES}.ref.strategy=fsdp2", "critic.strategy=fsdp2",
)  # fmt: skip


def seen_in_v1(*stages: str) -> set[str]:
    """Boundaries of a V1 run: the rollout has no entry, and scores come with its rows."""
    return boundaries(*stages) - {*STEP, "reward.before"} | V1_STEP


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [(V1, GRPO), ((*V1, *GAE, *DYNAMIC_V1), CRITIC), (V1_FSDP2, GRPO)],
    ids=["0.9.1-v1-grpo", "0.9.1-v1-gae-dynamic", "0.9.1-v1-fsdp2-two-processes"],
)
def test_the_v1_trainer_is_seen_and_healthy(
    overrides: tuple[str, ...], stages: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = made("0.9.1", tmp_path_factory)
    critic = (f"critic.model.path={folder}/model",) if stages is CRITIC else ()
    done = run(
        "0.9.1", folder, *VALIDATES, *overrides, *critic,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"),
    )  # fmt: skip
    healthy(folder / "run", done, "0.9.1", seen_in_v1(*stages))


FAULTS_V1 = {
    "reference_hot": "ref_log_prob",  # first, because step 1 has policy and reference equal
    "old_shifted": "old_log_prob",
    "old_swapped": "old_log_prob",
    "keys_reordered": "ref_log_prob",
    "sign_flipped": "advantage",
    "keys_dropped": "ref_log_prob",  # last, because the rows stay in the store
}
"""Faults inside V1 (without_gpu/seeded_faults_v1.py), one in each step, and their stages."""


def test_faults_inside_v1_are_found_at_their_stage_in_their_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made("0.9.1", tmp_path_factory)
    seeded = ",".join(f"{step}:{name}" for step, name in enumerate(FAULTS_V1, 1))
    done = run(
        "0.9.1", folder, *V1, "trainer.val_before_train=False", "trainer.test_freq=-1",
        steps=len(FAULTS_V1), DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), SEEDED_V1=seeded,
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    found = [f for f in open_run(folder / "run").findings() if f.severity == "fail"]
    stages = {
        name: next((f.stage for f in found if f.step == step), None)
        for step, name in enumerate(FAULTS_V1, 1)
    }
    assert stages == FAULTS_V1
    assert {f.rows for f in found if f.code == "DPA105"} == {(0, 1)}
