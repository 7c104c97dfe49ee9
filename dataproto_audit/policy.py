"""What a project wants reported: codes, severities, tolerances, names of its own.

In ``pyproject.toml``::

    [tool.dataproto_audit]
    ignore = ["DPA702"]                     # codes or families: "DPA7" is all of 7xx
    severities = { DPA208 = "warn" }
    tolerances = { log_prob_token = 0.05 }  # nats; of one token, and log_prob_mean of the mean
    aliases.old_log_probs = { name = "logprobs", shift = 1 }

or the same keys in a YAML file. A shift is always told, never guessed: column ``t`` of the named
field holds what belongs to column ``t + shift`` of ours.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from dataproto_audit.codes import CODES, UsageError
from dataproto_audit.findings import Finding, Outcome, Report, Severity

KEYS = ("select", "ignore", "severities", "tolerances", "aliases")
READABLE = "Give a file that can be read and parsed; docs/checking.md shows one."
LISTING = "`dataproto-audit codes` lists them."
FAMILY = re.compile(r"DPA\d{1,3}")
"""Codes, and beginnings that mean a family; less than that would be everything."""
TOLERANCES = ("log_prob_token", "log_prob_mean")


@dataclass(frozen=True)
class Alias:
    """A field under another name; ``shift`` columns lie between its convention and ours."""

    name: str
    shift: int = 0


@dataclass(frozen=True)
class Policy:
    """What to report and how. The default reports everything as the catalogue says."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severities: Mapping[str, Severity] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)

    def renamed(self) -> dict[str, tuple[str, int]]:
        """Our names -> (name in the batch, shift), for :meth:`BatchView.under`."""
        return {ours: (alias.name, alias.shift) for ours, alias in self.aliases.items()}

    def reports(self, code: str) -> bool:
        """True when findings of this code are wanted. Faults of this package always are."""
        if code.startswith("DPA9"):
            return True
        chosen = not self.select or code.startswith(self.select)
        return chosen and not (self.ignore and code.startswith(self.ignore))

    def apply(self, report: Report) -> None:
        """Drop what is not wanted and set severities. A dropped check counts as not applicable."""
        if not (self.select or self.ignore or self.severities):
            return
        kept = [self._weighed(f) for f in report.findings if self.reports(f.code)]
        settled = {f.check for f in report.findings} - {f.check for f in kept}
        report.findings[:] = kept
        report.outcomes[:] = [
            Outcome(outcome.check, outcome.code, "not_applicable", "ignored by configuration")
            if outcome.kind == "failed" and outcome.check in settled
            else outcome
            for outcome in report.outcomes
        ]

    def _weighed(self, finding: Finding) -> Finding:
        severity = self.severities.get(finding.code)
        return finding if severity is None else replace(finding, severity=severity)


def refuse_hidden(aliases: Mapping[str, tuple[str, int]], names: Iterable[str]) -> None:
    """Raise :class:`UsageError` where these aliases would hide one of the fields ``names``.

    That is where two read one field, or where one is written over a field that stays.
    """
    known, sources = set(names), [theirs for theirs, _ in aliases.values()]
    for ours, (theirs, _) in aliases.items():
        if theirs in known and sources.count(theirs) > 1:
            raise UsageError(
                "DPA851",
                f"several aliases name the field {theirs}.",
                "Give each field a source of its own.",
            )
        if theirs in known and ours in known and ours not in sources:
            raise UsageError(
                "DPA851",
                f"aliases.{ours} names {theirs}, but the batch holds both.",
                "An alias may not hide a field: leave it out, or rename the other one.",
            )


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """The policy of a TOML or YAML file; without one that of ``pyproject.toml`` here, if any.

    Raises :class:`UsageError` for an unreadable file, an unknown key, code or severity.
    """
    if path is None:
        here = Path("pyproject.toml")
        return _policy(_toml(here), str(here)) if here.is_file() else Policy()
    source = Path(path)
    if source.suffix == ".toml":
        return _policy(_toml(source), str(source))
    return _policy(read_yaml(source, keys=KEYS), str(source))


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise _unreadable(path, error) from error
    tool = whole.get("tool", {})
    if not isinstance(tool, Mapping):
        raise UsageError("DPA851", f"{path}: tool is not a table.", "See docs/checking.md.")
    own = tool.get("dataproto_audit", {})
    return own if isinstance(own, Mapping) else {"tool.dataproto_audit": own}


def _unreadable(path: Path, error: Exception) -> UsageError:
    told = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return UsageError("DPA851", f"{path}: cannot be read ({' '.join(told.split())}).", READABLE)


def read_yaml(path: Path, *, keys: Iterable[str]) -> Mapping[str, Any]:
    """The mapping in a YAML file, which may hold ``keys``. Raises :class:`UsageError`."""
    import yaml

    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unreadable(path, error) from error
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise UsageError("DPA851", f"{path}: not a mapping.", f"Known keys: {', '.join(keys)}.")
    return own


def _policy(own: Mapping[str, Any], where: str) -> Policy:
    unknown = [key for key in own if key not in KEYS]
    if unknown:
        raise UsageError(
            "DPA850", f"{where}: unknown key {unknown[0]}.", f"Known keys: {', '.join(KEYS)}."
        )
    lists = {key: _codes(own.get(key, ()), key, where) for key in ("select", "ignore")}
    severities = _mapping(own, "severities", where)
    for code, severity in severities.items():
        if code not in CODES:
            raise UsageError(
                "DPA851", f"{where}: severities names {code}, which is no code.", LISTING
            )
        if severity not in get_args(Severity):
            listed = ", ".join(get_args(Severity))
            raise UsageError("DPA851", f"{where}: severity {severity!r}.", f"Choose from {listed}.")
    tolerances = _mapping(own, "tolerances", where)
    for name, value in tolerances.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in TOLERANCES or not number or not 0 <= value < math.inf:
            listed = ", ".join(TOLERANCES)
            raise UsageError(
                "DPA851", f"{where}: tolerances.{name} = {value!r}.",
                f"Numbers of nats, finite and not negative, for {listed}.",
            )  # fmt: skip
    aliases = {
        name: _alias(name, value, where) for name, value in _mapping(own, "aliases", where).items()
    }
    sources: dict[str, str] = {}
    for name, alias in aliases.items():
        if sources.setdefault(alias.name, name) != name:
            raise UsageError(
                "DPA851", f"{where}: aliases.{sources[alias.name]} and aliases.{name} both name "
                f"{alias.name}.", "Give each field a source of its own.",
            )  # fmt: skip
    return Policy(**lists, severities=severities, tolerances=tolerances, aliases=aliases)


def _codes(listed: Any, key: str, where: str) -> tuple[str, ...]:
    lists = isinstance(listed, (list, tuple))
    if not lists or not all(isinstance(code, str) for code in listed):
        raise UsageError(
            "DPA851", f"{where}: {key} is not a list of codes.", f'Write {key} = ["DPA301"].'
        )
    for code in listed:
        if not FAMILY.fullmatch(code) or not any(known.startswith(code) for known in CODES):
            raise UsageError(
                "DPA851", f"{where}: {key} names {code!r}, which is no code and no family.",
                f"{LISTING} A family is DPA and its first digits, such as DPA7.",
            )  # fmt: skip
    return tuple(listed)


def _mapping(own: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = own.get(key, {})
    if not isinstance(value, Mapping):
        raise UsageError("DPA851", f"{where}: {key} is not a mapping.", "See docs/checking.md.")
    return dict(value)


def _alias(field: str, value: Any, where: str) -> Alias:
    if not isinstance(field, str):
        raise UsageError(
            "DPA851",
            f"{where}: aliases.{field} is no name of a field.",
            "Put our name on the left.",
        )
    if isinstance(value, str):
        return Alias(value)
    if isinstance(value, Mapping) and set(value) <= {"name", "shift"}:
        name, shift = value.get("name", field), value.get("shift", 0)
        if isinstance(name, str) and isinstance(shift, int) and not isinstance(shift, bool):
            return Alias(name, shift)
    raise UsageError(
        "DPA851", f"{where}: aliases.{field} = {value!r}.",
        "Write a name, or name and shift (a number of columns).",
    )  # fmt: skip
