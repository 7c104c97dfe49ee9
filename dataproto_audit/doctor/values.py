"""Values with which verl cannot start, or trains on something else than was meant.

Sections that a value took the place of, names that no code of verl knows, counts below one,
switches that are neither on nor off, interpolations that cannot be resolved, and variables that
Ray refuses.

Not covered: names of rollout engines that resemble none of verl's, because modules of one's own
register such, and the kinds of all other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from dataproto_audit.doctor.keys import known
from dataproto_audit.doctor.planned import (
    ACTOR,
    DEFAULTS,
    MODEL,
    OF_VERSION,
    REF,
    ROLLOUT,
    Planned,
)
from dataproto_audit.doctor.problems import Problem
from dataproto_audit.findings import Severity

NEEDED = ("data", "actor_rollout_ref", ACTOR, ROLLOUT, REF, MODEL, "algorithm", "critic", "trainer")
"""Sections that may not be null either."""
ENGINES = ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan")
LATER_ENGINES = (*ENGINES, "fsdp_turbo", "automodel")
SERVERS = ("vllm", "sglang", "trtllm")
WORKERS = ("auto", "enable", "disable")
COUNTS = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length",
    "trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
)  # fmt: skip
CRITIC_COUNTS = ("critic.ppo_mini_batch_size", "critic.ppo_epochs")
SWITCHES = (
    *(key for key, value in DEFAULTS.items() if isinstance(value, bool)), "critic.enable",
    "critic.use_dynamic_bsz", "trainer.use_v1", "trainer.balance_batch",
    "trainer.val_before_train", f"{ROLLOUT}.calculate_log_probs",
)  # fmt: skip
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
Tree = Mapping[str, Any]


def impossible(p: Planned) -> Iterator[Problem]:
    """What no run starts with, or none as it is meant."""
    tree = OmegaConf.to_container(p.config, resolve=False)
    assert isinstance(tree, dict)
    yield from _sections(tree, p.version)
    yield from _names(p)
    yield from _counts(p)
    yield from _unresolved(p, tree, "")
    yield from _variables(p)


def _no(text: str, remedy: str) -> Problem:
    return Problem("fail", "DPA851", text, remedy)


def _sections(tree: Tree, version: str, at: str = "") -> Iterator[Problem]:
    names = known(version)
    for name, value in tree.items():
        key = f"{at}{name}"
        if isinstance(value, dict):
            yield from _sections(value, version, f"{key}.")
            continue
        section = key not in names.free and bool(names.below(key))
        stands_for_itself = isinstance(value, str) and ("${" in value or value == "???")
        if section and not stands_for_itself and (value is not None or key in NEEDED):
            said = "null" if value is None else repr(value)
            yield _no(f"{key} is a section, and {said} takes its place.",
                      f"Set a key in it: {key}.{names.below(key)[0]}=..., for one.")  # fmt: skip


def _names(p: Planned) -> Iterator[Problem]:
    engines = LATER_ENGINES if p.version != "0.7.1" else ENGINES
    chosen = {f"{ACTOR}.strategy": engines, f"{ROLLOUT}.name": SERVERS}
    if p.critic:
        chosen["critic.strategy"] = engines
    if p.version == "0.7.1":
        chosen["trainer.use_legacy_worker_impl"] = WORKERS
    for key, allowed in chosen.items():
        value = p.get(key)
        near = get_close_matches(str(value), allowed, 1)
        registered = key == f"{ROLLOUT}.name" and not near
        if value is None or value in allowed or registered:
            continue
        hint = f"Did you mean {near[0]}? " if near else ""
        yield _no(f"{key} is {value!r}, which verl {p.version} does not have.",
                  f"{hint}There are {', '.join(allowed)}.")  # fmt: skip
    for key in SWITCHES:
        value = p.get(key)
        if value is not None and not isinstance(value, bool) and value not in (0, 1):
            yield _no(f"{key} is {value!r}, neither true nor false.", "Set True or False.")


def _counts(p: Planned) -> Iterator[Problem]:
    for key in (*COUNTS, *(CRITIC_COUNTS if p.critic else ())):
        value = p.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield _no(f"{key} is {value}, and at least 1 is needed.", "Correct it.")


def _unresolved(p: Planned, tree: Tree, at: str) -> Iterator[Problem]:
    """Interpolations that fail. Those to a key that is not in the file have verl's default."""
    for name, value in tree.items():
        key = f"{at}{name}"
        if isinstance(value, dict):
            yield from _unresolved(p, value, f"{key}.")
        elif isinstance(value, str) and "${" in value:
            try:
                OmegaConf.select(p.config, key)
            except InterpolationKeyError:
                continue
            except (OmegaConfBaseException, RecursionError) as error:
                why = str(error).strip().splitlines()[:1] or [type(error).__name__]
                counts = key in DEFAULTS or key in OF_VERSION[p.version]
                level: Severity = "fail" if counts else "warn"
                yield Problem(level, "DPA851", f"{key}={value} cannot be resolved here: {why[0]}.",
                              "Set what it needs where doctor runs, too, or a value.")  # fmt: skip


def _variables(p: Planned) -> Iterator[Problem]:
    try:
        held = OmegaConf.select(p.config, VARIABLES)
        given = OmegaConf.to_container(held, resolve=True) if OmegaConf.is_dict(held) else {}
    except OmegaConfBaseException:
        return
    assert isinstance(given, dict)
    for name, value in given.items():
        if not isinstance(value, str):
            quoted = str(value).lower() if isinstance(value, bool) else value
            yield _no(
                f"{VARIABLES}.{name} is {value!r}, and Ray takes text only.",
                f"Quote it for hydra and for the shell: '+{VARIABLES}.{name}=\"{quoted}\"'.",
            )
