"""Configuration: verl's key names as OmegaConf YAML, with ``key=value`` overrides.

Every key is declared in :mod:`.schema`; an unknown key is an error that names the nearest one. A
ready configuration is given by name (``quickstart``) or a YAML file by path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config_errors import refused
from dataproto_audit.trainer.schema import Config, RewardFunctionConfig

SCORER = "reward.custom_reward_function"
ALIKE = 0.5
"""How much the last parts of two keys have in common where one was meant by the other."""


def ready_configs() -> list[str]:
    """Names of the configurations that come with the package."""
    folder = resources.files("dataproto_audit") / "configs"
    return sorted(
        p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")
    )


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration with overrides applied, typed and complete.

    Another ``data.generator`` starts without arguments: give its ``data.generator_args`` with it.
    Another ``reward.custom_reward_function.path`` starts with the default name, as verl's does.
    Another ``strategy`` starts without what the configuration says about the engine before it.

    Raises:
        UsageError: no such configuration (DPA851), unknown key with the nearest one (DPA850), a
            value of the wrong type (DPA851).
    """
    schema = OmegaConf.structured(Config)
    known = list(_keys(schema))
    merged = schema
    source = _read(name_or_path)
    _refuse_unknown(source, known, name_or_path)
    # A generator comes before its arguments, in whatever order they are given; so does a file
    # before the name of its function.
    parts = list(_dotlist(overrides, known))
    parts.sort(key=lambda part: not (_names_generator(part[0]) or _names_scorer(part[0])))
    for part, origin in ((source, name_or_path), *parts):
        try:
            if part is not source and _names_generator(part):
                merged.data.generator_args = {}  # they belong to the generator before
            if part is not source and _names_scorer(part):
                merged.reward.custom_reward_function.name = RewardFunctionConfig.name
            merged = OmegaConf.merge(merged, part)
        except OmegaConfBaseException as error:
            raise refused(error, origin) from error
    given = [part for part, _ in parts]
    for name in ("level", "trace"):
        if merged.audit[name] == "False":  # YAML reads a bare `off` as a boolean
            merged.audit[name] = "off"
    try:
        OmegaConf.resolve(merged)  # a value may refer to another key: ${data.seed}
    except OmegaConfBaseException as error:
        raise refused(error, name_or_path) from error
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise UsageError("DPA851", f"{name_or_path} does not set {', '.join(missing)}.", "Set it.")
    if not isinstance(merged, DictConfig):
        raise UsageError("DPA851", f"{name_or_path} is not a mapping.", "Write key: value pairs.")
    if any(_ends_in(key, "strategy") for part in given for key in _keys(part)):
        from dataproto_audit.trainer.idle import leave_engine  # imports torch

        leave_engine(merged, source, given)
    return merged


def _ends_in(key: str, name: str) -> bool:
    return key.rpartition(".")[2] == name


def _names_generator(part: DictConfig) -> bool:
    data = None if OmegaConf.is_interpolation(part, "data") else part.get("data")
    return isinstance(data, DictConfig) and "generator" in data


def _names_scorer(part: DictConfig) -> bool:
    """Whether the file of the reward function is given, and not the function's name with it."""
    function = OmegaConf.select(part, SCORER, throw_on_resolution_failure=False)
    return isinstance(function, DictConfig) and "path" in function and "name" not in function


def _line(error: object) -> str:
    """The first line of what a library says, short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _read(name_or_path: str) -> DictConfig:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError("DPA851", f"there is no file {path}.", "Check the path.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                "DPA851", f"{path} cannot be read: {_line(error)}.", "Give a UTF-8 text file."
            ) from error
    else:
        names = ready_configs()
        if name_or_path not in names:
            near = difflib.get_close_matches(name_or_path, names, 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Or name a .yaml file."
            listed = ", ".join(names)
            raise UsageError("DPA851", f"no configuration {name_or_path!r}; ready: {listed}.", hint)
        folder = resources.files("dataproto_audit") / "configs"
        text = (folder / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    try:
        read = OmegaConf.create(text)
    except Exception as error:
        where = str(error).replace("\n", " ")[:400]
        raise UsageError(
            "DPA851", f"{name_or_path} is no valid YAML: {where}.", "Mend it."
        ) from error
    if not isinstance(read, DictConfig):
        raise UsageError("DPA851", f"{name_or_path} is not a mapping.", "Write key: value pairs.")
    return read


def _dotlist(overrides: Sequence[str], known: list[str]) -> Iterator[tuple[DictConfig, str]]:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise UsageError("DPA851", f"{override!r} is no override.", "Write key=value.")
        if key[0] in "+~":  # Hydra's signs, in commands for verl
            raise UsageError(
                "DPA851",
                f"{override!r} is no override: keys are changed, not added or taken away.",
                f"Write {override.lstrip('+~')!r}, if there is such a key.",
            )
        try:
            part = OmegaConf.from_dotlist([override])
        except Exception as error:  # YAML's errors and OmegaConf's, a RecursionError too
            raise UsageError(
                "DPA851", f"{override[:200]!r} is no override: {_line(error)}.", "Write key=value."
            ) from error
        _refuse_unknown(part, known, "the command line")
        yield part, override


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        full = f"{prefix}{key}"
        yield full
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        if isinstance(node[key], DictConfig):
            yield from _keys(node[key], f"{full}.")


def _refuse_unknown(part: DictConfig, known: list[str], origin: str) -> None:
    keys = list(_keys(part))
    for key in keys:
        if key in known or key.startswith("data.generator_args."):
            continue
        if any(other.startswith(f"{key}.") for other in keys):
            continue  # what is below it is unknown too, and says more
        near = " or ".join(_nearest(key, known))
        hint = f"Did you mean {near}?" if near else _keys_beside(key, known)
        raise UsageError("DPA850", f"unknown configuration key {key} in {origin}.", hint)


def _keys_beside(key: str, known: Sequence[str]) -> str:
    """What the section of ``key`` takes, if there is such a section."""
    section = key.rpartition(".")[0]
    beside = [k.rpartition(".")[2] for k in known if section and k.rpartition(".")[0] == section]
    listed = f"{section} takes {', '.join(beside)}. " if beside else ""
    return f"{listed}See docs/configuration.md."


def _nearest(key: str, known: Sequence[str], most: int = 3) -> list[str]:
    """What was meant: keys that end in ``key``, else the nearest one, else by its last part."""
    ends = [k for k in known if k.endswith(f".{key}")]
    if ends:
        return ends[:most]
    own = key.rsplit(".", 1)[-1]
    others = [k for k in known if not key.startswith(f"{k}.")]  # its section is no answer
    for near in difflib.get_close_matches(key, others, 3, 0.5):
        if difflib.SequenceMatcher(None, near.rsplit(".", 1)[-1], own).ratio() >= ALIKE:
            return [near]
    last = {k.rsplit(".", 1)[-1]: k for k in known}
    return [last[k] for k in difflib.get_close_matches(key.rsplit(".", 1)[-1], last, 1)]
