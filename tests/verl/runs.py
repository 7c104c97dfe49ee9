"""One real run of verl's ``main_ppo`` on a CPU, in an environment of its own.

Environments are made by ``make test-verl`` in ``.venvs/verl-<version>``; runs are processes, so
that nothing of verl is imported here. The audit is attached by environment only.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent / "without_gpu"

ROLES = "actor_rollout_ref"
COMMON = (
    "data.train_batch_size=4", "data.max_prompt_length=40", "data.max_response_length=16",
    "data.dataloader_num_workers=0", "data.shuffle=False", "data.filter_overlong_prompts=False",
    f"++{ROLES}.model.override_config.attn_implementation=sdpa",
    f"{ROLES}.model.use_remove_padding=False", f"{ROLES}.model.enable_gradient_checkpointing=False",
    f"{ROLES}.rollout.name=tiny", f"{ROLES}.rollout.n=4", f"{ROLES}.rollout.n_gpus_per_node=1",
    f"{ROLES}.rollout.tensor_model_parallel_size=1", f"{ROLES}.rollout.agent.num_workers=1",
    f"{ROLES}.rollout.calculate_log_probs=True",
    f"{ROLES}.rollout.log_prob_micro_batch_size_per_gpu=8",
    f"{ROLES}.actor.ppo_mini_batch_size=2", f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=4",
    f"{ROLES}.actor.use_torch_compile=False", f"{ROLES}.ref.use_torch_compile=False",
    f"{ROLES}.actor.fsdp_config.model_dtype=fp32", f"{ROLES}.actor.use_kl_loss=True",
    f"{ROLES}.actor.optim.lr=1e-3", f"{ROLES}.ref.log_prob_micro_batch_size_per_gpu=8",
    "reward.num_workers=1", "algorithm.adv_estimator=grpo", "trainer.device=cpu",
    "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[console]",
    "trainer.save_freq=-1", "trainer.total_epochs=9", "trainer.resume_mode=disable",
    "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=4",
    "+ray_kwargs.ray_init.resources.cpu=4", "+ray_kwargs.ray_init.include_dashboard=False",
)  # fmt: skip


@dataclass
class Finished:
    """A run that ended."""

    code: int
    log: str


def python(version: str) -> Path:
    """The interpreter of that version's environment."""
    return ROOT / ".venvs" / f"verl-{version}" / "bin" / "python"


def toy(version: str, folder: Path, *how: str) -> None:
    """Model and data, made with the libraries of that environment."""
    command = [str(python(version)), str(HELPERS / "toy.py"), str(folder), *how]
    subprocess.run(command, check=True, env=_environ(), capture_output=True)


def run(
    version: str, data: Path, *overrides: str, steps: int = 2, audit: bool = True,
    timeout_s: float = 900, **environ: str,
) -> Finished:  # fmt: skip
    """Run ``steps`` steps; ``environ`` are variables, ``DATAPROTO_AUDIT_*`` among them."""
    modules = ["cpu_for_verl"]
    modules += ["seeded_faults"] if "SEEDED" in environ else []
    modules += ["worker_faults"] if "WORKER_FAULTS" in environ else []
    modules += ["seeded_faults_v1"] if "SEEDED_V1" in environ else []
    modules += ["colocated_scores"] if "COLOCATED" in environ else []
    modules += ["rows_in_order"] if "IN_ORDER" in environ else []
    modules += ["dataproto_audit.verl_plugin"] if audit else []
    places = (
        f"data.train_files={data}/train.parquet", f"data.val_files={data}/val.parquet",
        f"{ROLES}.model.path={data}/model", f"trainer.total_training_steps={steps}",
        f"reward.custom_reward_function.path={HELPERS}/toy_score.py",
    )  # fmt: skip
    command = [str(python(version)), "-m", "verl.trainer.main_ppo", *places, *COMMON, *overrides]
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:
        env = _environ() | {
            "PYTHONPATH": str(HELPERS),
            "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
            "RAY_TMPDIR": short,
            "VERL_ENGINE_DEVICE": "cuda",  # what 0.9 registers its engines under
            **environ,
        }
        done = subprocess.run(
            command, env=env, cwd=data, timeout=timeout_s, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return Finished(done.returncode, done.stdout)


def _environ() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    mark = {name: value for name, value in os.environ.items() if name.endswith("TEST_SESSION")}
    return kept | mark | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0", "HYDRA_FULL_ERROR": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
