"""Configurations as files, with as little in them as verl needs to start."""

from pathlib import Path

import pytest
import yaml

from dataproto_audit.doctor.planned import Planned, planned

ROLES = "actor_rollout_ref"
HEALTHY = {
    "data": {"train_batch_size": 512},
    ROLES: {
        "rollout": {"n": 8, "log_prob_micro_batch_size_per_gpu": 8},
        "actor": {"ppo_micro_batch_size_per_gpu": 8, "ppo_mini_batch_size": 128},
        "ref": {"log_prob_micro_batch_size_per_gpu": 8},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "critic": {"ppo_micro_batch_size_per_gpu": 128},
}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(HEALTHY), encoding="utf-8")
    return path


@pytest.fixture
def plan(file):
    """``plan("a.b=c", version=...)``: the healthy configuration with overrides."""

    def make(*overrides: str, version: str = "0.7.1") -> Planned:
        return planned(file, overrides, version=version)

    return make
