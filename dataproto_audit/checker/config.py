"""Settings of a run from what lies around: a configuration, and the meta entries of a batch.

A configuration is a :class:`Settings`, a mapping (nested as verl's YAML, flat with dots, or with
our own names), the path of a YAML file, or a text of ``key=value`` with blanks between. It wins
over the meta entries; what neither says stays unknown, and the checks that need it are
``not_checkable``.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from dataproto_audit.codes import UsageError
from dataproto_audit.probes import Settings

YAML = "Give a mapping, or a YAML file such as verl's or a run's config.yaml."
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NAMES: dict[str, tuple[str, ...]] = {
    "n": (f"{ROLLOUT}.n",),
    "temperature": (f"{ROLLOUT}.temperature",),
    "top_p": (f"{ROLLOUT}.top_p",),
    "top_k": (f"{ROLLOUT}.top_k",),
    "adv_estimator": ("algorithm.adv_estimator",),
    "norm_adv_by_std": ("algorithm.norm_adv_by_std_in_grpo", "norm_adv_by_std_in_grpo"),
    "gamma": ("algorithm.gamma",),
    "lam": ("algorithm.lam",),
    "loss_agg_mode": (f"{ACTOR}.loss_agg_mode",),
    "clip_ratio_low": (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio", "clip_ratio"),
    "clip_ratio_high": (f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio", "clip_ratio"),
    "clip_ratio_c": (f"{ACTOR}.clip_ratio_c",),
    "use_kl_loss": (f"{ACTOR}.use_kl_loss",),
    "kl_loss_coef": (f"{ACTOR}.kl_loss_coef",),
    "kl_loss_type": (f"{ACTOR}.kl_loss_type",),
    "entropy_coeff": (f"{ACTOR}.entropy_coeff",),
    "ppo_epochs": (f"{ACTOR}.ppo_epochs",),
    "use_kl_in_reward": ("algorithm.use_kl_in_reward",),
    "multi_turn": (f"{ROLLOUT}.multi_turn.enable",),
    "stop_ids": ("eos_token_id", "stop_token_ids"),
    "pad_id": ("pad_token_id",),
    "max_response_length": ("data.max_response_length",),
    "vocab_size": ("model.vocab_size",),
    "world_size": ("dp_size", "data_parallel_size"),
    "tp_size": ("tensor_model_parallel_size", f"{ACTOR}.megatron.tensor_model_parallel_size"),
    "cp_size": ("context_parallel_size", f"{ACTOR}.megatron.context_parallel_size"),
    "sp_size": ("ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    "micro_batch_size": (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",),
    "actor_micro_batch_size": (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    "max_token_len": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "rollout_dtype": (f"{ROLLOUT}.dtype",),
    "exact_log_probs": ("true_on_policy",),
    "tool_ids": ("tool_token_ids",),
    "image_ids": ("image_token_id", "image_token_ids"),
    "merge_size": ("spatial_merge_size",),
}
"""Other names of a setting, the first that is there counts: verl's keys, then meta entries."""

AT_LEAST: dict[str, float] = {
    **dict.fromkeys(
        ("n", "world_size", "tp_size", "cp_size", "sp_size", "micro_batch_size", "merge_size",
         "actor_micro_batch_size", "max_token_len", "max_response_length", "vocab_size",
         "ppo_epochs"), 1,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "gamma", "lam", "clip_ratio_low", "clip_ratio_high",
         "clip_ratio_c", "log_prob_token", "log_prob_mean", "stop_ids", "tool_ids", "image_ids"), 0,
    ),
}  # fmt: skip
"""The smallest value of a setting that means anything; of a list, of each entry."""


def settings_from(config: Any, meta: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """Settings, and for each meta entry of an unusable kind what is wrong with it.

    Raises :class:`UsageError` for an unreadable configuration, or one with a value of a wrong kind.
    """
    known = config if isinstance(config, Settings) else None
    given = {} if known or config is None else dict(_flat(_loaded(config)))
    _refuse_typos(given)
    base = known or Settings()
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, kind in get_type_hints(Settings).items():
        if getattr(base, name) is not None:
            continue
        for source, place in ((given, "configuration"), (meta, "meta")):
            key = next((k for k in (name, *NAMES.get(name, ())) if source.get(k) is not None), None)
            if key is None:
                continue
            value, problem = _as(kind, source[key])
            problem = problem or _too_small(name, value)
            if not problem:
                found[name] = value
                break
            if place == "configuration":
                raise UsageError(
                    "DPA851", f"the configuration says {key}={source[key]!r}, {problem}.",
                    "Correct it, or leave it out.",
                )  # fmt: skip
            wrong[key] = problem
    return replace(base, **found), wrong


PAIR = re.compile(r"[A-Za-z_][\w.]*=.*")
"""One word of a configuration that is written out."""


def _known() -> set[str]:
    """Every name that a setting is read from."""
    return {*get_type_hints(Settings), *(name for names in NAMES.values() for name in names)}


def _refuse_typos(given: Mapping[str, Any]) -> None:
    """An unknown plain name that is nearly a setting's; keys with dots belong to verl's sections,
    which hold many more than we read."""
    known = _known()
    plain = sorted(name for name in known if "." not in name)
    for name in given:
        near = difflib.get_close_matches(str(name), plain, 1, cutoff=0.8)
        if near and name not in known and "." not in str(name):
            raise UsageError(
                "DPA850", f"the configuration has an unknown key {name!r}.",
                f"Did you mean {near[0]!r}?",
            )  # fmt: skip


def _loaded(config: Any) -> Any:
    if isinstance(config, (str, os.PathLike)):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            if _is_inline(config):
                config = OmegaConf.from_dotlist(str(config).split())
                _refuse_unread(OmegaConf.to_container(config, resolve=False))
            else:
                config = OmegaConf.create(Path(config).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError("DPA851", f"{config}: cannot be read ({error}).", YAML) from error
        except (OmegaConfBaseException, ValueError) as error:
            raise UsageError("DPA851", f"{config}: not YAML ({error}).", YAML) from error
        except Exception as error:  # what the YAML parser raises has no common base we could name
            if type(error).__module__.startswith("yaml"):
                raise UsageError("DPA851", f"{config}: not YAML ({error}).", YAML) from error
            raise
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=False)
    if not isinstance(config, Mapping):
        raise UsageError(
            "DPA851",
            f"a configuration is a mapping or a YAML file, not {type(config).__name__}.",
            YAML,
        )
    return config


def _is_inline(config: str | os.PathLike[str]) -> bool:
    """True for ``adv_estimator=grpo n=4``, which is no file."""
    words = str(config).split()
    inline = isinstance(config, str) and bool(words) and all(map(PAIR.fullmatch, words))
    named = str(config).endswith((".yaml", ".yml"))
    return inline and not named and not Path(config).exists()


def _refuse_unread(given: Any) -> None:
    """Of pairs that were typed to be read, one that nothing reads is a mistake."""
    known = _known()
    for name, _ in _flat(given):
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            raise UsageError(
                "DPA850", f"no setting is read from {name!r}.",
                f"Did you mean {near[0]!r}?" if near else "Name a setting, or a file of them.",
            )  # fmt: skip


def _flat(config: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _too_small(name: str, value: Any) -> str:
    """What is wrong with a value below the smallest one; '' where nothing is."""
    least = AT_LEAST.get(name)
    small = least is not None and min(
        value if isinstance(value, tuple) else (value,), default=least
    )
    return f"which is below {least:g}" if least is not None and small < least else ""


def _as(kind: Any, value: Any) -> tuple[Any, str]:
    """``value`` as the declared kind of a setting, or what is wrong with it."""
    kinds = [k for k in get_args(kind) if k is not type(None)]
    wanted = kinds[0] if kinds else kind
    if hasattr(value, "ndim") and hasattr(value, "tolist"):  # of numpy or torch
        try:
            value = value.tolist()
        except (NotImplementedError, RuntimeError):  # a tensor without data, or quantised
            return None, "which cannot be read"
    if wanted is bool:
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value), ""
        return None, "which is neither true nor false"
    if wanted is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value, ""
        if isinstance(value, float) and value.is_integer():
            return int(value), ""
        return None, "which is no whole number"
    if wanted is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if -sys.float_info.max <= value <= sys.float_info.max:
                return float(value), ""
            return None, "which is not finite"
        return None, "which is no number"
    if wanted is str:
        return (value, "") if isinstance(value, str) else (None, "which is no text")
    items = value if isinstance(value, (list, tuple, set)) else [value]
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items):
        return tuple(int(item) for item in items), ""
    return None, "which is no list of ids"
