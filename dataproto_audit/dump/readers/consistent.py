"""What can be told of a file that keeps one number a row, where tokens are not in it.

Facts only; :mod:`dataproto_audit.checker.own_file` judges them.

* :func:`samples_of`: rows that are a sample of an earlier row. Its identity is what the framework
  numbers it by; writers that append leave a task twice when they are started again.
* :func:`groups_of`: groups whose rows with the same rewards differ in their advantage, or have one
  where all rewards of the group are equal. Neither is possible for a rule that compares a row with
  its group, however it is divided, and for any weights of the reward functions, which such files
  do not tell. It is possible for plain REINFORCE++ (whitened over the batch) and for GAE, so only
  files of :data:`BY_GROUP` are compared, and others that name an estimator of a group.

Not covered: advantages of rows whose rewards all differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd, isclose
from typing import Any

from dataproto_audit.dump.readers.saved import Saved

KEYS: Mapping[str, tuple[str, ...]] = {
    "areal": ("uid", "sample_idx"),
    "open_instruct": ("sample_idx",),
    "slime": ("sample_index",),
    "prime_rl": ("trace", "nodes"),
    "verl": ("store_key",),
}
"""Columns that tell the samples of one file and step apart, by framework."""
TOLERANCE = 1e-3
BY_GROUP = ("trl", "open_instruct")
"""Frameworks whose one number a row is always made by comparing with the group."""
ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
"""Values of ``adv_estimator`` in a file that compare a row with its group."""


@dataclass(frozen=True)
class Samples:
    """How often the samples of a file are in it, by the columns ``names``, which number them."""

    names: tuple[str, ...]
    total: int
    repeated: tuple[int, ...] = ()
    """Rows whose sample an earlier row is, too."""
    first: str = ""
    """Identity of the first of these."""


@dataclass(frozen=True)
class Groups:
    """Groups of a file, ``size`` rows in the first, and those whose advantages are not theirs."""

    total: int
    size: int
    odd: int = 0
    rows: tuple[int, ...] = ()
    """All rows of the ``odd`` groups."""


def samples_of(saved: Saved) -> Samples | None:
    """The samples of the file of ``saved``; None where it does not number them."""
    names = KEYS.get(saved.framework, ())
    if not names or not all(name in saved.arrays for name in names):
        return None
    columns = [saved.arrays[name].tolist() for name in names]
    keys = [tuple(map(str, key)) for key in zip(*columns, strict=True)]
    first: dict[tuple[str, ...], int] = {}
    rows = tuple(row for row, key in enumerate(keys) if first.setdefault(key, row) != row)
    return Samples(names, len(keys), rows, ", ".join(keys[rows[0]]) if rows else "")


def groups_of(saved: Saved) -> Groups | None:
    """The groups of ``saved``, compared; None where rewards, advantages or the rule are not told.

    A file of a known rule whose groups cannot be told apart has none: ``total`` is 0.
    """
    rewards = _rewards(saved)
    if not rewards or "advantage" not in saved.arrays or not _by_group(saved):
        return None
    told = [_number(value) for value in saved.arrays["advantage"].tolist()]
    groups = [group for group in _groups(saved) if len(group) > 1]
    odd = [group for group in groups if _is_odd(group, rewards, told)]
    rows = tuple(row for group in odd for row in group)
    return Groups(len(groups), len(groups[0]) if groups else 0, len(odd), rows)


def _is_odd(
    group: Sequence[int], rewards: Sequence[tuple[float, ...]], told: Sequence[float]
) -> bool:
    by_reward: dict[tuple[float, ...], list[int]] = {}
    for row in group:
        by_reward.setdefault(rewards[row], []).append(row)
    equal = all(
        isclose(told[row], told[min(rows)], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for rows in by_reward.values() for row in rows
    )  # fmt: skip
    return not equal or (len(by_reward) == 1 and any(abs(told[row]) > TOLERANCE for row in group))


def _by_group(saved: Saved) -> bool:
    """Whether the file says, or its framework implies, that advantages compare within a group."""
    told = saved.meta.get("adv_estimator")
    return saved.framework in BY_GROUP if told is None else str(told).lower() in ESTIMATORS


def _rewards(saved: Saved) -> list[tuple[float, ...]]:
    """What the advantage of each row was made of: numbers, 0 for a missing one."""
    if saved.framework == "trl":
        names = [
            name for name, column in saved.arrays.items()
            if name != "advantage" and any(type(v) is float for v in column.tolist())
            and all(v is None or type(v) is float for v in column.tolist())
        ]  # fmt: skip
    else:
        names = [name for name in ("score",) if name in saved.arrays]
    columns = [[_number(v) for v in saved.arrays[name].tolist()] for name in names]
    return list(zip(*columns, strict=True))


def _number(value: Any) -> float:
    known = isinstance(value, (int, float)) and value == value
    return float(value) if known else 0.0


def _groups(saved: Saved) -> list[Sequence[int]]:
    """Rows of each group: all with one uid, or neighbours with one prompt in equal pieces."""
    if "uid" in saved.arrays:
        members: dict[str, list[int]] = {}
        for row, uid in enumerate(saved.arrays["uid"].tolist()):
            members.setdefault(str(uid), []).append(row)
        return list(members.values())
    if "raw_prompt" not in saved.arrays:
        return []
    sizes = [len(list(run)) for _, run in groupby(map(str, saved.arrays["raw_prompt"].tolist()))]
    if len(sizes) < 2:
        return []  # one prompt: how many groups it was sampled in is not told
    size = gcd(*sizes)
    return [range(start, start + size) for start in range(0, sum(sizes), size)]
