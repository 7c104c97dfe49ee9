"""Defects of verl's own: silent ones are found in their first step, crashes are explained.

Numbers are those of docs/verl-flow.md.
"""

import re
from pathlib import Path

import pytest

from dataproto_audit import open_run

from .configs import ENGINE, GAE, LEGACY, QUIET, TOOLS, TWO
from .looks import failed, made
from .runs import ROLES, run

pytestmark = [pytest.mark.verl, pytest.mark.engine]

LIMIT = 60
TIGHT = (
    f"{ROLES}.actor.use_dynamic_bsz=True", f"{ROLES}.actor.ppo_max_token_len_per_gpu={LIMIT}",
    f"{ROLES}.ref.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.ref.log_prob_max_token_len_per_gpu={LIMIT}",
    f"{ROLES}.rollout.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.rollout.log_prob_max_token_len_per_gpu={LIMIT}",
)  # fmt: skip
"""Rows of about 40 tokens: packs of one row fit, and there are fewer packs than rows."""
ONE_ROW = (
    f"critic.ppo_max_token_len_per_gpu={LIMIT}", f"critic.forward_max_token_len_per_gpu={LIMIT}",
    "++critic.model.override_config.attn_implementation=sdpa",
)  # fmt: skip
"""The critic's micro-batches hold one row of the two of a mini-batch."""
ULYSSES = (
    "trainer.n_gpus_per_node=2", f"{ROLES}.rollout.n_gpus_per_node=2",
    f"{ROLES}.model.use_remove_padding=True",
    f"{ROLES}.actor.ulysses_sequence_parallel_size=2",
    f"{ROLES}.ref.ulysses_sequence_parallel_size=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data for 0.7.1."""
    return made("0.7.1", tmp_path_factory)


@pytest.mark.parametrize(
    ("defect", "overrides", "stage", "code"),
    [
        ("D8", (*TOOLS, "algorithm.adv_estimator=reinforce_plus_plus"), "advantage", "DPA416"),
        ("D10", TIGHT, "old_log_prob", "DPA704"),
        ("D11", (*GAE, *ENGINE, *ONE_ROW), "update_critic", "DPA506"),
        ("D18", (*GAE, *ENGINE, *ONE_ROW), "update_critic", "DPA505"),
        ("D12", (*ENGINE, f"{ROLES}.actor.policy_loss.loss_mode=gspo"), "update_actor", "DPA502"),
        ("D12", (*ENGINE, f"{ROLES}.actor.policy_loss.loss_mode=geo_mean"), "update_actor",
         "DPA502"),
        ("D17", (*ENGINE, f"{ROLES}.actor.policy_loss.loss_mode=geo_mean",
                 f"{ROLES}.actor.loss_agg_mode=seq-mean-token-mean"), "update_actor", "DPA502"),
        ("D13", ("trainer.use_legacy_worker_impl=disable",), "old_log_prob", "DPA707"),
        ("D14", ULYSSES, "old_log_prob", "DPA707"),
    ],
    ids=["D8", "D10", "D11", "D18", "D12-gspo", "D12-geo-mean", "D17", "D13", "D14"],
)  # fmt: skip
def test_silent_defects_of_0_7_1_are_found_in_their_first_step(
    defect: str, overrides: tuple[str, ...], stage: str, code: str, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / defect
    done = run(
        "0.7.1", data, *QUIET, *overrides, f"critic.model.path={data}/critic", steps=1,
        DATAPROTO_AUDIT_RUN_DIR=str(folder), DATAPROTO_AUDIT_WORKERS="1",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    found = failed(folder, 1)
    assert found[0][0] == stage
    assert (stage, code) in found


@pytest.mark.parametrize(
    ("defect", "overrides", "environ", "stage"),
    [
        ("D6", ("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=k3+"), {}, "kl_reward"),
        ("D7", ("algorithm.adv_estimator=optimal_token_baseline",
                f"{ROLES}.actor.calculate_sum_pi_squared=True"), {}, "advantage"),
        ("D16", (), {"TINY_EMPTY": "1"}, "rollout"),
    ],
)  # fmt: skip
def test_crashes_of_0_7_1_are_explained(
    defect: str, overrides: tuple[str, ...], environ: dict[str, str], stage: str, data: Path
) -> None:
    folder = data / defect
    done = run(
        "0.7.1", data, *QUIET, *overrides, steps=1, DATAPROTO_AUDIT_RUN_DIR=str(folder), **environ
    )
    assert done.code != 0
    assert f"verl raised in {stage} of step 1: " in done.log
    assert f"Diagnosis: known defect {defect} of verl 0.7.1: " in done.log
    kept = [p.name for p in (folder / "trace" / "step_000001").iterdir() if p.is_dir()]
    assert any(name.endswith(f"_{stage}_before_input") for name in kept)
    assert open_run(folder).summary["error"]


def test_the_crash_of_remax_in_0_7_1_is_explained(data: Path) -> None:
    """Its greedy rollout leaves ``score`` in the batch, and the union of step 1 fails (D15)."""
    done = run(
        "0.7.1", data, *QUIET, "algorithm.adv_estimator=remax",
        DATAPROTO_AUDIT_RUN_DIR=str(data / "remax"),
    )  # fmt: skip
    assert done.code != 0
    assert "verl raised in union of step 1: AssertionError: `score`" in done.log
    told = done.log.partition("Diagnosis:")[2]
    assert "known defect D15 of verl 0.7.1" in told
    assert "DPA115 at union: score" in told
    kept = [p.name for p in (data / "remax" / "trace" / "step_000001").iterdir() if p.is_dir()]
    assert {name.rpartition("_")[2] for name in kept if "union_before" in name} == {"left", "right"}
    assert open_run(data / "remax").summary["error"].startswith("AssertionError: `score`")


def test_ranks_of_0_7_1_that_wait_for_each_other_are_named(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """D9: rank 0 has the long rows and cuts them into more micro-batches than rank 1."""
    folder = made("0.7.1", tmp_path_factory, "uneven")
    done = run(
        "0.7.1", folder, *QUIET, *TWO, *TIGHT, "trainer.balance_batch=False",
        f"{ROLES}.nccl_timeout=60", steps=1,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
        DATAPROTO_AUDIT_HANG_TIMEOUT_S="15",
    )  # fmt: skip
    assert done.code != 0
    told = re.search(
        r"old_log_prob of the workers, nothing moved for \d+ s: rank 1 has finished old_log_prob "
        r"after (\d+) micro-batches, rank 0 in (\d+): the others wait for rank 1", done.log
    )  # fmt: skip
    assert told, done.log[-5000:]
    assert int(told[1]) < int(told[2])
    assert "verl raised in old_log_prob of step 1: " in done.log


def test_scores_of_the_baseline_on_sampled_rows_of_0_7_1_are_found(
    data: Path, tmp_path: Path
) -> None:
    """D4: with a colocated reward model ReMax scores its baseline only."""
    done = run(
        "0.7.1", data, *QUIET, "algorithm.adv_estimator=remax", steps=1,
        DATAPROTO_AUDIT_RUN_DIR=str(tmp_path / "run"), COLOCATED="1",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    found = failed(tmp_path / "run", 1)
    assert found[0][0] == "reward", found
    assert ("reward", "DPA405") in found


@pytest.mark.parametrize(
    ("overrides", "step"),
    [((*GAE, *LEGACY, "trainer.critic_warmup=2"), 2), (("algorithm.adv_estimator=remax",), 1)],
    ids=["D1", "D2"],
)
def test_an_engine_of_0_7_1_that_sleeps_is_asked_and_its_input_is_kept(
    overrides: tuple[str, ...], step: int, data: Path, tmp_path: Path
) -> None:
    done = run(
        "0.7.1", data, *QUIET, *overrides, f"critic.model.path={data}/model", steps=2,
        DATAPROTO_AUDIT_RUN_DIR=str(tmp_path / "run"), TINY_SLEEPS="1",
    )  # fmt: skip
    assert done.code != 0
    assert f"verl raised in rollout of step {step}: " in done.log
    assert "asleep" in open_run(tmp_path / "run").summary["error"]
    steps = tmp_path / "run" / "trace" / f"step_{step:06}"
    assert [p for p in steps.iterdir() if p.name.endswith("_rollout_before_input")]
