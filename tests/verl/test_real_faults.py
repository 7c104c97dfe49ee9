"""Faults inside real runs of verl, one in each step: each is found at its stage in its step."""

from pathlib import Path

import pytest

from dataproto_audit import open_run

from .configs import FP32, QUIET, V0, V1
from .looks import failed, made
from .runs import ROLES, run

pytestmark = [pytest.mark.verl, pytest.mark.engine]

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
    "two_rows_mixed": "balance",
    "reward_shifted": "reward",
    "reward_rows": "reward",
    "old_shifted": "old_log_prob",
    "old_rows": "old_log_prob",
    "batch_norm": "advantage",
    "sign_flipped": "advantage",
    "update_writes": "update_actor",
}
"""Faults inside V0 (without_gpu/seeded_faults.py), one in each step, and their stages.

Text of a tool that is trained on is one more, in test_real_runs.py."""
FAULTS_V1 = {
    "reference_hot": "ref_log_prob",
    "old_shifted": "old_log_prob",
    "old_swapped": "old_log_prob",
    "reference_shifted": "ref_log_prob",
    "rewards_moved": "balance",
    "advantages_swapped": "advantage",
    "keys_reordered": "ref_log_prob",
    "sign_flipped": "advantage",
    "stale_weights": "old_log_prob",
    "keys_dropped": "ref_log_prob",  # last, because the rows stay in the store
}
"""The same inside V1 (without_gpu/seeded_faults_v1.py)."""


def seeded(faults: dict[str, str]) -> str:
    """One in each step, in their order."""
    return ",".join(f"{step}:{name}" for step, name in enumerate(faults, 1))


def stages_of(folder: Path, faults: dict[str, str]) -> dict[str, str]:
    """The stage that was accused first in the step of each fault."""
    first = {name: failed(folder, step) for step, name in enumerate(faults, 1)}
    return {name: found[0][0] if found else "" for name, found in first.items()}


def test_faults_inside_v0_are_found_at_their_stage_in_their_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, quiet = made("0.7.1", tmp_path_factory), len(FAULTS) + 1
    done = run(
        "0.7.1", folder, *QUIET, steps=quiet,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), SEEDED=seeded(FAULTS),
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    assert stages_of(folder / "run", FAULTS) == FAULTS
    assert failed(folder / "run", quiet) == []


def test_faults_inside_v1_are_found_at_their_stage_in_their_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In float32, as the engine computes, too: an update moves a policy by less than bfloat16."""
    folder = made("0.9.1", tmp_path_factory)
    done = run(
        "0.9.1", folder, *QUIET, *V1, *FP32, f"{ROLES}.rollout.dtype=float32",
        steps=len(FAULTS_V1),
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), SEEDED_V1=seeded(FAULTS_V1),
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    assert stages_of(folder / "run", FAULTS_V1) == FAULTS_V1
    found = open_run(folder / "run").findings()
    assert {f.rows for f in found if f.code == "DPA105"} == {(0, 1)}


def test_faults_inside_workers_are_found_in_their_update(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made("0.9.1", tmp_path_factory)
    done = run(
        "0.9.1", folder, *V0, *FP32, *QUIET, steps=4,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
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
