"""Damage files of every format 200,000 times and have them read: each is read or explained.

Processes of their own read shares of the inputs under a limit of memory, so that a crash or a hang
costs one share and is reported. The limit of a file of n bytes is 1 GiB + 24 n.

    python benchmarks/bench_fuzz.py [INPUTS] [SEED]
"""

from __future__ import annotations

import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from dataproto_audit.testing.fuzz import HANG_S, MEMORY_FACTOR, MEMORY_FREE, Fuzzed, fuzz, seeds_of
from dataproto_audit.testing.log_files import console_text, event_file, wandb_file
from dataproto_audit.testing.mutations import Mutant, mutants

SAMPLES = Path(__file__).parents[1] / "tests" / "data" / "samples"
SHARE, LARGEST = 10_000, 1 << 16
STEPS = [{"step": i, "actor/grad_norm": 0.1 * i, "actor/ppo_kl": 0.01} for i in range(30)]


def seeds() -> list[tuple[str, bytes]]:
    files = (p for p in SAMPLES.rglob("*") if p.suffix not in (".md", ".txt"))
    logs = [
        ("events.out.tfevents.1", event_file(STEPS)),
        ("run-1.wandb", wandb_file(STEPS)),
        ("log", console_text(STEPS).encode()),
    ]
    return [*seeds_of(files, largest=LARGEST), *logs]


def _hung(*_: object) -> None:
    raise TimeoutError(f"more than {HANG_S} s")


def share(seed: int, count: int) -> Fuzzed:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MEMORY_FREE + MEMORY_FACTOR * LARGEST
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _hung)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(_watched(mutants(seeds(), count, seed=seed)), Path(folder))
    signal.alarm(0)
    return found


def _watched(inputs: Iterator[Mutant]) -> Iterator[Mutant]:
    """The inputs, each with a time-out of its own, which counts as a fault."""
    for mutant in inputs:
        signal.alarm(int(HANG_S) + 1)
        yield mutant


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    total, crashes, start = Fuzzed(), 0, time.monotonic()
    shares = [(first + number, min(SHARE, count - number * SHARE))
              for number in range(-(-count // SHARE))]  # fmt: skip
    context = get_context("forkserver")
    context.set_forkserver_preload(["dataproto_audit.testing.fuzz"])
    for seed, size in shares:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                total.add(pool.submit(share, seed, size).result())
            except (BrokenProcessPool, TimeoutError) as error:
                crashes += 1
                total.faults.append((f"seed {seed}", "whole share", repr(error)))
    print(f"inputs {total.inputs} of {count}, seeds {first}..{first + len(shares) - 1}")
    print(f"read {total.read}, explained {dict(sorted(total.explained.items()))}")
    print(f"faults {len(total.faults)}, of them crashes or hangs of a process {crashes}")
    print(f"slowest {total.slowest_s:.2f} s (limit {HANG_S:.0f} s)")
    print(f"peak memory grew by {total.grown >> 20} MiB at most (limit 1 GiB + 24 n)")
    print(f"{time.monotonic() - start:.0f} s in all")
    for fault in total.faults[:20]:
        print("  ", *fault)
    if total.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
