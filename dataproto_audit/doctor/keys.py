"""Keys and values of a configuration that verl does not have, with the nearest that it has.

``verl_keys.txt`` lists the keys of the composed configurations that both wheels ship
(``verl/trainer/config/_generated_ppo_*trainer.yaml``: FSDP, Megatron, VeOmni, TorchTitan), one a
line: ``=`` both versions, else the version; ``.*`` behind a key whose value is empty there, below
which any name may come; ``+`` before those that only the experimental trainers have (fully
asynchronous, one step off, robots), known where the configuration is one of theirs. The tests
compare it with the wheels.

Not covered: names of fields that verl's dataclasses take and its YAML does not have, and what one's
own code reads; hydra wants a ``+`` before both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dataproto_audit.doctor.planned import ACTOR, MODEL, VERSIONS, Planned
from dataproto_audit.doctor.problems import Problem

FILE = Path(__file__).with_name("verl_keys.txt")
ADDED = "+"
TOLD = 10
"""Unknown keys that are named one by one."""
FREE = ("ray_kwargs", "hydra", "defaults")
"""Sections whose names are those of others."""

ESTIMATORS = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo",
    "grpo_passk", "gpg", "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline",
    "tir_optimal_token_baseline", "gdpo",
)  # fmt: skip
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean",
          "cispo", "bypass_mode")  # fmt: skip
SUMS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
REGISTERED = ("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode")
"""Values to which code of one's own can add names."""


@dataclass(frozen=True)
class Known:
    """Names of one version: ``parts`` are sections and keys, below ``free`` any name may come."""

    parts: frozenset[str]
    free: frozenset[str]

    def below(self, section: str) -> list[str]:
        """Names directly in a section ('' is the top)."""
        start = f"{section}." if section else ""
        cut = len(start)
        return [p[cut:] for p in self.parts if p.startswith(start) and "." not in p[cut:]]


@lru_cache(maxsize=4)
def known(version: str, *, experimental: bool = False) -> Known:
    """The keys of one of :data:`VERSIONS`, those of experimental trainers among them or not."""
    parts: set[str] = set()
    free: set[str] = set()
    for line in FILE.read_text(encoding="utf-8").splitlines():
        mark, _, key = line.partition(" ")
        mark = mark.removeprefix(ADDED) if experimental else mark
        if mark not in ("=", version):
            continue
        if key.endswith(".*"):
            key = key.removesuffix(".*")
            free.add(key)
        names = key.split(".")
        parts.update(".".join(names[:end]) for end in range(1, len(names) + 1))
    return Known(frozenset(parts), frozenset(free))


def values(version: str) -> dict[str, tuple[str, ...]]:
    """What keys take that choose one of several names."""
    later = version != "0.7.1"
    penalties = (*KL, *(f"{name}+" for name in KL))
    return {
        "algorithm.adv_estimator": ESTIMATORS,
        "algorithm.kl_penalty": penalties,
        f"{ACTOR}.kl_loss_type": penalties,
        f"{ACTOR}.loss_agg_mode": (*SUMS, "token-sum") if later else SUMS,
        "critic.loss_agg_mode": (*SUMS, "token-sum") if later else SUMS,
        f"{ACTOR}.policy_loss.loss_mode": (*LOSSES, "dro") if later else LOSSES,
    }


def unknown(p: Planned, overrides: Sequence[str] = ()) -> Iterator[Problem]:
    """Keys and values that this version of verl does not have."""
    given = {o.partition("=")[0] for o in overrides if "=" in o}
    added = {key.lstrip("+") for key in given if key.startswith("+")}
    tree = OmegaConf.to_container(p.config, resolve=False)
    names = known(p.version, experimental=_experimental(tree))
    lost = _lost(tree, "", names)
    found = [own for key, value in lost for own in _not_added(key, value, added)]
    for key in found[:TOLD]:
        yield _no_key(key, p.version, overridden=_within(key, given) or _holds(key, given))
    if len(found) > TOLD:
        yield Problem(
            "warn", "DPA850", f"{len(found) - TOLD} more keys are none of verl {p.version}.",
            "Name the version that the configuration is for with --verl.",
        )  # fmt: skip
    yield from _values(p)


def _experimental(tree: Any) -> bool:
    """True for a configuration of verl's fully asynchronous, one-step-off or robot trainers."""
    rollout = tree.get("rollout")
    apart = isinstance(rollout, dict) and "nnodes" in rollout
    return apart or any(isinstance(tree.get(name), dict) for name in ("async_training", "env"))


def _not_added(key: str, value: Any, added: set[str]) -> Iterator[str]:
    """``key``, or what is below it, as far as no ``+`` brought it in."""
    if _within(key, added):
        return
    if isinstance(value, dict) and _holds(key, added):
        for name, item in value.items():
            yield from _not_added(f"{key}.{name}", item, added)
    else:
        yield key


def _lost(tree: Any, at: str, names: Known) -> Iterator[tuple[str, Any]]:
    """Dotted names, the shortest that are not known, and what they hold."""
    for name, value in tree.items():
        key = f"{at}.{name}" if at else str(name)
        if key in FREE:
            continue
        if key not in names.parts:
            if at not in names.free:
                yield key, value
        elif isinstance(value, dict):
            yield from _lost(value, key, names)


def _within(key: str, keys: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _holds(key: str, keys: set[str]) -> bool:
    return any(other.startswith(f"{key}.") for other in keys)


def _no_key(key: str, version: str, *, overridden: bool) -> Problem:
    names = known(version)
    section, _, name = key.rpartition(".")
    near = [f"{section}.{n}".lstrip(".") for n in get_close_matches(name, names.below(section), 1)]
    near = near or sorted(part for part in names.parts if part.endswith(f".{key}"))[:3]
    near = near or sorted(part for part in names.parts if part.endswith(f".{name}"))[:3]
    others = [v for v in VERSIONS if v != version and key in known(v).parts]
    told = f"; it is one of verl {others[0]}" if others else ""
    hint = f"Did you mean {' or '.join(near)}? " if near and not others else ""
    if overridden:
        text = f"verl {version} has no key {key}{told}, and refuses to override it."
        return Problem("fail", "DPA850", text, f"{hint}One that is meant is added with +{key}=...")
    text = f"verl {version} has no key {key}{told}."
    return Problem("warn", "DPA850", text, f"{hint}Leave it where your own code reads it.")


def _values(p: Planned) -> Iterator[Problem]:
    for key, allowed in values(p.version).items():
        value = p.get(key)
        if value is None or value in allowed:
            continue
        near = get_close_matches(str(value), allowed, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        own = key in REGISTERED and bool(p.get(f"{MODEL}.external_lib"))
        yield Problem(
            "warn" if own else "fail", "DPA851", f"{key} is {value!r}, which verl {p.version} "
            "does not have" + (" unless your external_lib registers it." if own else "."),
            f"{hint}There are {', '.join(allowed)}.",
        )  # fmt: skip
