"""CPU time that auditing one step costs: ``python benchmarks/bench_auditor.py``.

The step: 64 prompts x 8 samples, prompt width 6, response width 4, 2 ranks, 2 mini-batches, KL
loss;
18 boundaries of the batch (before and after each stage) and those of weight sync and validation.
Batches are made beforehand. Prints the smallest and the median CPU milliseconds per step of one
thread: with declarations and row relations only (``shape``), with the probes, and with the tables
of the step written. ``--rows/--prompt/--response`` measure another size, ``--profile`` lists the
functions that take longest.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dataproto_audit.auditor import Auditor, Level
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.testing.healthy import Boundary, Options, boundaries

Steps = Sequence[Sequence[Boundary]]


def make_steps(options: Options, count: int) -> Steps:
    """``count`` steps of the run, ready to be audited."""
    return [list(boundaries(replace(options, step=step))) for step in range(1, count + 1)]


def audit(auditor: Auditor, step: int, crossed: Sequence[Boundary]) -> float:
    """CPU milliseconds of one step."""
    start = time.thread_time()
    auditor.begin_step(step)
    for b in crossed:
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
    auditor.end_step({"actor/grad_norm": 0.5})
    return 1e3 * (time.thread_time() - start)


def measure(options: Options, steps: Steps, level: Level, *, tables: bool, warm_up: int) -> float:
    """Print and return the median over the steps after ``warm_up``."""
    with tempfile.TemporaryDirectory() as folder:
        writer = TableWriter(Path(folder) / "tables") if tables else None
        auditor = Auditor(options.settings(), level=level, tables=writer)
        spent = [audit(auditor, number, step) for number, step in enumerate(steps, 1)][warm_up:]
        if writer is not None:
            writer.abandon()
    name = level + (" and tables" if tables else "")
    print(
        f"  {name:16} min {min(spent):7.2f}  median {statistics.median(spent):7.2f} ms CPU per step"
    )
    return statistics.median(spent)


def profile(options: Options, steps: Steps) -> None:
    """Where the time goes."""
    with tempfile.TemporaryDirectory() as folder:
        writer = TableWriter(Path(folder) / "tables")
        auditor = Auditor(options.settings(), tables=writer)
        audit(auditor, 1, steps[0])
        profiler = cProfile.Profile()
        profiler.enable()
        for number, step in enumerate(steps[1:], 2):
            audit(auditor, number, step)
        profiler.disable()
        writer.abandon()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6)
    parser.add_argument("--response", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = Options(
        prompts=args.prompts, n=args.n, prompt_width=args.prompt, response_width=args.response,
        ranks=2, mini_batches=2, micro_rows=64,
    )  # fmt: skip
    steps = make_steps(options, args.steps + args.warm_up)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows, width = args.prompts * args.n, args.prompt + args.response
    print(f"{rows} rows x {width} columns, {len(steps[0])} boundaries, {args.steps} steps")
    if args.profile:
        profile(options, steps)
        return
    shape = measure(options, steps, "shape", tables=False, warm_up=args.warm_up)
    full = measure(options, steps, "full", tables=False, warm_up=args.warm_up)
    whole = measure(options, steps, "full", tables=True, warm_up=args.warm_up)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"  medians: contracts {shape:.2f}, probes {full - shape:.2f}, tables {whole - full:.2f} ms"
    )
    print(f"  memory grew by {grown:.0f} MiB at most")


if __name__ == "__main__":
    main()
