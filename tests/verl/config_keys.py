"""Keys of the configurations that verl's wheels ship, as ``doctor/verl_keys.txt`` lists them.

``python -m tests.verl.config_keys`` writes that file from the environments of ``make test-verl``.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from dataproto_audit.doctor.keys import ADDED, FILE
from dataproto_audit.doctor.planned import VERSIONS

from .runs import python

OTHERS = ("sft_trainer_engine.yaml", "evaluation.yaml")
"""Configurations of programs that are no PPO trainer."""


def shipped(version: str) -> list[Any]:
    """What each kind of engine is composed to, and the name of the choice of engine, which
    composing writes at the top."""
    folder = site(version) / "trainer" / "config"
    engines = sorted((folder / "model_engine").glob("*.yaml"))
    return _read([*sorted(folder.glob("_generated_ppo_*trainer.yaml")), *engines])


def added(version: str) -> list[Any]:
    """What the experimental trainers have beyond that."""
    return _read(path for path in configurations(version) if "experimental" in path.parts)


def _read(files: Iterable[Path]) -> list[Any]:
    trees = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    return [{k: v for k, v in tree.items() if k not in ("hydra", "defaults")} for tree in trees]


def site(version: str) -> Path:
    """The package of the wheel."""
    [found] = (python(version).parents[1] / "lib").glob("python3*/site-packages/verl")
    return found


def configurations(version: str) -> list[Path]:
    """Every file that a trainer of the wheel is started with."""
    folder = site(version)
    own = sorted((folder / "trainer" / "config").glob("*.yaml"))
    return own + sorted((folder / "experimental").glob("*/config/*.yaml"))


def keys(tree: Any, at: str = "") -> Iterator[str]:
    """Dotted names of what has a value, and ``name.*`` for what is empty."""
    for name, value in tree.items():
        key = f"{at}{name}"
        if isinstance(value, dict) and value:
            yield from keys(value, f"{key}.")
        else:
            yield f"{key}.*" if value in (None, {}, []) or isinstance(value, list) else key


def listed() -> str:
    """The text of the file."""
    known = {v: {key for tree in shipped(v) for key in keys(tree)} for v in VERSIONS}
    more = {v: {key for tree in added(v) for key in keys(tree)} - known[v] for v in VERSIONS}
    lines = [*_lines(known), *(f"{ADDED}{line}" for line in _lines(more))]
    return "\n".join(lines) + "\n"


def _lines(known: dict[str, set[str]]) -> list[str]:
    every = sorted(set().union(*known.values()))
    marks = {key: [v for v in VERSIONS if key in known[v]] for key in every}
    return [f"{'=' if len(marks[key]) == len(VERSIONS) else marks[key][0]} {key}" for key in every]


if __name__ == "__main__":
    FILE.write_text(listed(), encoding="utf-8")
