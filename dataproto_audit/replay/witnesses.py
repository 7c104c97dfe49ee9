"""Which of two log-probs of the same tokens is wrong, by a third one that was recorded beside them.

A check that compares the engine's with the trainer's, or the old ones with those of the update,
names the old ones: it sees two of them only. Others tell, row by row, on the tokens in question:

* the pass of the update over the first mini-batch has the weights of the old ones, and a reference
  has weights near them; where the old ones agree with one of these, the engine's are wrong;
* the engine's have the weights of the old ones, too; where these two agree, the update's are wrong.

The passes of a trainer share its code, so that they may be wrong alike. Against that speak

* what is wrong in the old ones by themselves (after equal prefixes, for one), where the others
  agree with them all the same: they stay accused;
* the sample: tokens that were drawn with the engine's probabilities p have a mean of q/p near 1,
  whatever distribution q the trainer computes, and a mean of p/q above it.

Where the trainer's passes agree against the engine in most rows, the sample accuses the trainer's
(and :data:`DRAWN` is said beside it), else the engine's are called wrong (:data:`SHARED`). Where no
third one decides, the old ones stay accused (:data:`UNTOLD`).

Not covered: rows of later mini-batches without a near reference, and fields of other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.probes import PROBES
from dataproto_audit.replay.replay import Replayed, Seen

Values = NDArray[np.float64]
OLD, REF, SAMPLED, UPDATE = "old_log_probs", "ref_log_prob", "rollout_log_probs", "update_log_probs"
STAGES_OF = {OLD: "old_log_prob", REF: "ref_log_prob", SAMPLED: "rollout", UPDATE: "update_actor"}
THIRD = {SAMPLED: (UPDATE, REF), UPDATE: (SAMPLED, REF)}
"""What the old log-probs are compared with, and who tells which of the two is wrong, best first."""
CLOSE = 0.1
"""Part of the gap between two that the gap of the right one to the third may be."""
TOKENS = 200
"""Tokens from which the mean of a quotient of probabilities tells."""
ERRORS = 4.0
SURE = 0.05
"""A mean is 1 within so many standard errors of at most this size."""
SHARED = (
    "rollout or old_log_prob: the trainer's passes agree with each other against the engine, in "
    "most rows, and share their code; pass --model DIR"
)
DRAWN = (
    "rollout or old_log_prob: tokens were drawn with the engine's log-probs, and the trainer's "
    "passes agree on others: they share a fault, or the engine held other weights; pass --model DIR"
)
UNTOLD = (
    "rollout or old_log_prob: nothing recorded tells which of the two is wrong; pass --model DIR"
)


@dataclass(frozen=True)
class Odd:
    """The wrong field of each row that a third one decides, and what stays in doubt."""

    fields: Mapping[int, str]
    doubt: str = ""


def odd_ones(
    step: Replayed, number: int, check: str, name: str, tokens: Mapping[int, tuple[int, ...]]
) -> Odd | None:
    """Which is wrong of the two log-probs that ``check`` compared at boundary ``number``.

    ``tokens`` are the columns that disagree, by row. None where the check compares no such pair, or
    does not name the old ones.
    """
    other = _other(check, name)
    if other is None or number >= len(step.seen):
        return None
    here = step.seen[number]
    old, against = (_values(here, one) for one in (OLD, other))
    if old is None or against is None or old.shape != against.shape:
        return None
    thirds = list(_thirds(step, here, other))
    told = {
        row: found for row, columns in tokens.items()
        if (found := _of_row(row, list(columns), (old, against), thirds, other))
    }  # fmt: skip
    if other == UPDATE:
        return Odd(told)
    accused = _by_itself(here) & tokens.keys()
    if accused and OLD not in {told.get(row) for row in accused}:
        return Odd(dict.fromkeys(tokens, OLD))  # the others agree with what is wrong
    if not told:
        return Odd(told, UNTOLD)
    return _shared(here, told, old, against)


def _other(check: str, name: str) -> str | None:
    """What the old log-probs were compared with."""
    probe = PROBES.get(check)
    read = set(probe.fields) & STAGES_OF.keys() if probe else set()
    return next((one for one in THIRD if name == OLD and read == {OLD, one}), None)


def _by_itself(here: Seen) -> set[int]:
    """Rows in which a check that reads no other log-prob calls the old ones wrong."""
    rows: set[int] = set()
    for finding in here.report.findings:
        probe = PROBES.get(finding.check)
        alone = probe is not None and set(probe.fields) & STAGES_OF.keys() == {OLD}
        if alone and finding.severity != "info" and finding.field.rpartition(".")[2] == OLD:
            rows |= set(finding.rows)
    return rows


def _values(seen: Seen, name: str) -> Values | None:
    field = seen.view.tensors.get(name)
    if field is None or field.is_nested or field.dim() != 2:
        return None
    values: Values = seen.view.numpy(name).astype(np.float64)
    return values


def _thirds(step: Replayed, here: Seen, other: str) -> Iterator[Values]:
    """Each third one in the rows of ``here``, NaN where it says nothing; ``[rows, columns]``."""
    for name in THIRD[other]:
        there = here if name in here.view.tensors else step.after(STAGES_OF[name])
        values = None if there is None else _values(there, name)
        if there is None or values is None or (name == REF and _copy(step, there, values)):
            continue
        if name == UPDATE:
            if "mini_batch" not in there.view.tensors:
                continue
            first = there.view.numpy("mini_batch") == 0
            values = np.where(first[:, None], values, np.nan)
        rows = _matched(here, there)
        if rows is not None:
            yield values[rows]


def _copy(step: Replayed, there: Seen, reference: Values) -> bool:
    """True for a reference that equals the policy after the first step: it is no other pass."""
    old = _values(there, OLD)
    return step.step.number > 1 and old is not None and np.array_equal(old, reference)


def _matched(here: Seen, there: Seen) -> list[int] | None:
    """Rows of ``there`` in the order of ``here``; None where keys do not tell each of them."""
    ours, theirs = here.boundary.row_keys, there.boundary.row_keys
    if here is there or (ours == theirs and len(ours) == here.view.rows == there.view.rows):
        return list(range(here.view.rows))
    place = {key: row for row, key in enumerate(theirs)}
    if len(place) != len(theirs) or len(set(ours)) != len(ours) or not set(ours) <= place.keys():
        return None
    return [place[key] for key in ours]


def _of_row(
    row: int, columns: list[int], pair: tuple[Values, Values], thirds: list[Values], other: str
) -> str:
    """The wrong one of two, by the first third one that tells; '' where none does."""
    old, against = (values[row, columns] for values in pair)
    for third in thirds:
        if third.shape != pair[0].shape:
            continue
        near, far = (float(np.abs(one - third[row, columns]).sum()) for one in (old, against))
        if near <= CLOSE * far:
            return other
        if far <= CLOSE * near:
            return OLD
    return ""


def _shared(here: Seen, told: dict[int, str], old: Values, engine: Values) -> Odd:
    """What the passes of the trainer said, less what they may have wrong in common."""
    blamed = [row for row, field in told.items() if field == SAMPLED]
    mask = here.view.numpy("response_mask") != 0
    if 2 * len(blamed) <= int(mask.any(1).sum()):
        return Odd(told)
    if _drawn_from(engine[mask], old[mask]):
        return Odd(dict.fromkeys(told, OLD), DRAWN)
    return Odd(told, SHARED)


def _drawn_from(engine: Values, trainer: Values) -> bool:
    """True where the sample says that tokens were drawn with the engine's probabilities.

    Both ``[tokens]``, log-probs. The mean of q/p is 1 for every distribution q if p was drawn from;
    that of p/q is 1 for q = p alone.
    """
    on = np.isfinite(engine) & np.isfinite(trainer)
    if on.sum() < TOKENS:
        return False
    off, error = _off_one(trainer[on] - engine[on])
    other, its = _off_one(engine[on] - trainer[on])
    return error <= SURE and abs(off) <= ERRORS * error and other > ERRORS * its


def _off_one(logs: Values) -> tuple[float, float]:
    """By how much the mean of ``exp(logs)`` exceeds 1, and its standard error."""
    quotients = np.exp(np.minimum(logs, 700.0))
    return float(quotients.mean() - 1.0), float(quotients.std() / np.sqrt(len(quotients)))
