"""Which checkpoint a run goes on from, and whether it can: all of it before anything starts.

Nothing here writes or deletes. A run that cannot go on is refused; only ``trainer.overwrite=true``
replaces what is in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.run_folder import (
    Existing,
    default_run_dir,
    refuse_used,
    run_files,
)
from dataproto_audit.trainer.backends.checkpoint import (
    Passed,
    latest,
    read_index,
    verify_files,
)
from dataproto_audit.trainer.room import check_place
from dataproto_audit.trainer.workers.spec import with_critic

CHECKPOINTS = "checkpoints"
MODEL = "model"
RESTART = "Pass --overwrite to start it again, or choose another trainer.run_dir."


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from; ``extra`` is what the driver kept in its index.

    ``passed`` are newer ones that ``resume_mode=auto`` could not read.
    """

    path: Path
    step: int
    extra: Mapping[str, Any]
    passed: tuple[Passed, ...] = ()

    def __str__(self) -> str:
        """One line for the person who starts the run."""
        line = f"going on after step {self.step}, from {self.path}"
        return f"{line}; passed over {'; '.join(map(str, self.passed))}" if self.passed else line


@dataclass(frozen=True)
class Place:
    """Where a run writes, what it does with a run that is there, and what it goes on from."""

    run_dir: Path
    existing: Existing
    checkpoint: Resumed | None = None


def find_place(config: DictConfig) -> Place:
    """The run folder and the checkpoint that the configuration asks for, both checked.

    Raises UsageError: DPA804 for a checkpoint that is damaged, and where
    ``resume_mode=auto`` finds checkpoints but can read none; DPA801 for a folder that holds a run
    which is neither to be continued nor replaced, or that another process writes into; DPA851
    when no step is left to train.
    """
    trainer = config.trainer
    wanted = trainer.run_dir
    found: Path | None = None
    passed: tuple[Passed, ...] = ()
    if trainer.resume_mode == "path":
        found = Path(trainer.resume_from_path)
        run_dir = Path(wanted) if wanted else found.absolute().parent.parent
    else:
        run_dir = Path(wanted) if wanted else default_run_dir(trainer.experiment_name)
        if trainer.resume_mode == "auto":
            found, passed = _newest(run_dir, overwrite=trainer.overwrite)
    check_place(run_dir)
    if found is None:
        existing: Existing = "overwrite" if trainer.overwrite else "refuse"
        _refuse_lone(config, run_dir)
        refuse_used(run_dir, existing)
        return Place(run_dir, existing)
    checkpoint = _checked(config, found, passed)
    # Another run's folder is no place to go on in: its later steps would be dropped.
    own = run_dir.resolve() in checkpoint.path.resolve().parents
    existing = "resume" if own else "overwrite" if trainer.overwrite else "refuse"
    refuse_used(run_dir, existing)
    return Place(run_dir, existing, checkpoint)


def _newest(run_dir: Path, *, overwrite: bool) -> tuple[Path | None, tuple[Passed, ...]]:
    found, passed = latest(run_dir / CHECKPOINTS)
    if found is not None or overwrite:
        return found, passed
    if passed:
        raise UsageError(
            "DPA804",
            f"{run_dir / CHECKPOINTS}: no checkpoint can be read, so there is nothing to go on "
            f"from ({'; '.join(map(str, passed))}). Nothing was changed.",
            RESTART,
        )
    if run_files(run_dir):
        raise UsageError(
            "DPA801",
            f"{run_dir}: the folder holds a run without a checkpoint, so "
            "trainer.resume_mode=auto has nothing to go on from.",
            RESTART,
        )
    return None, ()


def _refuse_lone(config: DictConfig, run_dir: Path) -> None:
    """Refuse folders of our names without a run: they are somebody's and would be written over."""
    if run_files(run_dir):
        return
    lone = [CHECKPOINTS] if _checkpoint_folders(run_dir) else []
    if not config.actor_rollout_ref.model.path and any((run_dir / MODEL).glob("*")):
        lone.append(MODEL)
    if lone:
        raise UsageError(
            "DPA801",
            f"{run_dir} holds no run, but {' and '.join(lone)}, which a run would write over.",
            "Choose another trainer.run_dir.",
        )


def _checkpoint_folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS).glob("*/"))


def _checked(config: DictConfig, path: Path, passed: tuple[Passed, ...]) -> Resumed:
    total = config.trainer.total_training_steps
    index = read_index(path)
    step = index.step
    if step >= total:
        raise UsageError(
            "DPA851",
            f"trainer.total_training_steps is {total}, but the checkpoint {path} is of step {step}:"
            " nothing is left to train.",
            f"Set trainer.total_training_steps above {step}.",
        )
    extra = index.extra
    if not isinstance(extra.get("data"), dict) or not isinstance(extra.get("rewards"), list):
        raise UsageError(
            "DPA804",
            f"the checkpoint {path} was not written by train: its index lacks data and rewards.",
            "Resume from one that was.",
        )
    if with_critic(config) and "critic_strategy" not in index.layout:
        raise UsageError(
            "DPA804",
            f"the checkpoint {path} holds no critic, which algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} needs.",
            "Go on with the estimator that wrote it, or start the run again.",
        )
    verify_files(path, index.files)
    return Resumed(path, step, extra, passed)
