"""How the verdict of a bisect is scored against faults that were made on purpose.

Stages and fields are right when they are among the accepted answers of the fault, as in
:mod:`.scoring`; rows and tokens when they are exactly those of the truth or of one of its
alternatives, at the boundary where the verdict names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataproto_audit.testing.faults import Fault
from dataproto_audit.testing.traces import Written

EARLY = ("prompts", "rollout", "union")
LOOP = (
    "prompts", "rollout", "union", "balance", "dispatch", "reward", "old_log_prob",
    "ref_log_prob", "values", "kl_reward", "advantage", "update_critic", "update_actor",
    "sync_weights", "validation",
)  # fmt: skip


@dataclass(frozen=True)
class BisectScore:
    """What of a verdict is right; ``second`` is None where only one fault was recorded.

    ``rows`` and ``tokens`` are None where the truth defines none.
    """

    faulty: bool
    stage: bool
    rows: bool | None
    tokens: bool | None
    second: bool | None


def score_verdict(
    verdict: Mapping[str, Any], faults: Sequence[Fault], made: Written
) -> BisectScore:
    """Score ``verdict`` (plain data of a bisect) of a trace with one or two faults."""
    ordered = sorted(faults, key=lambda fault: LOOP.index(fault.stage))
    first = next((f for f in ordered if verdict["stage"] in f.stages), None)
    told: list[Mapping[str, Any]] = [verdict, *verdict["later_faults"]]
    rows, tokens = (None, None) if first is None else located(verdict, first, made)
    right = first is not None and (first is ordered[0] or _as_early(first, ordered[0]))
    second = None
    if len(faults) > 1 and all(fault.name in made.truths for fault in faults):
        second = all(any(one["stage"] in fault.stages for one in told) for fault in faults)
    if first is None:
        truth = made.truths.get(ordered[0].name)
        rows = None if not truth or not truth.rows else False
        tokens = None if not truth or not truth.columns else False
    return BisectScore(verdict["verdict"] == "faulty", right, rows, tokens, second)


def _as_early(one: Fault, other: Fault) -> bool:
    """True where an accepted stage of ``one`` is no later than the best one of ``other``."""
    return min(map(LOOP.index, one.stages)) <= LOOP.index(other.stage)


def located(
    told: Mapping[str, Any], fault: Fault, made: Written
) -> tuple[bool | None, bool | None]:
    """Whether rows and tokens are exactly right; None where the truth has none."""
    truth = made.truths.get(fault.name)
    if truth is None or not truth.rows:
        return None, None
    moved = fault.stage in EARLY and after_balance(str(told.get("boundary") or ""))
    rows, cells = set(told["rows"]), {tuple(cell) for cell in told["tokens"]}
    row_right, token_right = False, False
    for one in (truth, *truth.also):
        place = {row: made.row_after(row) if moved else row for row in one.rows}
        wanted = {
            (place[row], column) for row, columns in one.columns.items() for column in columns
        }
        row_right |= rows == set(place.values())
        token_right |= cells == wanted if wanted else rows == set(place.values())
    return row_right, token_right if truth.columns else None


def after_balance(boundary: str) -> bool:
    """True for the name of a boundary whose rows were balanced."""
    number, _, name = boundary.partition("_")
    early = ("prompts", "rollout", "union", "balance_before")
    return number.isdigit() and not name.startswith(early)
