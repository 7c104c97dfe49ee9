"""The end of a run, and one finding, for a person at a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dataproto_audit.codes import CODES
from dataproto_audit.findings import Finding, finding_lines, place_of
from dataproto_audit.render.text import counts, duration, number, visible

SEVERITY_STYLE = {"fail": "bold red", "warn": "yellow", "info": "cyan"}
AUDIT_GOAL = 0.03
"""Share of a step's CPU time that auditing at level ``full`` aims to stay under."""
_JSON_KEYS = ("rows", "row_keys", "columns", "evidence", "causes")


def stderr_console() -> Console:
    """A console on stderr: stdout belongs to ``--json``."""
    return Console(stderr=True, highlight=False)


def final_summary(summary: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Print the summary of a run, from the mapping that ``summary.json`` holds.

    Beside the documented keys these are shown when present: ``stage_wall_s`` {stage: seconds},
    ``every`` {check: k} for checks that do not run in each step, ``tables`` (where they are),
    ``wall_s``, ``cpu_s``, ``reward_mean_over``, ``resumed_after`` and ``audit_cpu_ms_per_step``.
    What is missing is left out.
    """
    console = stderr_console() if console is None else console
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in _summary_lines(summary):
        grid.add_row(name, Text(value))
    failed = (summary.get("findings") or {}).get("fail", 0)
    title = f"run finished: {failed} fail" if failed else "run finished: ok"
    console.print(Panel(grid, title=title, border_style="red" if failed else "green"))


def _summary_lines(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None or last is not None:
        over = summary.get("reward_mean_over") or 0
        of = f", means of the first and last {over} steps" if over > 1 else ""
        yield "reward", f"{number(first)} -> {number(last)}{of}"
    steps, world = summary.get("steps"), summary.get("world_size")
    if steps is not None:
        on = f" on {world} ranks" if world else ""
        backend = f" ({visible(summary['backend'])}{on})" if summary.get("backend") else on
        wall_s = summary.get("wall_s")
        wall = f" in {duration(wall_s)} with start-up" if wall_s is not None else ""
        yield "steps", f"{number(steps)}{wall}{backend}"
    after = summary.get("resumed_after")
    if after:
        yield "resumed", f"after step {number(after)}; all but the reward is of the steps since"
    if summary.get("boundaries") is not None:
        yield "boundaries", number(summary["boundaries"])
    if "outcomes" in summary:
        yield "outcomes", counts(summary["outcomes"])
    if "findings" in summary:
        yield "findings", counts(summary["findings"])
    share = summary.get("audit_cpu_share")
    if share is not None:
        each = summary.get("audit_cpu_ms_per_step")
        per_step = f", {number(each)} ms a step" if each is not None else ""
        yield (
            "audit",
            f"{100 * share:.2f} % of CPU time, writing the tables included{per_step} "
            f"(goal: {100 * AUDIT_GOAL:g} %)",
        )
    if summary.get("cpu_s") is not None:
        yield "CPU", f"{summary['cpu_s']:.0f} s of all processes, start-up included"
    rare = {name: k for name, k in (summary.get("every") or {}).items() if k and k > 1}
    if rare:
        listed = ", ".join(f"{visible(name)} every {k} steps" for name, k in sorted(rare.items()))
        yield "not each step", listed
    yield from _stage_lines(summary)
    if summary.get("tables_error"):
        yield "tables", visible(summary["tables_error"])
    elif summary.get("tables") or summary.get("run_dir"):
        yield "tables", visible(summary.get("tables") or summary["run_dir"])


def _stage_lines(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    seconds = summary.get("stage_wall_s")
    if not seconds:
        names = [str(stage) for stage in summary.get("stages") or ()]
        if names:
            yield "stages", visible(", ".join(names))
        return
    total = sum(seconds.values()) or 1.0
    for at, (name, spent) in enumerate(sorted(seconds.items(), key=lambda item: -item[1])):
        share = f"{100 * spent / total:3.0f} %"
        yield "time by stage" if at == 0 else "", f"{spent:8.1f} s {share}  {visible(name)}"


def render_finding(finding: Finding | Mapping[str, Any]) -> Panel:
    """A panel with the finding: where, what was expected, why, what to do.

    Takes a :class:`Finding`, its ``to_dict()`` or a row of the ``findings`` table.
    """
    data = finding.to_dict() if isinstance(finding, Finding) else _decoded(finding)
    severity = visible(data["severity"])
    style = SEVERITY_STYLE.get(severity, "")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    place = place_of(data.get("step"), data["when"], data["stage"])
    where = f"{place}, check {data['check']}" if place else f"check {data['check']}"
    for name, value in (("where", where), *finding_lines(data)):
        grid.add_row(name, Text(visible(value)))
    known = CODES.get(data["code"])
    title = Text(f"{visible(data['code'])} {severity}: ", style=style)
    title.append(known.title if known else visible(data["check"]))
    return Panel(grid, title=title, title_align="left", border_style=style)


def _decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(row)
    for key in _JSON_KEYS:
        if isinstance(data.get(key), str):
            data[key] = json.loads(data[key])
    return data
