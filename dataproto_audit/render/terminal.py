"""All that goes to a terminal: live progress, the summary of a run, findings, the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataproto_audit.render.progress import Progress

if TYPE_CHECKING:
    from dataproto_audit.render.report import render_report
    from dataproto_audit.render.summary import final_summary, render_finding, stderr_console

__all__ = ["Progress", "final_summary", "render_finding", "render_report", "stderr_console"]

_LAZY = {
    "final_summary": "summary",
    "render_finding": "summary",
    "render_report": "report",
    "stderr_console": "summary",
}


def __getattr__(name: str) -> Any:
    # rich costs a tenth of a second to import, and progress needs none of it.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dataproto_audit.render.{_LAZY[name]}"), name)
