"""What to do after a run that failed: go on from a checkpoint only where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.backends.checkpoint import latest

RESUME = "Resume from the last checkpoint."
"""What parts of a run say, which do not know whether one was saved."""


@contextmanager
def real_remedies(checkpoints: Path, *, save_freq: int) -> Iterator[None]:
    """Errors of the block that say :data:`RESUME` say how, or that there is nothing to resume."""
    try:
        yield
    except RunError as error:
        if RESUME not in error.remedy:
            raise
        told = error.remedy.replace(RESUME, _instead(checkpoints, save_freq))
        raise type(error)(error.code, error.message, told) from error


def _instead(checkpoints: Path, save_freq: int) -> str:
    newest, _ = latest(checkpoints)
    if newest is not None:
        return (
            f"Go on from {newest} with trainer.resume_mode=auto "
            f"trainer.run_dir={checkpoints.parent}."
        )
    if save_freq <= 0:
        return (
            "There is no checkpoint to go on from (trainer.save_freq="
            f"{save_freq}): start the run again, with trainer.save_freq above 0 if it is long."
        )
    return "There is no checkpoint yet to go on from: start the run again."
