"""The field-evolution table, printed from the declarations of the stages."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES


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
    """Both tables for a terminal."""
    out = console or Console()
    table = fields_table()
    stages = Table(title="Stages in order: everything not named is kept, row key by row key")
    for column in ("stage", "rows", "reads", "adds", "may add", "changes", "drops"):
        stages.add_column(column, overflow="fold")
    for row in table["stages"]:
        cells = [", ".join(row[key]) for key in ("reads", "adds", "may_add", "changes", "drops")]
        stages.add_row(row["stage"], row["rows"], *cells)
    out.print(stages)
    fields = Table(title="Fields: column t of a response field belongs to responses[:, t]")
    for column in ("field", "kind", "axes", "written by", "meaning"):
        fields.add_column(column, overflow="fold")
    for row in table["fields"]:
        fields.add_row(row["field"], row["kind"], row["axes"], row["producer"], row["meaning"])
    out.print(fields)
