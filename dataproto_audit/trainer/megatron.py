"""What Megatron-core cannot do of what a configuration asks for, said before any process starts.

Sizes of one layout are checked in :mod:`.backends.megatron.layout`; here is what holds between
roles, batches and switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron import layout
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.sizes import data_parallel_size, section_of, world_size
from dataproto_audit.trainer.workers.spec import (
    WorkerSpec,
    megatron_of,
    roles_of,
    strategy_of,
)

ROLES = "actor_rollout_ref"
SHARED = {
    "tp": layout.TP,
    "pp": layout.PP,
    "vpp": layout.VPP,
    "cp": layout.CP,
    "sp": "sequence_parallel",
}
"""What all Megatron roles must have alike, and its key."""


def check_megatron(config: DictConfig, spec: WorkerSpec, model: Mapping[str, Any]) -> None:
    """Raise UsageError for what keeps the Megatron roles of ``spec`` from working.

    ``model`` is the parsed ``config.json``. Does nothing where no role runs on Megatron.
    """
    roles = [role for role in roles_of(spec) if strategy_of(spec, role) == "megatron"]
    for role in roles:
        layout.check_layout(
            megatron_of(spec, role),
            model,
            world_size=world_size(config),
            dtype=spec.model.dtype,
            key=f"{section_of(role)}.megatron",
        )
    for role in roles:
        check_role(spec, role, rows=_rows(config, spec, role))
    for role in roles[1:]:
        _one_layout(spec, roles[0], role)
    if "actor" in roles:
        _actor(config, spec)


def _rows(config: DictConfig, spec: WorkerSpec, role: str) -> int | None:
    """Rows of a mini-batch on each data-parallel rank; None for a role that does not train."""
    if role == "critic":
        assert spec.critic is not None, "it is one of the roles"
        return spec.critic.update.mini_batch_size // data_parallel_size(config, role)
    return spec.update.mini_batch_size // data_parallel_size(config) if role == "actor" else None


def check_role(spec: WorkerSpec, role: str, *, rows: int | None = None) -> None:
    """Raise UsageError for switches, optimizer and micro-batches that ``role`` cannot have.

    ``rows`` of a mini-batch on each data-parallel rank, of a role that trains; None where they are
    not known yet. Raises DPA851 and DPA854. Sizes of the layout alone are not looked at here.
    """
    options = megatron_of(spec, role)
    switch = f"{ROLES}.model.use_remove_padding"
    if spec.model.remove_padding and options.cp > 1:
        raise UsageError(
            "DPA851",
            f"{switch} packs rows, and {section_of(role)}.megatron.{layout.CP}={options.cp} cuts "
            "each row over ranks: the two are not built together.",
            f"Set {switch}=false, or {layout.CP} to 1.",
        )
    trained = spec if role == "actor" else spec.critic if role == "critic" else None
    if trained is None:
        return
    section = section_of(role)
    if trained.optim.name == "sgd" and options.distributed_optimizer:
        raise UsageError(
            "DPA851",
            f"{section}.optim.name is sgd; Megatron's distributed optimizer is Adam's.",
            f"Set {section}.megatron.use_distributed_optimizer=false, or the optimizer to adamw.",
        )
    if rows is not None:
        micro = trained.update.micro
        if not micro.rows and not micro.max_tokens:
            options = replace(options, vpp=None)  # cut into as many as there are stages
        size = None if micro.max_tokens else micro.rows or None
        layout.check_micro_batches(options, rows=rows, size=size, section=section)


def _one_layout(spec: WorkerSpec, role: str, other: str) -> None:
    """megatron's groups are global to a process, and all roles live in it."""
    first, second = megatron_of(spec, role), megatron_of(spec, other)
    own, its = section_of(other), section_of(role)
    differ = [
        f"{own}.megatron.{key} is {_shown(second, name)} and {its}.megatron.{key} "
        f"{_shown(first, name)}"
        for name, key in SHARED.items()
        if getattr(first, name) != getattr(second, name)
    ]
    if differ:
        raise UsageError(
            "DPA851",
            f"{'; '.join(differ)}. Both roles live in one process, whose Megatron groups they "
            "share.",
            f"Leave {own}.megatron empty, or set {own}.strategy=fsdp2.",
        )


def _shown(options: MegatronOptions, name: str) -> str:
    """A value as a configuration writes it."""
    value = getattr(options, name)
    return "null" if value is None else str(value).lower()


def _actor(config: DictConfig, spec: WorkerSpec) -> None:
    ranks, warmup, stages = data_parallel_size(config), config.warmup, spec.megatron.pp
    if warmup.steps and warmup.batch_size // ranks < stages:
        raise UsageError(
            "DPA854",
            f"warmup.batch_size={warmup.batch_size} gives each of {ranks} data-parallel ranks too "
            f"few rows for {stages} pipeline stages.",
            f"Set it to {ranks * stages} or more.",
        )
