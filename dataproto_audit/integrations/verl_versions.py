"""verl's versions that attaching was tried with, and everything in which they differ for us.

Read from the wheels: the order of ``RayPPOTrainer.fit`` is the same in both, the stages are methods
and module functions of the same names (:mod:`.verl_v0`), worker implementations (legacy, engine)
differ behind those methods only.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

MODULE = "verl.trainer.ppo.ray_trainer"
TRAINER = "RayPPOTrainer"
MODULE_V1 = "verl.trainer.ppo.v1.trainer_base"
TRAINER_V1 = "PPOTrainer"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper"
TRACKING = "verl.utils.tracking"


@dataclass(frozen=True)
class Version:
    """``baseline``: where ReMax' greedy rollouts come from: a second call of the rollout manager,
    or rows behind the sampled ones in the same call, flagged ``__do_sample__`` False.
    ``syncs_in_warmup``: weights are sent also while only the critic is trained."""

    number: str
    baseline: str
    syncs_in_warmup: bool
    tried: bool = True


VERSIONS = {
    "0.7.1": Version("0.7.1", baseline="second call", syncs_in_warmup=False),
    "0.9.1": Version("0.9.1", baseline="same call", syncs_in_warmup=True),
}


def installed() -> str:
    """The installed verl's version, or ''."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return ""


def version(number: str | None = None) -> Version:
    """What is known of a version; of one that was not tried, what the newest tried one does."""
    number = installed() if number is None else number
    known = VERSIONS.get(number)
    if known is not None:
        return known
    newest = VERSIONS["0.9.1"]
    return Version(number or "unknown", newest.baseline, newest.syncs_in_warmup, tried=False)
