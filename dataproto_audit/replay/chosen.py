"""Which step of a trace a bisect looks at, and what it says of the others."""

from __future__ import annotations

from collections.abc import Sequence

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace import Trace
from dataproto_audit.replay.replay import Replay, Replayed


def chosen_step(
    trace: Trace, again: Replay, wanted: int | None
) -> tuple[Replayed, dict[str, list[int]]]:
    """The step asked for, or the first one with something wrong, or the last of the fullest ones.

    Of the others, where none was asked for: which were checked and are quiet, and which were not
    looked at.
    """
    numbers = trace.steps or trace.torn
    if wanted is not None and wanted not in (*trace.steps, *trace.torn):
        trace.step(wanted)  # raises and lists the steps
    if not numbers and wanted is None:
        raise UsageError("DPA820", f"{trace.folder} has no step to look at.", "Record one.")
    sizes: dict[int, int] = {}
    for number in numbers if wanted is None else [n for n in numbers if n < wanted] + [wanted]:
        made = again.step(trace.step(number))
        if number == wanted or (wanted is None and _suspicious(made)):
            return made, _others(numbers if wanted is None else (), number, list(sizes))
        sizes[number] = len(made.seen)
        made.step.forget()
    fullest = max(sizes, key=lambda number: (sizes[number], number))
    if fullest != number:  # replayed from the start, as its metrics go on from the steps before
        again = again.anew()
        for number in [n for n in numbers if n <= fullest]:
            made = again.step(trace.step(number))
            if number != fullest:
                made.step.forget()
    return made, _others(numbers, fullest, list(sizes))


def _others(numbers: Sequence[int], chosen: int, quiet: Sequence[int]) -> dict[str, list[int]]:
    others = [number for number in numbers if number != chosen]
    return {
        "quiet": [number for number in others if number in quiet],
        "not_judged": [number for number in others if number not in quiet],
    }


def _suspicious(step: Replayed) -> bool:
    return any(f.severity != "info" for f in step.report.findings)
