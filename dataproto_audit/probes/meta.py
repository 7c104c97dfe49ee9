"""What a stage reports about how it ran, against the configuration (DPA111)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe


@probe("DPA111", stages=("rollout",), needs=("evidence.sampling", "settings.temperature"))
def sampling_settings(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The settings that the engine reports are the configured ones.

    An engine that samples otherwise than it reports is found by the log-prob gap instead.
    """
    used = ctx.evidence["sampling"]
    for name in ("temperature", "top_p", "top_k"):
        want, got = getattr(ctx.settings, name), used.get(name)
        if want is None or not isinstance(got, (int, float)):
            continue
        if _unset(name, want) == _unset(name, got):
            continue
        yield ctx.fail(
            f"sampling.{name}",
            rows=range(view.rows),
            expected=f"{want:g} (configured)",
            actual=f"{got:g} (reported by the engine)",
            causes=("temperature_mismatch",) if name == "temperature" else ("engine_setting",),
        )


def _unset(name: str, value: float) -> float:
    """One spelling of 'no limit' for top-k: engines write -1 or 0."""
    return -1.0 if name == "top_k" and value <= 0 else float(value)
