"""What is wrong with a file itself, seen without knowing how its batch should be aligned.

Two checks of dumps that keep one number a row, where the checks of a batch have nothing to go by:

* ``dump.samples``: every sample is in the file once. Its identity is what the framework numbers it
  by; writers that append leave a task twice when they are started again.
* ``dump.advantage``: rows of a group with the same rewards have the same advantage, and where all
  rewards of a group are equal it is 0. That holds for every rule that compares a row with its
  group, however it is divided, and for any weights of the reward functions, which such files do
  not tell. It does not hold for plain REINFORCE++ (whitened over the batch) and for GAE, so it is
  asked only of :data:`BY_GROUP`, and of other files that name an estimator of a group.

Not covered: advantages of rows whose rewards all differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd, isclose
from typing import Any

from dataproto_audit.dump.readers.saved import Saved
from dataproto_audit.findings import Finding, Outcome, Report

SAMPLES, ADVANTAGE = "dump.samples", "dump.advantage"
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
"""Values of ``adv_estimator`` in a file for which the rule of ``dump.advantage`` holds."""


def report_of(saved: Saved) -> Report:
    """Findings and outcomes about the file of ``saved``; empty where neither check applies."""
    report = Report()
    keys = [name for name in KEYS.get(saved.framework, ()) if name in saved.arrays]
    if keys and len(keys) == len(KEYS[saved.framework]):
        _add(report, SAMPLES, "DPA105", list(_twice(saved, keys)))
    rewards = _rewards(saved)
    if rewards and "advantage" in saved.arrays and _by_group(saved):
        _add(report, ADVANTAGE, "DPA408", list(_advantages(saved, rewards)))
    return report


def _add(report: Report, check: str, code: str, found: Sequence[Finding]) -> None:
    report.findings += found
    report.outcomes.append(Outcome(check, code, "failed" if found else "passed"))


def _twice(saved: Saved, names: Sequence[str]) -> Iterator[Finding]:
    columns = [saved.arrays[name].tolist() for name in names]
    keys = [tuple(map(str, key)) for key in zip(*columns, strict=True)]
    first: dict[tuple[str, ...], int] = {}
    rows = [row for row, key in enumerate(keys) if first.setdefault(key, row) != row]
    if rows:
        yield Finding(
            code="DPA105", severity="fail", stage="rollout", check=SAMPLES, field=names[-1],
            step=saved.hint.step, rows=tuple(rows),
            expected=f"each ({', '.join(names)}) once",
            actual=f"{len(rows)} of {len(keys)} rows repeat an earlier one",
            evidence={"first repeated": ", ".join(keys[rows[0]])}, causes=("rows_lost",),
            hint="the writer appends: remove what an earlier run left before it writes again",
        )  # fmt: skip


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


def _advantages(saved: Saved, rewards: Sequence[tuple[float, ...]]) -> Iterator[Finding]:
    told = [_number(value) for value in saved.arrays["advantage"].tolist()]
    wrong: list[int] = []
    groups = [group for group in _groups(saved) if len(group) > 1]
    for group in groups:
        by_reward: dict[tuple[float, ...], set[int]] = {}
        for row in group:
            by_reward.setdefault(rewards[row], set()).add(row)
        equal = all(
            isclose(told[row], told[min(rows)], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            for rows in by_reward.values() for row in rows
        )  # fmt: skip
        dead = len(by_reward) == 1 and any(abs(told[row]) > TOLERANCE for row in group)
        if not equal or dead:
            wrong += group
    if wrong:
        many = sum(group[0] in wrong for group in groups)
        yield Finding(
            code="DPA408", severity="fail", stage="advantage", check=ADVANTAGE, field="advantage",
            step=saved.hint.step, rows=tuple(wrong),
            expected="one advantage for equal rewards of a group, 0 where all are equal",
            actual=f"other advantages in {many} of {len(groups)} groups",
            evidence={"rows of a group": len(groups[0])},
            causes=("row_permutation", "wrong_group_normalisation"),
            hint="compare the order of the rewards with that of the advantages",
        )  # fmt: skip
