"""A healthy step, corrupted at one boundary, and what the probes must say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataproto_audit.auditor import Auditor
from dataproto_audit.findings import Finding, Outcome, Report
from dataproto_audit.probes.registry import AT_END
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.healthy import Boundary, Options, boundaries
from dataproto_audit.testing.toy_policy import STOP


@dataclass(frozen=True)
class Truth:
    """What is wrong: the field, and its rows and columns."""

    field: str
    rows: tuple[int, ...] = ()
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


Change = Callable[[Boundary], Truth]
METRICS: dict[str, Any] = {
    "rollout_corr/abs_log_prob_gap": 0.004,
    "actor/lr": 1e-6,
    "actor/ppo_epochs": 2,
    "actor/pg_clipfrac": 0.01,
    "actor/ppo_kl": 0.002,
    "response_mask/tokens": 900,
    "response_mask/masked_share": 0.2,
    "groups/dead_share": 0.3,
}
"""Metrics of a healthy step, as far as several steps are looked at."""
HISTORY = {name: (value,) * 4 for name, value in METRICS.items()}


@dataclass(frozen=True)
class Case:
    """``change`` is made after ``stage``; ``probe`` must find it after ``at``.

    ``also`` are the codes of all other findings at that boundary. With ``stage`` at the end of the
    step, ``change`` is made to its metrics, which are the evidence there.
    """

    probe: str
    code: str
    stage: str
    change: Change
    cause: str
    says: str
    at: str = ""
    also: tuple[str, ...] = ()
    severity: str = "fail"
    options: Options = field(default_factory=Options)
    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    blames: str = ""
    """The stage that the finding names; the one of the boundary unless said."""


@dataclass
class Ran:
    """One audited step."""

    auditor: Auditor
    reports: list[tuple[str, str, Report]]
    truths: list[Truth]

    def report(self, stage: str) -> Report:
        """The report of the boundary after ``stage``."""
        return next(r for name, when, r in self.reports if (name, when) == (stage, "after"))

    def findings(self, probe: str, stage: str) -> list[Finding]:
        """What ``probe`` found after ``stage``."""
        return [finding for finding in self.report(stage) if finding.check == probe]

    def outcome(self, probe: str, stage: str) -> Outcome:
        """The verdict of ``probe`` after ``stage``."""
        [outcome] = [o for o in self.report(stage).outcomes if o.check == probe]
        return outcome

    def bad(self) -> list[Finding]:
        """Every finding of severity fail or warn."""
        return [f for _, _, report in self.reports for f in report if f.severity != "info"]


def audit(
    options: Options | None = None,
    change: Mapping[str, Callable[[Boundary], Any]] | None = None,
    *,
    until: str = "validation",
    settings: Mapping[str, Any] | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
    **faults: Any,
) -> Ran:
    """Audit one step up to the boundary after ``until``; ``change`` is made by stage.

    Until the end of the step there are only its metrics.
    """
    options, change = options or Options(), change or {}
    auditor = Auditor(replace(options.settings(), **(settings or {})), on_fail="record")
    auditor.history.update({name: list(values) for name, values in (history or {}).items()})
    auditor.begin_step(options.step)
    ran = Ran(auditor, [], [])
    if until == AT_END:
        b = Boundary(AT_END, "after", DataProto(), dict(METRICS))
        ran.truths += [made(b) for made in change.values()]
        ran.reports.append((AT_END, "after", auditor.end_step(b.evidence)))
        return ran
    for b in boundaries(options, **faults):
        if b.when == "after" and b.stage in change:
            ran.truths.append(change[b.stage](b))
        report = auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        ran.reports.append((b.stage, b.when, report))
        if (b.stage, b.when) == (until, "after"):
            break
    return ran


def run_case(case: Case) -> Ran:
    """Audit the step of ``case`` as far as the boundary where it is found."""
    return audit(
        case.options,
        {case.stage: case.change},
        until=case.at or case.stage,
        settings=case.settings,
        history=case.history,
    )


def check_case(case: Case) -> None:
    """The finding of ``case`` is there, it is exact, and nothing else is found."""
    ran = run_case(case)
    at, [truth] = case.at or case.stage, ran.truths
    [finding] = ran.findings(case.probe, at)
    assert (finding.code, finding.severity) == (case.code, case.severity)
    assert (finding.stage, finding.when, finding.step) == (
        case.blames or at, "after", case.options.step,
    )  # fmt: skip
    assert finding.field == truth.field
    assert finding.rows == truth.rows
    assert finding.columns == truth.columns
    assert finding.causes[0] == case.cause
    assert case.says in str(finding)
    assert f"{case.code} {case.severity}: {finding.title}" in str(finding)
    assert ran.outcome(case.probe, at).kind == "failed"
    if truth.rows and at not in ("prompts", "validation"):  # rows that nothing has named yet
        assert len(finding.row_keys) == len(truth.rows) == len(set(finding.row_keys))
    rest = [f for f in ran.report(at) if f is not finding]
    others = [f.code for f in rest]
    assert tuple(sorted(others)) == tuple(sorted(case.also)), "\n".join(map(str, rest))
    assert "DPA901" not in others


def each(cases: Sequence[Case]) -> Any:
    """Parametrise a test over ``cases``."""
    names = [f"{case.probe}-{case.change.__name__.strip('_')}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=names)


# -- what to change --------------------------------------------------------------------------------


def own(b: Boundary, name: str) -> Tensor:
    """A copy of the field that the batch holds from now on, to be written to."""
    b.batch.batch[name] = b.batch.batch[name].clone()
    changed: Tensor = b.batch.batch[name]
    return changed


def own_array(b: Boundary, name: str) -> Any:
    """The same for a non-tensor field."""
    b.batch.non_tensor_batch[name] = b.batch.non_tensor_batch[name].copy()
    return b.batch.non_tensor_batch[name]


def at(name: str, *cells: tuple[int, int]) -> Truth:
    """The truth of single cells."""
    columns: dict[int, tuple[int, ...]] = {}
    for row, column in sorted(cells):
        columns[row] = (*columns.get(row, ()), column)
    return Truth(name, tuple(columns), columns)


def where(name: str, cells: Any) -> Truth:
    """The truth of a mask of cells."""
    return at(name, *((int(r), int(c)) for r, c in np.argwhere(np.asarray(cells))))


def lengths(b: Boundary) -> list[int]:
    """Attended response tokens of each row."""
    width = b.batch.batch["responses"].shape[1]
    counted: list[int] = b.batch.batch["attention_mask"][:, -width:].sum(1).tolist()
    return counted


def row_of(b: Boundary, length: int, nth: int = 0) -> int:
    """The ``nth`` row whose response has ``length`` tokens."""
    return [row for row, found in enumerate(lengths(b)) if found == length][nth]


def ends_with_stop(b: Boundary, row: int) -> bool:
    """True where the last token of the row is the stop id."""
    return int(b.batch.batch["responses"][row, lengths(b)[row] - 1]) == STOP


def prompt_rows(b: Boundary, row: int) -> list[int]:
    """Rows with the same prompt as ``row``."""
    prompts = b.batch.batch["prompts"]
    return torch.nonzero((prompts == prompts[row]).all(1)).squeeze(1).tolist()


def twins(b: Boundary) -> list[int]:
    """The first rows that share their prompt and first token, and how often that is the case."""
    first = b.batch.batch["responses"][:, 0].tolist()
    for row in range(len(first)):
        same = [other for other in prompt_rows(b, row) if first[other] == first[row]]
        if len(same) > 1:
            return same
    raise AssertionError("no two rows of the batch share a prefix and a token")


def loner(b: Boundary) -> int:
    """The first row with three tokens or more whose first token no other row has."""
    first = b.batch.batch["responses"][:, 0].tolist()
    for row, length in enumerate(lengths(b)):
        if length >= 3 and first.count(first[row]) == 1:
            return row
    raise AssertionError("every first token occurs twice")
