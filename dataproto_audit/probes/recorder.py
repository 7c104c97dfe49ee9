"""What each step leaves in the tables of the run, and the field evolution that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dataproto_audit.contracts.rows import RowState
from dataproto_audit.contracts.stages import Stage
from dataproto_audit.contracts.trail import Crossing
from dataproto_audit.dump import record
from dataproto_audit.dump.columns import Block
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.findings import Outcome, Report
from dataproto_audit.probes.context import Context, Settings, group_codes

MAX_BLOCKS = 512
"""Boundaries whose outcomes are kept ready to be written again."""


class StepRecorder:
    """Collects one step; ``write`` hands it to the tables. Without tables it keeps the evolution.

    ``traces`` records the batches themselves, boundary by boundary.

    Row tables describe the batch of the last boundary that carried responses (of validation:
    none), which is the one the policy was trained on. Rows whose masks break their declaration are
    not written.
    """

    def __init__(self, tables: TableWriter | None, traces: TraceWriter | None = None) -> None:
        self.tables = tables
        self.traces = traces
        self.evolution: dict[str, dict[str, str]] = {}
        """Per stage, the fields it added or changed, with their dtype: the measured contract."""
        self._blocks: dict[tuple[Any, ...], tuple[tuple[Outcome, ...], Block]] = {}
        self._measured: dict[str, record.FieldRow] = {}
        self._reset()

    def _reset(self) -> None:
        self._flags: dict[str, set[str]] = {}
        self._last: Crossing | None = None
        self._broken: Mapping[str, str] = {}
        self._ranks: list[tuple[Any, ...]] = []

    def boundary(
        self, stage: type[Stage], crossing: Crossing, context: Context, report: Report
    ) -> None:
        """Record the fields that are new or changed, the outcomes, the findings, the ranks."""
        when, state = context.when, crossing.state
        if when == "after":
            news = _news(stage, crossing)
            seen = self.evolution.setdefault(stage.name, {})
            seen.update({name: record.short_dtype(state.view, name) for name in news})
            if "response_mask" in state.view.tensors and stage.name != "validation":
                self._last, self._broken = crossing, context.broken
            self._ranks += record.rank_rows(stage.name, context.given("ranks") or ())
            if self.tables is not None:
                for name in news:
                    known, mark = self._measured.get(name), state.fingerprint(name)
                    row = record.field_row(state.view, stage.name, when, name, mark, known)
                    self._measured[name] = row
                self.tables.append_rows("fields", [self._measured[name] for name in news])
        self.said(stage.name, when, report)

    def trace(
        self,
        stage: type[Stage],
        crossing: Crossing,
        context: Context,
        report: Report,
        keys_of: Callable[[RowState], Callable[[], Sequence[str]]],
    ) -> None:
        """Record the batch, with what is known beside it and what the checks said.

        ``keys_of`` is asked where the rows are new for what gives their keys later, by the thread
        that writes: that must not keep the tensors of the batch alive.
        """
        if self.traces is None:
            return
        view = crossing.state.view
        self.traces.at_step(context.step)
        self.traces.write_boundary(
            stage.name, view, when=context.when, row_keys=partial(keys_of, crossing.state),
            evidence={k: v for k, v in context.evidence.items() if k not in view.meta},
            report=report,
        )  # fmt: skip

    def unseen(self) -> None:
        """Something was left out before the next boundary: a replay is not to compare over it."""
        if self.traces is not None:
            self.traces.unseen()

    def end_trace(self, report: Report, metrics: Mapping[str, float]) -> None:
        """Close the step of the trace; ``report`` is what its end said."""
        if self.traces is not None:
            self.traces.end_step(failed=not report.ok, metrics=metrics)

    def said(self, stage: str, when: str, report: Report) -> None:
        """Record outcomes and findings."""
        for finding in report.findings:
            for key in finding.row_keys:
                self._flags.setdefault(key, set()).add(finding.code)
        if self.tables is not None:
            self.tables.append_block(self._block(self.tables, stage, when, report.outcomes))
            if report.findings:
                self.tables.append_findings(report.findings)

    def _block(
        self, tables: TableWriter, stage: str, when: str, outcomes: Sequence[Outcome]
    ) -> Block:
        """Outcomes as rows, made once: most boundaries end as they did a step ago."""
        mark = (stage, when, *map(id, outcomes))  # the entry keeps them alive, and so their ids
        known = self._blocks.get(mark)
        if known is None:
            if len(self._blocks) >= MAX_BLOCKS:
                self._blocks.clear()
            columns = {
                "stage": [stage] * len(outcomes),
                "when": [when] * len(outcomes),
                "check": [outcome.check for outcome in outcomes],
                "code": [outcome.code for outcome in outcomes],
                "kind": [outcome.kind for outcome in outcomes],
                "reason": [outcome.reason or None for outcome in outcomes],
            }
            known = self._blocks[mark] = tuple(outcomes), tables.block("outcomes", columns)
        return known[1]

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        cache: dict[Any, Any],
        keys_of: Callable[[RowState], Sequence[str]] = RowState.keys,
    ) -> None:
        """Write everything of ``step`` and begin anew; ``keys_of`` names the rows of a state."""
        tables, last, broken = self.tables, self._last, self._broken
        flags, ranks = self._flags, self._ranks
        self._reset()
        if tables is None:
            return
        tables.append("steps", {"metric": list(metrics), "value": list(metrics.values())})
        if last is not None and record.can_tell_rows(last.state.view, broken):
            self._write_rows(tables, last, keys_of(last.state), broken, flags, cache)
        tables.append_rows("ranks", ranks)
        for name in ("value_loss_table", "loss_table"):
            tables.append_rows("loss", record.loss_rows(cache.get(name) or ()))
        tables.flush_step(step)

    def _write_rows(
        self,
        tables: TableWriter,
        last: Crossing,
        keys: Sequence[str],
        broken: Mapping[str, str],
        flags: Mapping[str, set[str]],
        cache: dict[Any, Any],
    ) -> None:
        rows = record.RowReader(last.state.view, broken)
        tables.append("rows", record.rows_columns(rows, keys, flags))
        if rows.has("uid"):
            context = Context(None, "", "after", Settings(), cache=cache)
            columns = record.groups_columns(rows, *group_codes(rows.view, context))
            if columns is not None:
                tables.append("groups", columns)
        named = {row: min(flags[key]) for row, key in enumerate(keys) if key in flags}
        tokens = record.tokens_columns(rows, keys, named)
        if tokens is not None:
            tables.append("tokens", tokens)

    def give_up(self, step: int) -> None:
        """Stop writing after an error, but for what was collected already."""
        tables, self.tables = self.tables, None
        if tables is not None:
            with suppress(Exception):  # the first error was reported; this is only tidying up
                tables.flush_step(step)


def _news(stage: type[Stage], crossing: Crossing) -> list[str]:
    """Fields that are new here or whose rows have other values than before."""
    state, previous = crossing.state, crossing.previous
    if previous is None or stage.fresh:
        return list(state.view.names)
    moved = stage.rows.relation == "permute"
    return [
        name
        for name in state.view.names
        if name not in previous.view or not (moved or name in state.same)
    ]
