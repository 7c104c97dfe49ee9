"""Shrink every fault of the bench from 256 rows and 512 response columns, and check what is left.

A fault counts as small where at most two rows, or one group, and at most 16 attended tokens are
left. That the answer is 1-minimal is verified by trying to leave out each single thing once more.
Faults that no check finds in such a batch are listed and not counted.

    python benchmarks/bench_shrink.py [FAULT ...] [--small] [--every K]    (each K-th fault)
"""

from __future__ import annotations

import statistics
import sys
import warnings
from dataclasses import replace

from dataproto_audit.replay.recording import Recording, audit, loud, piece_of
from dataproto_audit.replay.shrink import Judge, Shrunk, shrink
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE, Fault
from dataproto_audit.testing.faulty import faulty_step
from dataproto_audit.testing.scoring import same_field

ROWS, COLUMNS, TOKENS = 256, 512, 16


def recorded(fault: Fault, *, small: bool) -> tuple[Recording, Recording]:
    options = BASES[fault.bases[0]]
    n = int(fault.options.get("n", options.n))
    changed = {"prompts": ROWS // n, "response_width": COLUMNS, "prompt_width": 32, "counts": ()}
    made = faulty_step(fault, changed=None if small else changed)
    sides = []
    for found, metrics in ((made.bad, made.bad_metrics), (made.good, made.good_metrics)):
        pieces = tuple(
            piece_of(b.batch, b.stage, when=b.when, evidence=b.evidence, step=step)
            for step, b in found
        )
        sides.append(Recording(pieces, made.settings, metrics))
    return sides[0], sides[1]


def is_minimal(bad: Recording, good: Recording, shrunk: Shrunk) -> bool:
    """No single row, column, boundary or name can be left out of the answer."""
    assert shrunk.finding is not None
    judge = Judge.of_finding(bad, shrunk.finding.code, shrunk.finding.stage, good)
    cut = shrunk.cut
    tried = [replace(cut, samples=cut.samples - {sample}) for sample in cut.samples]
    for name, least in (("pieces", 1), ("response", 1), ("prompt", 1)):
        kept = getattr(cut, name)
        if len(kept) > least:
            tried += [replace(cut, **{name: kept[:i] + kept[i + 1 :]}) for i in range(len(kept))]
    left = [name for name in judge.whole.names() if name not in cut.dropped]
    tried += [replace(cut, dropped=cut.dropped | {name}) for name in left]
    return not any(judge.holds(one) for one in tried)


def main() -> None:
    warnings.simplefilter("ignore")
    small = "--small" in sys.argv
    names = [name for name in sys.argv[1:] if name in CATALOGUE] or list(CATALOGUE)
    if "--every" in sys.argv:
        names = names[:: int(sys.argv[sys.argv.index("--every") + 1])]
    few, minimal, tried, not_found = [], 0, 0, []
    times, calls, large = [], [], []
    for name in names:
        fault = CATALOGUE[name]
        bad, good = recorded(fault, small=small)
        hits = [
            s.finding for s in loud(audit(bad))
            if s.finding.stage in fault.stages and same_field(s.finding.field, fault.fields)
        ]  # fmt: skip
        if not hits:
            not_found.append(name)
            continue
        shrunk = shrink(bad, code=hits[0].code, stage=hits[0].stage, good=good)
        tried += 1
        minimal += is_minimal(bad, good, shrunk)
        times.append(shrunk.cpu_s)
        calls.append(shrunk.calls)
        left = shrunk.sizes
        if (left["rows"] <= 2 or left["groups"] <= 1) and left["tokens"] <= TOKENS:
            few.append(name)
        else:
            large.append(f"{name}: {left['rows']} rows, {left['tokens']} tokens ({hits[0].code})")
    if not tried:
        print("no fault was found")
        return
    print(f"faults shrunk: {tried}, not found in such a batch: {', '.join(not_found) or 'none'}")
    print(f"at most 2 rows or one group, and {TOKENS} tokens: {len(few)} ({len(few) / tried:.1%})")
    print(f"1-minimal: {minimal} ({minimal / tried:.1%})")
    print(f"CPU s: median {statistics.median(times):.2f}, most {max(times):.2f}")
    print(f"predicate calls: median {statistics.median(calls):.0f}, most {max(calls)}")
    print("larger:", *large, sep="\n  ")


if __name__ == "__main__":
    main()
