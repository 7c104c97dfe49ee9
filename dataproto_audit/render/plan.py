"""The plan of a dry run, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dataproto_audit.render.text import visible


def print_plan(plan: Mapping[str, Any], console: Console | None = None) -> None:
    """One line an entry; nested entries are listed with a dot."""
    out = console or Console()
    grid = Table.grid(padding=(0, 2))
    for key, value in plan.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, part in parts:
            text = ", ".join(map(str, part)) if isinstance(part, list) else str(part)
            grid.add_row(f"{key}.{name}" if name else key, visible(text))
    out.print(grid)
