"""One row of a batch, token by token, in a table that fits 80 columns.

Fields have short heads; one that holds the same numbers as another is named below the table instead
of being shown again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dataproto_audit.render.text import number, visible

HEADS = {
    "text": "token", "responses": "id", "response_mask": "mask", "loss_mask": "loss",
    "tool_mask": "tool", "attention": "att", "rollout_log_probs": "rollout",
    "old_log_probs": "old", "ref_log_prob": "ref", "update_log_probs": "new", "values": "value",
    "entropys": "entropy", "update_entropys": "new entr", "token_level_scores": "score",
    "rm_scores": "rm", "token_level_rewards": "reward", "advantages": "adv", "returns": "return",
    "rollout_is_weights": "weight",
}  # fmt: skip
"""Heads of the columns, in their order."""


def row_table(row: int, columns: Mapping[str, Sequence[Any]]) -> list[RenderableType]:
    """The table of a row's ``columns``, and which fields are left out because they are equal."""
    shown, same = _distinct(columns)
    table = Table(title=f"row {row}, response", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("t", justify="right")
    for name in shown:
        side: Literal["left", "right"] = "left" if name == "text" else "right"
        table.add_column(Text(HEADS.get(name, visible(name))), justify=side, no_wrap=True)
    for t in range(max(map(len, columns.values()), default=0)):
        cells = [_cell(columns[name][t]) if t < len(columns[name]) else "" for name in shown]
        table.add_row(Text(str(t)), *map(Text, cells))
    told: list[RenderableType] = [table]
    told += [Text(f"  {name}: as {of}") for name, of in same.items()]
    named = [f"{HEADS[name]} = {name}" for name in shown if HEADS.get(name, name) != name]
    if named:
        told.append(Text("  " + ", ".join(named)))
    return told


def _distinct(columns: Mapping[str, Sequence[Any]]) -> tuple[list[str], dict[str, str]]:
    """Columns to show in the order of their heads, and those equal to one of them."""
    order = list(HEADS)
    names = sorted(columns, key=lambda n: order.index(n) if n in order else len(order))
    shown: list[str] = []
    same: dict[str, str] = {}
    for name in names:
        values = list(columns[name])
        twin = next((s for s in shown if s != "text" and list(columns[s]) == values), None)
        if twin is None or name in ("responses", "response_mask"):
            shown.append(name)
        else:
            same[name] = twin
    return shown, same


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return visible(value)[:16]
    if isinstance(value, float) and value and abs(value) < 1000:
        return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.0e}"
    return number(value)
