"""Everything that is opened and checked before a run touches its folder or starts a process."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from dataproto_audit.atomic import storage_error
from dataproto_audit.policy import Policy, load_policy
from dataproto_audit.trainer.backends.fsdp_limits import check_model
from dataproto_audit.trainer.data import open_data
from dataproto_audit.trainer.megatron import check_megatron
from dataproto_audit.trainer.models import ModelFolder, prepare_model
from dataproto_audit.trainer.prompts import PromptData
from dataproto_audit.trainer.resume import MODEL, Place, find_place
from dataproto_audit.trainer.rewards import Scorer, open_scorer
from dataproto_audit.trainer.validate import validate
from dataproto_audit.trainer.workers.spec import model_of, roles_of, strategy_of, worker_spec


@dataclass
class Inputs:
    """What a run is made of before any process starts; opening it finds most mistakes."""

    model: ModelFolder
    prompts: PromptData
    validation: PromptData | None
    score: Scorer


@dataclass
class Prepared:
    """A run that may start: its place, its policy, and what it is made of."""

    place: Place
    policy: Policy
    inputs: Inputs


def prepare(config: DictConfig, scratch: Path) -> Prepared:
    """Check all that can be checked; the tiny model is made in ``scratch``.

    A refused run leaves everything as it was, so the corrected command meets no folder of its
    own. Raises UsageError.
    """
    validate(config)
    place = find_place(config)
    policy = load_policy(config.audit.policy)
    inputs = _open(config, scratch / MODEL)
    if place.checkpoint:
        inputs.prompts.check_identity(place.checkpoint.extra["data"])
    return Prepared(place, policy, inputs)


def settle_model(config: DictConfig, inputs: Inputs, run_dir: Path) -> None:
    """Copy the model that was made in the scratch folder to ``run_dir/model``.

    A model of the user's stays where it is. ``RunError`` DPA802 when the disk refuses.
    """
    if config.actor_rollout_ref.model.path:
        return
    folder = run_dir / MODEL
    try:
        folder.mkdir(exist_ok=True)
        for file in inputs.model.path.iterdir():
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise storage_error(folder, error) from error
    inputs.model.tokenizer.folder = folder
    inputs.model = replace(inputs.model, path=folder)


def _open(config: DictConfig, model_dir: Path) -> Inputs:
    model = prepare_model(config.actor_rollout_ref.model, folder=model_dir)
    spec = worker_spec(config, model_path=str(model.path))
    for role in roles_of(spec):
        if strategy_of(spec, role) == "fsdp2":
            check_model(model_of(spec, role), spec.fsdp, model.config)
    check_megatron(config, spec, model.config)
    validates = config.trainer.test_freq > 0 or config.trainer.val_before_train
    return Inputs(
        model=model,
        prompts=open_data(config.data, model.tokenizer),
        validation=open_data(config.data, model.tokenizer, split="val") if validates else None,
        score=open_scorer(config.reward, model.tokenizer),
    )
