"""What a verl run is configured to do, in the words of the probes.

Read from verl's own configuration, resolved, with the names that ``check`` uses, and from what the
trainer holds. Whatever cannot be told stays unknown, and the checks that need it say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataproto_audit.checker.config import NAMES, settings_from
from dataproto_audit.codes import UsageError
from dataproto_audit.probes import Settings

WITHIN_A_GROUP = ("grpo", "rloo", "grpo_vectorized", "grpo_passk", "opo")
"""Estimators whose advantages do not depend on other groups of the batch."""
BY_ROWS = ("world_size", "micro_batch_size", "actor_micro_batch_size", "max_token_len")
"""Settings that count all rows of a step."""


def settings_of(trainer: Any) -> Settings:
    """Settings of a constructed ``RayPPOTrainer``, or of anything with its ``config``."""
    config = plain_config(getattr(trainer, "config", None))
    known = {}
    for name in Settings.known():
        for key in NAMES.get(name, ()):
            value = at(config, key)
            if value is not None:
                known[key] = getattr(value, "value", value)
    settings = _readable(known)
    found = _from_model(trainer) | _from_switches(config, trainer)
    lacking = {k: v for k, v in found.items() if v is True or getattr(settings, k) is None}
    return replace(settings, **lacking)


def of_some_rows(settings: Settings) -> Settings:
    """The same for a sample of whole groups: what only all rows together can tell is unknown."""
    changes: dict[str, Any] = dict.fromkeys(BY_ROWS)
    if settings.adv_estimator not in WITHIN_A_GROUP:
        changes["adv_estimator"] = None
    return replace(settings, **changes)


def plain_config(config: Any) -> Mapping[str, Any]:
    """The configuration as nested dicts, interpolations resolved where they can be."""
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:
            config = OmegaConf.to_container(config, resolve=False)
    return config if isinstance(config, Mapping) else {}


def at(config: Any, path: str) -> Any:
    """The entry under a dotted name, or None."""
    for part in path.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return None
        config = config[part]
    return config


def _readable(known: Mapping[str, Any]) -> Settings:
    """Settings from what is of the right kind; one value of a wrong kind does not spoil others."""
    try:
        return settings_from(known, {})[0]
    except UsageError:
        good = {key: value for key, value in known.items() if _fits(key, value)}
        return settings_from(good, {})[0]


def _fits(key: str, value: Any) -> bool:
    try:
        settings_from({key: value}, {})
    except UsageError:
        return False
    return True


def _from_switches(config: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    roles, trained = at(config, "actor_rollout_ref") or {}, at(config, "trainer") or {}
    correction = at(config, "algorithm.rollout_correction") or {}
    multi_turn = bool(at(roles, "rollout.multi_turn.enable"))
    agent = at(roles, "rollout.agent.default_agent_loop")
    found: dict[str, Any] = {
        "rejection": bool(correction.get("rollout_rs")),
        "multi_turn": multi_turn or agent not in (None, "single_turn_agent"),
        "use_kl_in_reward": bool(at(config, "algorithm.use_kl_in_reward")),
        "trainer_dtype": computed_in(roles),
        "ref_from_actor": None if correction.get("bypass_mode") else _same_start(config),
    }
    gpus = int(trained.get("n_gpus_per_node") or 0) * int(trained.get("nnodes") or 0)
    if gpus and (at(roles, "actor.strategy") or "fsdp").startswith("fsdp"):
        found["world_size"] = gpus // int(at(roles, "actor.ulysses_sequence_parallel_size") or 1)
    if at(roles, "rollout.skip_rollout") or at(roles, "rollout.skip.enable"):
        found["on_policy"] = False
    elif hasattr(trainer, "_step_once"):
        found["on_policy"] = _in_step(config)
    elif type(trainer).__name__ == "RayPPOTrainer" and not at(config, "trainer.critic_warmup"):
        found["on_policy"] = True
    return found


def _in_step(config: Mapping[str, Any]) -> bool | None:
    """For V1: True where each step samples with the weights it begins with; None if unknown."""
    mode = at(config, "trainer.v1.trainer_mode")
    if mode != "sync":
        return False if mode else None
    return None if at(config, "trainer.critic_warmup") else True


def _same_start(config: Mapping[str, Any]) -> bool | None:
    """True where actor and reference surely start from the same weights in the same precision."""
    roles = at(config, "actor_rollout_ref") or {}
    actor, ref = (at(roles, f"{role}.fsdp_config.model_dtype") for role in ("actor", "ref"))
    own_model = at(roles, "ref.model.path") not in (None, at(roles, "model.path"))
    lora = at(roles, "model.lora_rank") or at(roles, "model.lora.rank")
    fresh = at(config, "trainer.resume_mode") == "disable"
    same = actor is not None and actor == ref and not own_model and not lora and fresh
    return True if same else None


def computed_in(roles: Mapping[str, Any]) -> str | None:
    """Precision of the trainer's forward pass, as FSDP is told; None for other backends."""
    fsdp = at(roles, "actor.fsdp_config")
    if not isinstance(fsdp, Mapping):
        return None
    mixed = at(fsdp, "mixed_precision.param_dtype")
    return str(mixed or fsdp.get("dtype") or "bfloat16")


def _from_model(trainer: Any) -> dict[str, Any]:
    """Ids that end a response, padding and vocabulary, where the model's folder is at hand."""
    tokenizer = getattr(trainer, "tokenizer", None)
    found: dict[str, Any] = {}
    pad = getattr(tokenizer, "pad_token_id", None)
    if isinstance(pad, int):
        found["pad_id"] = pad
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    model, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    if isinstance(model.get("vocab_size"), int):
        found["vocab_size"] = model["vocab_size"]
    if model:  # engines stop at the model's end ids, which may be more than the tokenizer's one
        ends = [getattr(tokenizer, "eos_token_id", None)]
        ends += [model.get("eos_token_id"), generation.get("eos_token_id")]
        ids = {end for item in ends for end in (item if isinstance(item, list) else [item])}
        found["stop_ids"] = tuple(sorted(_whole(ids))) or None
    return found


def _whole(items: Iterable[Any]) -> list[int]:
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
