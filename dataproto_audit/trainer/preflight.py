"""Everything that is opened and checked before a run touches its folder or starts a process."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from dataproto_audit.atomic import storage_error
from dataproto_audit.policy import Policy, load_policy
from dataproto_audit.trainer.backends.fsdp_limits import check_model
from dataproto_audit.trainer.data import open_data
from dataproto_audit.trainer.lineage import check_lineage, check_made, lineage
from dataproto_audit.trainer.megatron import check_megatron
from dataproto_audit.trainer.models import ModelFolder, prepare_model
from dataproto_audit.trainer.prompts import PromptData
from dataproto_audit.trainer.resume import MODEL, Place, Resumed, find_place
from dataproto_audit.trainer.rewards import Scorer, open_scorer
from dataproto_audit.trainer.room import check_gpus, check_head_size, warnings_of
from dataproto_audit.trainer.validate import validate
from dataproto_audit.trainer.weight_files import check_weights
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
    warnings: tuple[str, ...] = ()


def prepare(config: DictConfig, scratch: Path) -> Prepared:
    """Check all that can be checked; the tiny model is made in ``scratch``.

    A refused run leaves everything as it was, so the corrected command meets no folder of its
    own. Raises UsageError.
    """
    validate(config)
    gpus = torch.cuda.device_count()
    check_gpus(config, gpus=gpus)
    place = find_place(config)
    policy = load_policy(config.audit.policy)
    inputs = _open(config, scratch / MODEL, gpus=gpus)
    if place.checkpoint:
        _check_fits(config, inputs, place.checkpoint)
    return Prepared(place, policy, inputs, tuple(warnings_of(config, gpus=gpus)))


def _check_fits(config: DictConfig, inputs: Inputs, checkpoint: Resumed) -> None:
    """Model, optimizer and data are those that the checkpoint was written with."""
    saved = checkpoint.extra.get("model")
    if isinstance(saved, dict):
        check_lineage(saved, lineage(config, inputs.model), where=checkpoint.path)
    elif not config.actor_rollout_ref.model.path:  # written by an earlier version
        kept = checkpoint.path.absolute().parent.parent / MODEL
        check_made(kept, inputs.model.path, where=checkpoint.path)
    inputs.prompts.check_identity(checkpoint.extra["data"])


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


def _open(config: DictConfig, model_dir: Path, *, gpus: int) -> Inputs:
    model = prepare_model(config.actor_rollout_ref.model, folder=model_dir)
    check_head_size(config, model.config, gpus=gpus)
    spec = worker_spec(config, model_path=str(model.path))
    for role in roles_of(spec):
        if strategy_of(spec, role) == "fsdp2":
            check_model(model_of(spec, role), spec.fsdp, model.config)
    check_megatron(config, spec, model.config)
    if any(strategy_of(spec, role) == "megatron" for role in roles_of(spec)):
        check_weights(model.path, model.config, exact=True)
    validates = config.trainer.test_freq > 0 or config.trainer.val_before_train
    return Inputs(
        model=model,
        prompts=open_data(config.data, model.tokenizer),
        validation=open_data(config.data, model.tokenizer, split="val") if validates else None,
        score=open_scorer(config.reward, model.tokenizer),
    )
