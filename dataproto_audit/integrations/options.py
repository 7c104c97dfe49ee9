"""How an attached audit is set up: by call, by environment, by YAML file.

What a call says wins over ``DATAPROTO_AUDIT_*`` variables, these over the file that
``DATAPROTO_AUDIT_CONFIG`` (or ``config=``) names, and that over the defaults. Names are the same
everywhere: ``every_n_steps=10``, ``DATAPROTO_AUDIT_EVERY_N_STEPS=10``, ``every_n_steps: 10``.
Lists are written with commas in a variable, and an empty one counts as not set.
``DATAPROTO_AUDIT`` itself switches the plugin on (``1``) or off (``0``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.retention import Retention
from dataproto_audit.policy import load_policy, read_yaml

PREFIX = "DATAPROTO_AUDIT_"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
CHOICES = {"level": ("off", "shape", "full"), "on_fail": ("raise", "warn", "record")}
STAGES = (
    "prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob", "values",
    "kl_reward", "advantage", "update_critic", "update_actor", "sync_weights", "validation",
)  # fmt: skip
"""Stages that an attached trainer passes; a test compares them with the declared ones."""


@dataclass(frozen=True)
class Options:
    """What to audit and how.

    ``stages`` and ``ranks`` empty mean all; ``ranks`` counts where a process has a rank (variable
    ``RANK``), which the driver has not. ``rows`` larger than 0 looks at about that many rows of a
    step, in whole groups. ``run_dir`` empty means ``reports/verl-<experiment>-<time>``; one that
    a run has written into already is kept, and ``run_dir-2``... is written beside it.
    ``trace`` is what is recorded of the batches (docs/traces.md), or ``off``.
    ``workers`` looks into verl's workers, too; with it, a stage of theirs in which nothing moves
    for ``hang_timeout_s`` is reported (0: only on SIGUSR1).
    """

    level: str = "full"
    on_fail: str = "warn"
    every_n_steps: int = 1
    stages: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    rows: int = 0
    run_dir: str = ""
    policy: str = ""
    tables: bool = True
    metrics: bool = True
    flight_recorder: bool = True
    trace: str = "last:1"
    workers: bool = False
    hang_timeout_s: int = 600

    def looks_at(self, step: int) -> bool:
        """True for steps that are audited; the first trained step, 1, always is."""
        return self.every_n_steps <= 1 or step % self.every_n_steps == 1 or step == 0

    def here(self) -> bool:
        """True where this process is to be audited: one of ``ranks`` or without a rank, not off."""
        if self.level == "off":
            return False
        rank = os.environ.get("RANK", "")
        return not self.ranks or not rank.isdecimal() or int(rank) in self.ranks


KNOWN = tuple(f.name for f in fields(Options))


def switched_on(environ: Mapping[str, str] | None = None) -> bool | None:
    """What ``DATAPROTO_AUDIT`` says; None where it is not set or empty, :class:`UsageError` for
    nonsense."""
    value = (os.environ if environ is None else environ).get("DATAPROTO_AUDIT")
    if value is None or not value.strip():
        return None
    return bool(_flag("DATAPROTO_AUDIT", value))


def options(
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **told: Any,
) -> Options:
    """Options from a call, the environment and a file. Raises :class:`UsageError` DPA850, DPA851
    for names and values that do not exist, with those that do."""
    environ = os.environ if environ is None else environ
    own = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}TEST_") and value.strip()
    }
    path = config or own.pop("config", "")
    own.pop("config", None)
    found = Options()
    if path:
        found = _with(
            found, read_yaml(Path(path).expanduser(), keys=KNOWN), lambda name: f"{path}: {name}"
        )
    found = _with(found, own, lambda name: f"{PREFIX}{name.upper()}")
    return _with(found, {k: v for k, v in told.items() if v is not None}, lambda name: name)


def _with(base: Options, given: Mapping[str, Any], place: Any) -> Options:
    changed = {}
    for name, value in given.items():
        if name not in KNOWN:
            near = get_close_matches(str(name), KNOWN, 1)  # a YAML key may be a number
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(
                "DPA850", f"{place(name)}: no such setting.", f"{hint}There are {', '.join(KNOWN)}."
            )
        changed[name] = _value(name, value, place(name))
    return replace(base, **changed)


def _value(name: str, value: Any, place: str) -> Any:
    default = getattr(Options, name)
    if name in CHOICES:
        return _chosen(place, _word(value), CHOICES[name])
    if isinstance(default, bool):
        return _flag(place, value)
    if isinstance(default, int):
        return _count(place, value, least=1 if name == "every_n_steps" else 0)
    if name == "trace":
        word = _word(value)
        if word != "off":
            _retention(word, place)
        return word
    if name == "policy" and value:
        load_policy(os.path.expanduser(str(value)))  # refused here, not where training runs
    if name == "stages":
        return tuple(_chosen(place, item, STAGES) for item in _items(value))
    if name == "ranks":
        return tuple(_count(place, item, least=0) for item in _items(value))
    if isinstance(value, (str, os.PathLike)):
        return os.path.expanduser(os.fspath(value))  # "~" means nothing to the file system
    raise UsageError("DPA851", f"{place}={value!r} is no path.", "Give a path as text.")


def _retention(word: str, place: str) -> None:
    try:
        Retention.parse(word, key=place)
    except UsageError as error:
        remedy = f"{error.remedy.rstrip('.')}, or off."
        raise UsageError(error.code, error.message, remedy) from error


def _word(value: Any) -> str:
    return "off" if value is False else str(value).strip()  # YAML reads a bare off as false


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


def _chosen(place: str, value: Any, among: tuple[str, ...]) -> str:
    if value in among:
        return str(value)
    raise UsageError("DPA851", f"{place} is {value!r}.", f"Choose from {', '.join(among)}.")


def _flag(place: str, value: Any) -> bool:
    word = str(value).strip().lower()
    if word in ON or word in OFF:
        return word in ON
    raise UsageError("DPA851", f"{place} is {value!r}.", f"Choose from {', '.join((*ON, *OFF))}.")


def _count(place: str, value: Any, *, least: int) -> int:
    try:
        number = int(str(value)) if not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if number < least:
        remedy = f"Give a whole number from {least} on."
        raise UsageError("DPA851", f"{place} is {value!r}.", remedy)
    return number
