"""Feed damaged files to the readers: each must be read or explained, soon, in bounded memory.

A :class:`~dataproto_audit.codes.UsageError` of one line that names the file is an explanation;
any other exception is a fault. What a reader returns is walked as ``show`` walks it.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.readers.metric_logs import is_metric_log, read_history
from dataproto_audit.testing.mutations import Mutant

HANG_S = 10.0
"""Seconds after which an input counts as a hang."""
MEMORY_FREE, MEMORY_FACTOR = 1 << 30, 24
"""Bytes that reading a file of n bytes may take: ``MEMORY_FREE + MEMORY_FACTOR * n``."""
STEM = "mutant"


@dataclass
class Fuzzed:
    """Totals. ``faults`` are (origin, damage, what happened) of inputs that were neither."""

    inputs: int = 0
    read: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    grown: int = 0
    """Bytes by which the peak memory of the process grew."""

    def add(self, other: Fuzzed) -> None:
        """Add the totals of another share."""
        self.inputs += other.inputs
        self.read += other.read
        self.explained.update(other.explained)
        self.faults += other.faults
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.grown = max(self.grown, other.grown)


def seeds_of(files: Iterable[Path], *, largest: int = 1 << 16) -> list[tuple[str, bytes]]:
    """Name and bytes of files that are small enough to be damaged many times."""
    return [
        (path.name, path.read_bytes())
        for path in sorted(files) if path.is_file() and 0 < path.stat().st_size <= largest
    ]  # fmt: skip


def fuzz(inputs: Iterable[Mutant], folder: Path) -> Fuzzed:
    """Read every input from a file in ``folder``; nothing is raised."""
    total = Fuzzed()
    before = _peak()
    for mutant in inputs:
        suffix = "".join(Path(mutant.origin).suffixes[-1:])
        path = folder / f"{STEM}{suffix}"
        path.write_bytes(mutant.data)
        start = time.monotonic()
        said = attempt(path)
        took = time.monotonic() - start
        path.unlink()
        total.inputs += 1
        total.slowest_s = max(total.slowest_s, took)
        if said == "read":
            total.read += 1
        elif said.startswith("DPA"):
            total.explained[said] += 1
        if not said.startswith(("read", "DPA")) or took > HANG_S:
            total.faults.append((mutant.origin, mutant.how, f"{said} after {took:.1f} s"))
    total.grown = _peak() - before
    return total


def attempt(path: Path) -> str:
    """``read``, the code of an explanation, or what went wrong."""
    try:
        _walk(path)
    except UsageError as error:
        if "\n" in str(error) or STEM not in str(error):
            return f"not one line about the file: {error!r}"
        return error.code
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return f"{type(error).__name__}: {error}"
    return "read"


def _walk(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if is_metric_log(head):
        read_history(path)
        return
    for saved in read_batches(path):
        view = BatchView.of(saved.batch)
        for name in saved.tensors:
            view.numpy(name)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


__all__ = ["Fuzzed", "attempt", "fuzz", "seeds_of"]
