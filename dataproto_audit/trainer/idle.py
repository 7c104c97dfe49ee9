"""Keys that nothing would read, by one rule for actor, reference and critic.

A key that is not as it comes and belongs to an engine that no model runs on, to a model that is
not held, or to a way of cutting micro-batches that is off, is refused by name. Not covered: keys
that a switch of the same engine turns off (``megatron.recompute_granularity`` of a frozen
reference), and ``model.attn_implementation``, which Megatron and packed rows leave unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.schema import ActorConfig, Config, FsdpConfig, RefConfig
from dataproto_audit.trainer.schema_megatron import MegatronConfig, RoleMegatronConfig
from dataproto_audit.trainer.workers.spec import with_critic, with_reference

ACTOR, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
STRATEGIES = tuple(f"{section}.strategy" for section in (ACTOR, REF, CRITIC))
ULYSSES = "ulysses_sequence_parallel_size"

Changed = dict[str, Any]
"""Values that are not as they come, by their whole key."""


def changed(section: DictConfig, schema: type, key: str) -> Changed:
    """What of ``section`` differs from the defaults of ``schema``; ``key`` is where it stands."""
    defaults = dict(_flat(OmegaConf.to_container(OmegaConf.structured(schema)), key))
    now = _flat(OmegaConf.to_container(section), key)
    return {name: value for name, value in now if value != defaults[name]}


def refuse_idle(given: Changed, because: str) -> None:
    """Raise DPA851 if anything is ``given``."""
    if given:
        listed = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UsageError(
            "DPA851",
            f"{because}, so {listed} would do nothing.",
            "Leave it as it comes, or choose what reads it.",
        )


def check_engines(config: DictConfig) -> None:
    """Raise DPA851 for keys of an engine that no model runs on, and of a reference not held."""
    for given, because in _idle(config):
        refuse_idle(given, because)


def leave_engine(config: DictConfig, source: DictConfig, given: list[DictConfig]) -> None:
    """Set back, in place, what ``source`` says about an engine that overrides have switched off.

    A ready configuration or a file sets keys for its own engine; naming another one on the command
    line would else mean naming each of them, too. ``given`` are the overrides, whose own keys stay.
    """
    before = OmegaConf.merge(OmegaConf.structured(Config), source)
    if all(OmegaConf.select(before, n) == OmegaConf.select(config, n) for n in STRATEGIES):
        return
    for keys, _ in list(_of_engines(config)):
        for key in keys:
            if _says(source, key) and not any(_says(part, key) for part in given):
                OmegaConf.update(config, key, _default(key))


def engines(config: DictConfig) -> dict[str, str]:
    """The engine of each model that a training rank holds, by role."""
    roles, own = config.actor_rollout_ref, str(config.actor_rollout_ref.actor.strategy)
    held = {"actor": own}
    if with_reference(config):
        held["ref"] = str(roles.ref.strategy or own)
    if with_critic(config):
        held["critic"] = str(config.critic.strategy or own)
    return held


def _idle(config: DictConfig) -> Iterator[tuple[Changed, str]]:
    """Keys that nothing reads, and why."""
    yield from _of_engines(config)
    if "ref" not in engines(config):
        because = "neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on, which need a "
        yield changed(config.actor_rollout_ref.ref, RefConfig, REF), f"{because}reference"


def _of_engines(config: DictConfig) -> Iterator[tuple[Changed, str]]:
    """Those of engines that no model, or not this one, runs on."""
    roles, held = config.actor_rollout_ref, engines(config)
    if "megatron" not in held.values():
        layout = changed(roles.actor.megatron, MegatronConfig, f"{ACTOR}.megatron")
        yield layout, "no model runs on megatron"
    elif held["actor"] != "megatron":
        layout = changed(roles.actor.megatron, MegatronConfig, f"{ACTOR}.megatron")
        sections = {"ref": roles.ref.megatron, "critic": config.critic.megatron}
        readers = [sections[role] for role, engine in held.items() if engine == "megatron"]
        unread = {
            key: value
            for key, value in layout.items()
            if all(OmegaConf.select(own, key.rpartition(".")[2]) is not None for own in readers)
        }
        yield unread, "every model on megatron has a value of its own"
    if "fsdp2" not in held.values():
        # The actor's FSDP options are those of every role.
        mine = changed(roles.actor.fsdp_config, FsdpConfig, f"{ACTOR}.fsdp_config")
        if roles.actor[ULYSSES] != getattr(ActorConfig, ULYSSES):
            mine[f"{ACTOR}.{ULYSSES}"] = roles.actor[ULYSSES]
        yield mine, "no model runs on fsdp2"
    if held.get("ref", "megatron") != "megatron":
        layout = changed(roles.ref.megatron, RoleMegatronConfig, f"{REF}.megatron")
        yield layout, "the reference's engine is not megatron"
    if held.get("critic", "megatron") != "megatron":
        layout = changed(config.critic.megatron, RoleMegatronConfig, f"{CRITIC}.megatron")
        yield layout, "the critic's engine is not megatron"


def _says(part: DictConfig, key: str) -> bool:
    return OmegaConf.select(part, key, throw_on_resolution_failure=False) is not None


def _default(key: str) -> Any:
    """The default of one of the keys that :func:`_of_engines` names."""
    section, _, name = key.rpartition(".")
    schemas = {
        ACTOR: ActorConfig,
        f"{ACTOR}.megatron": MegatronConfig,
        f"{ACTOR}.fsdp_config": FsdpConfig,
    }
    schema = schemas.get(section, RoleMegatronConfig)
    return getattr(schema, name)


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value
