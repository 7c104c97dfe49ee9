"""Value checks and measurements at boundaries, by family of codes."""

from dataproto_audit.probes import (
    advantages,
    dynamics,
    groups,
    logprobs,
    loss,
    masks,
    meta,
    prefixes,
    ranks,
    rewards,
)
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.registry import PROBES, Probe, probe
from dataproto_audit.probes.scan import Stat, scan

__all__ = [
    "PROBES",
    "Context",
    "Probe",
    "Settings",
    "Stat",
    "advantages",
    "dynamics",
    "groups",
    "logprobs",
    "loss",
    "masks",
    "meta",
    "prefixes",
    "probe",
    "ranks",
    "rewards",
    "scan",
]
