"""Shape contracts and value probes for every stage of an RL post-training loop.

The names below are imported on first use, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataproto_audit.auditor import Auditor
    from dataproto_audit.checker import check, check_concat, check_dump, check_union
    from dataproto_audit.contracts.fields import Field
    from dataproto_audit.contracts.stages import Stage
    from dataproto_audit.dump.run_folder import open_run
    from dataproto_audit.findings import AuditError, Finding, Outcome, Report
    from dataproto_audit.integrations.attach import attach
    from dataproto_audit.probes import Settings, probe
    from dataproto_audit.probes.probability import debug_metrics
    from dataproto_audit.protocol import DataProto

__version__ = "0.1.0"

_HOME = {
    "AuditError": "findings",
    "Auditor": "auditor",
    "DataProto": "protocol",
    "Field": "contracts.fields",
    "Finding": "findings",
    "Outcome": "findings",
    "Report": "findings",
    "Settings": "probes",
    "Stage": "contracts.stages",
    "attach": "integrations.attach",
    "check": "checker",
    "check_concat": "checker",
    "check_dump": "checker",
    "check_union": "checker",
    "debug_metrics": "probes.probability",
    "open_run": "dump.run_folder",
    "probe": "probes",
}

__all__ = [
    "AuditError",
    "Auditor",
    "DataProto",
    "Field",
    "Finding",
    "Outcome",
    "Report",
    "Settings",
    "Stage",
    "attach",
    "check",
    "check_concat",
    "check_dump",
    "check_union",
    "debug_metrics",
    "open_run",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
