"""The stand-in for verl, importable as ``verl`` for one test."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from dataproto_audit.integrations import verl_versions
from dataproto_audit.testing.options import Options

FAKE = Path(__file__).parent / "fake_verl"


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the trainer; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setattr(verl_versions, "installed", lambda: "0.7.1")
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("verl.trainer.ppo.ray_trainer")
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        del sys.modules[name]


def config(**changes: Any) -> Any:
    """A configuration in verl's names; ``changes`` are dotted names with ``__`` for the dot."""
    made = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "grpo",
                "norm_adv_by_std_in_grpo": True,
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": None,
            },
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp",
                    "use_kl_loss": True,
                    "kl_loss_coef": 0.01,
                    "kl_loss_type": "low_var_kl",
                    "loss_agg_mode": "token-mean",
                    "clip_ratio": 0.2,
                    "entropy_coeff": 0.0,
                    "ulysses_sequence_parallel_size": 1,
                    "ppo_epochs": 1,
                    "fsdp_config": {
                        "mixed_precision": {"param_dtype": "float32"},
                        "model_dtype": "fp32",
                    },
                },
                "ref": {"fsdp_config": {"model_dtype": "fp32"}},
                "rollout": {
                    "n": 4,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "dtype": "float32",
                    "log_prob_micro_batch_size_per_gpu": 4,
                    "multi_turn": {"enable": False},
                },
            },
            "data": {"max_response_length": 4},
            "trainer": {
                "n_gpus_per_node": 2,
                "nnodes": 1,
                "experiment_name": "toy",
                "balance_batch": True,
                "resume_mode": "disable",
                "val_before_train": True,
                "test_freq": 1,
            },
        }
    )
    for name, value in changes.items():
        OmegaConf.update(made, name.replace("__", "."), value)
    return made


def make(
    verl: ModuleType,
    *,
    kind: Any = None,
    steps: int = 1,
    options: Options | None = None,
    **changes: Any,
) -> Any:
    """A trainer that is ready for ``fit``: verl's own, or of the class ``kind``."""
    tracking = importlib.import_module("verl.utils.tracking").Tracking()
    trainer = (kind or verl.RayPPOTrainer)(config(**changes), tracking, options, steps)
    trainer.init_workers()
    return trainer


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dataproto_audit")
