"""What is kept when the trainer itself raises: the input of the stage, and why it may have failed.

The first batch with a value that is not finite is kept, too.

They are boundaries of a trace (docs/traces.md), which ``check``, ``replay`` and ``bisect`` read and
which runs nothing when it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dataproto_audit.batch import BatchView
from dataproto_audit.checker import check_union
from dataproto_audit.checker.entering import EARLY, check_entering
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.trace import TRACE_DIR, TraceWriter
from dataproto_audit.dump.trace_format import BOUNDARY, step_folder
from dataproto_audit.findings import Finding
from dataproto_audit.integrations.announce import text_of
from dataproto_audit.probes import Settings

MAX_TOLD = 3
"""Findings that a diagnosis tells; the tables hold all."""


def keep(
    folder: Path,
    step: int,
    stage: str,
    batches: Mapping[str, Any],
    *,
    trace: TraceWriter | None = None,
    settings: Settings | None = None,
) -> list[Path]:
    """Record each batch as one that entered ``stage``, a part of the boundary by its name.

    With ``trace`` they join the step that it has open, which is broken off thereby; without, they
    make a step of their own, or join one that was kept before. What cannot be recorded is left out:
    the folders that are returned are on the disk. Raises ``RunError`` DPA802.
    """
    told, made = asdict(settings or Settings()), []
    alone = TraceWriter(folder / TRACE_DIR, retention="all", settings=told, append=True)
    with alone if trace is None else nullcontext(trace) as writer:
        writer.at_step(step)
        for name, batch in batches.items():
            try:
                made.append(writer.write_boundary(stage, batch, when="before", part=name))
            except RunError:
                raise
            except Exception:  # noqa: BLE001 - others still should be recorded
                continue
        writer.end_step(ended="broken_off")
        writer.flush()
    places = [step_folder(writer.folder, step) / name for name in made]
    return [place for place in places if (place / BOUNDARY).is_file()]


def diagnosis(
    stage: str,
    batches: Mapping[str, Any],
    settings: Settings,
    earlier: Iterable[Finding] = (),
) -> str:
    """What may have made ``stage`` raise: row counts that do not fit, then failed checks."""
    lines = (
        [_counts(batches, settings)] if len(batches) == 2 else [_division(stage, batches, settings)]
    )
    found = [f for f in earlier if f.severity == "fail"]
    found += [f for f in _looked_at(stage, batches, settings) if f.severity == "fail"]
    told = {(f.code, f.field, f.actual): f for f in found}.values()
    lines += [_short(f) for f in list(told)[:MAX_TOLD]]
    if not any(lines):
        sizes = "; ".join(f"{name} {_sizes(batch)}" for name, batch in batches.items())
        return f"nothing wrong was found in its input ({sizes or 'no batch at hand'})"
    return "; ".join(line for line in lines if line)


def _looked_at(stage: str, batches: Mapping[str, Any], settings: Settings) -> list[Finding]:
    if set(batches) == {"left", "right"}:
        return check_union(batches["left"], batches["right"], config=settings).findings
    found: list[Finding] = []
    for batch in batches.values():
        try:
            found += check_entering(stage, batch, settings=settings).findings
        except UsageError:
            continue
    later = list(STAGES).index(stage) if stage in STAGES else len(STAGES)
    return [f for f in found if f.stage not in STAGES or list(STAGES).index(f.stage) <= later]


def _counts(batches: Mapping[str, Any], settings: Settings) -> str:
    """``6 rows vs 2 = n (n=3): left side was not repeated``, where a known factor explains it."""
    (left_name, left), (right_name, right) = batches.items()
    a, b = BatchView.of(left).rows, BatchView.of(right).rows
    if a == b or not a or not b:
        return ""
    large, small = max(a, b), min(a, b)
    short = left_name if a < b else right_name
    for name, factor in settings.factors().items():
        if small * factor == large:
            return f"{large} rows vs {small}, {large} = {small} x {name} ({name}={factor}): " \
                   f"{short} side was not repeated"  # fmt: skip
    return f"{a} rows ({left_name}) vs {b} ({right_name})"


def _division(stage: str, batches: Mapping[str, Any], settings: Settings) -> str:
    """Rows that do not divide over ranks and micro-batches, as some workers demand.

    They are those of the sampled batch: prompts are fewer, and nobody cuts them so.
    """
    if stage in EARLY:
        return ""
    ranks = settings.world_size or 1
    for batch in batches.values():
        rows = BatchView.of(batch).rows
        for size in (settings.micro_batch_size, settings.actor_micro_batch_size):
            if rows and size and rows % (ranks * size):
                return f"{rows} rows do not divide by {ranks * size} = {ranks} ranks x {size} " \
                       "rows of a micro-batch"  # fmt: skip
    return ""


def brief(error: BaseException) -> str:
    """Kind and last line of an error: what Ray hands on holds the whole trace of a worker."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(error)).strip()
    last = text.splitlines()[-1].strip() if text else ""
    kind = type(error).__name__
    return f"{kind}: {last[:300]}" if last else kind


def _short(finding: Finding) -> str:
    field = f" {finding.field}:" if finding.field else ""
    causes = f" ({', '.join(finding.causes[:2])})" if finding.causes else ""
    return f"{finding.code} at {finding.stage}:{field} {finding.actual}, expected " \
           f"{finding.expected}{causes}"  # fmt: skip


def _sizes(batch: Any) -> str:
    view = BatchView.of(batch)
    return f"{view.rows} rows, prompt {view.prompt}, response {view.response}"
