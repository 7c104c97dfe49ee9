"""Defects of verl's own: silent ones are found in their first step, crashes are explained.

Numbers are those of docs/verl-flow.md.
"""

from pathlib import Path

import pytest

from dataproto_audit import open_run

from .configs import ENGINE, QUIET, TOOLS
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
        ("D12", (*ENGINE, f"{ROLES}.actor.policy_loss.loss_mode=gspo"), "update_actor", "DPA502"),
        ("D13", ("trainer.use_legacy_worker_impl=disable",), "old_log_prob", "DPA707"),
        ("D14", ULYSSES, "old_log_prob", "DPA707"),
    ],
)
def test_silent_defects_of_0_7_1_are_found_in_their_first_step(
    defect: str, overrides: tuple[str, ...], stage: str, code: str, data: Path
) -> None:
    folder = data / defect
    done = run(
        "0.7.1", data, *QUIET, *overrides, steps=1,
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
