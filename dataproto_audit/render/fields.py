"""The field-evolution table, printed from the declarations of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES

WIDE = 160
"""Columns of a terminal from which on no name of the tables is broken."""


def fields_table() -> dict[str, Any]:
    """Stages in order, and every field with its axes, kind of number, producer and meaning."""
    return {
        "stages": [
            {
                "stage": stage.name,
                "rows": str(stage.rows),
                "reads": list(stage.reads),
                "adds": list(stage.adds),
                "may_add": list(stage.may_add),
                "changes": list(stage.changes),
                "drops": list(stage.drops),
            }
            for stage in STAGES.values()
        ],
        "fields": [
            {
                "field": field.name,
                "kind": field.number,
                "axes": field.axes,
                "producer": field.producer,
                "meaning": field.meaning,
            }
            for field in FIELDS.values()
        ],
    }


def print_fields(console: Console | None = None) -> None:
    """Both tables for a terminal; a narrow one gets a line for each kind of cell instead."""
    out = console or Console()
    table = fields_table()
    names = ("reads", "adds", "may_add", "changes", "drops")
    stages = [
        (row["stage"], row["rows"], *(", ".join(row[name]) for name in names))
        for row in table["stages"]
    ]
    headings = ("stage", "rows", *(name.replace("_", " ") for name in names))
    show = _columns if out.width >= WIDE else _listed
    show(out, "Stages in order: everything not named is kept, row key by row key", headings, stages)
    fields = [tuple(row.values()) for row in table["fields"]]
    headings = ("field", "kind", "axes", "written by", "meaning")
    show(out, "Fields: column t of a response field belongs to responses[:, t]", headings, fields)


Rows = Sequence[tuple[str, ...]]


def _columns(out: Console, title: str, headings: Sequence[str], rows: Rows) -> None:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


def _listed(out: Console, title: str, headings: Sequence[str], rows: Rows) -> None:
    """A heading for each row, and below it what its other cells say, empty ones left out."""
    out.print(f"{title}\n", markup=False, highlight=False)
    for first, *others in rows:
        block = Table.grid(padding=(0, 2))
        block.add_column(no_wrap=True, min_width=max(map(len, headings)) + 2)
        block.add_column(overflow="fold")
        for heading, cell in zip(headings[1:], others, strict=True):
            if cell:
                block.add_row(f"  {heading}", escape(cell))
        out.print(first, style="bold", markup=False, highlight=False)
        out.print(block, highlight=False)
