"""A configuration as verl would read it, without verl: a file, overrides, verl's defaults.

Not covered: composing hydra's ``defaults:`` lists, of which :func:`not_composed` tells. What such a
file does not say itself is taken from the defaults of ``ppo_trainer.yaml`` below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor.problems import Problem

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
MODEL = "actor_rollout_ref.model"
COMPOSE = (
    "Print the whole configuration with `python -m verl.trainer.main_ppo ... --cfg job > job.yaml` "
    "(and --config-path, --config-name as in the run), and name that file."
)
VERSIONS = ("0.7.1", "0.9.1")
"""Versions whose defaults and defects are known, oldest first."""

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.critic_warmup": 0,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.multi_turn.enable": False,
    f"{ROLLOUT}.agent.num_workers": 8,
    f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent",
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{MODEL}.use_remove_padding": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.rollout_correction.bypass_mode": False,
    "critic.strategy": "fsdp",
    "critic.ppo_max_token_len_per_gpu": 32768,
    "reward.reward_model.enable": False,
    "reward.reward_model.enable_resource_pool": False,
}
"""Values of both versions' ``_generated_ppo_trainer.yaml``; a test compares them."""
OF_VERSION: dict[str, dict[str, Any]] = {
    "0.7.1": {"trainer.use_legacy_worker_impl": "auto", f"{ROLLOUT}.calculate_log_probs": False},
    "0.9.1": {"trainer.use_v1": True, f"{ROLLOUT}.calculate_log_probs": True},
}
FOLLOWS = {
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    f"{REF}.log_prob_use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic.ppo_mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "critic.use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    "critic.rollout_n": f"{ROLLOUT}.n",
}
"""Keys that verl's YAML interpolates from another one."""


@dataclass(frozen=True)
class Planned:
    """A configuration and the verl version that is to run it (one of ``VERSIONS``)."""

    config: DictConfig
    version: str

    def get(self, key: str) -> Any:
        """The value, else verl's default; None where neither is there or cannot be resolved."""
        try:
            value = OmegaConf.select(self.config, key)
        except OmegaConfBaseException:  # an interpolation to what the file does not hold
            value = None
        if value is not None:
            return value
        if key in FOLLOWS:
            return self.get(FOLLOWS[key])
        return OF_VERSION[self.version].get(key, DEFAULTS.get(key))

    def count(self, key: str) -> int:
        """A value as whole number of at least 0; raises :class:`UsageError` DPA851 otherwise."""
        value = self.get(key) or 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError("DPA851", f"{key} is {value!r}, no whole number.", "Correct it.")
        return value

    def size(self, key: str) -> int:
        """The same, at least 1: a missing size of a parallel group is 1."""
        return max(1, self.count(key))

    @property
    def v1(self) -> bool:
        """True where verl's V1 trainer runs (TransferQueue), which fills batches up itself."""
        return self.version == "0.9.1" and bool(self.get("trainer.use_v1"))

    @property
    def engine(self) -> bool:
        """True for the engine workers, False for the legacy ones of 0.7.1."""
        return self.version != "0.7.1" or self.get("trainer.use_legacy_worker_impl") == "disable"

    @property
    def megatron(self) -> bool:
        """True where the actor trains with Megatron-core."""
        return bool(self.get(f"{ACTOR}.strategy") == "megatron")

    @property
    def critic(self) -> bool:
        """True where a critic is trained (``need_critic``)."""
        said = self.get("critic.enable")
        return bool(said) if said is not None else self.get("algorithm.adv_estimator") == "gae"

    @property
    def reference(self) -> bool:
        """True where reference log-probs are computed."""
        return bool(self.get("algorithm.use_kl_in_reward") or self.get(f"{ACTOR}.use_kl_loss"))

    @property
    def gpus(self) -> int:
        """Training ranks."""
        return self.size("trainer.nnodes") * self.size("trainer.n_gpus_per_node")

    @property
    def splits(self) -> dict[str, int]:
        """Sizes of the groups of ranks that hold the same rows: tp, pp, cp, or sp of Ulysses."""
        if self.megatron:
            at = f"{ACTOR}.megatron"
            named = (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"))
            return {short: self.size(f"{at}.{name}_parallel_size") for short, name in named}
        return {"sp": self.ulysses}

    @property
    def ulysses(self) -> int:
        """Sequence-parallel size of the actor under FSDP."""
        names = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
        return max(self.size(f"{ACTOR}.{name}") for name in names)


def planned(path: Path, overrides: Sequence[str] = (), *, version: str | None = None) -> Planned:
    """The configuration in a YAML file with overrides ``a.b=c`` (also ``+a.b=c``, ``~a.b``).

    ``version`` None: the one whose keys the configuration has (``trainer.use_v1``,
    ``trainer.use_legacy_worker_impl``), else the newest known one. Raises :class:`UsageError`
    DPA851 for a file that cannot be read and an override of another form.
    """
    config = _read(path)
    if not config and not overrides:
        raise _empty(path)
    _refuse_others(path, config)
    for override in overrides:
        _apply(config, override)
    return Planned(config, version or _told_by(config))


def not_composed(p: Planned) -> Iterator[Problem]:
    """Says that a file with a ``defaults:`` list is only a part of the configuration."""
    listed = p.config.get("defaults")
    if OmegaConf.is_list(listed):
        yield Problem(
            "warn", "DPA851", f"the file has a defaults: list of {len(listed)} entries, which are "
            "not read: verl's own defaults stand for what they would say.", COMPOSE,
        )  # fmt: skip
    elif "defaults" in p.config:
        yield Problem(
            "fail", "DPA851", f"defaults: is {str(listed)[:60]!r}, and hydra takes a list only.",
            f"Write a list of names. {COMPOSE}",
        )  # fmt: skip


def is_ours(path: Path) -> bool:
    """True for a configuration of this package's own loop (it has a section ``audit``)."""
    return "audit" in _read(path)


def _told_by(config: DictConfig) -> str:
    trainer = config.get("trainer")
    keys = set(trainer) if isinstance(trainer, Mapping) or OmegaConf.is_dict(trainer) else set()
    if "use_legacy_worker_impl" in keys and "use_v1" not in keys:
        return "0.7.1"
    return VERSIONS[-1]


def _read(path: Path) -> DictConfig:
    import yaml

    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise UsageError("DPA851", f"{path}: {what}.", "Name a YAML file with the configuration.")
    try:
        text = path.read_text(encoding="utf-8")
        read = OmegaConf.create(text)
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
        OmegaConfBaseException,
        ValueError,
        RecursionError,
    ) as e:
        deep = isinstance(e, RecursionError)
        where = "nested too deeply" if deep else " ".join(str(e).split())
        raise UsageError("DPA851", f"{path}: not YAML ({where}).", "Correct the file.") from e
    if all(line.strip() in ("", "---") or line.lstrip().startswith("#") for line in
           text.splitlines()):  # fmt: skip
        raise _empty(path)
    if not isinstance(read, DictConfig):
        raise UsageError("DPA851", f"{path}: not a mapping.", "Write key: value pairs.")
    other = [key for key in read if not isinstance(key, str)]
    if other:
        raise UsageError("DPA851", f"{path}: the key {other[0]} is no text.", "Correct the file.")
    if len(read) == 1 and next(iter(read.values()), None) is None:  # "any text" is {text: None}
        raise UsageError("DPA851", f"{path}: not a mapping.", "Write key: value pairs.")
    return read


def _refuse_others(path: Path, config: DictConfig) -> None:
    """Raise :class:`UsageError` for configurations of verl's programs that do not train by PPO."""
    if "actor_rollout_ref" in config:
        return
    data = config.get("data")
    evaluation = OmegaConf.is_dict(data) and "response_key" in data
    if evaluation or {"checkpoint", "trainer"} <= set(config):
        what = "evaluation" if evaluation else "SFT trainer"
        raise UsageError(
            "DPA851", f"{path}: a configuration of verl's {what}.",
            "Name one of a PPO trainer: what doctor knows is about these.",
        )  # fmt: skip


def _empty(path: Path) -> UsageError:
    return UsageError(
        "DPA851", f"{path}: the file is empty, so there is nothing to judge.", COMPOSE
    )


def _apply(config: DictConfig, override: str) -> None:
    key, equals, value = override.lstrip("+").partition("=")
    parts = key.removeprefix("~").split(".")
    deletes = override.startswith("~")
    odd = any(" " in part or part.startswith("-") for part in parts)
    if not all(parts) or odd or not (equals or deletes):
        raise UsageError(
            "DPA851", f"{override!r} is no override.", "Write key=value, +key=value or ~key."
        )
    try:
        if deletes:
            holder = OmegaConf.select(config, ".".join(parts[:-1])) if parts[1:] else config
            if OmegaConf.is_dict(holder):
                holder.pop(parts[-1], None)
            return
        told = OmegaConf.from_dotlist([f"{key}={value}"])
        config.merge_with(told)
    except Exception as error:  # what the YAML parser raises has no common base we could name
        where = " ".join(str(error).split())
        raise UsageError(
            "DPA851", f"{override!r} cannot be applied ({where}).", "Write key=value."
        ) from error
