"""Bisect on traces with seeded faults: alone on every base, in pairs, and healthy ones.

Every fault of the catalogue that one step can hold is made in a simulated step and recorded; the
trace alone is what bisect gets, once with the models of the step and once without any. Pairs are
drawn at random from faults of different stages that share a base.

Usage: python benchmarks/bench_bisect.py [--seed 0] [--pairs 200] [--misses] [--json]
       [--models with|without]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.bases import BASES, healthy_configurations
from dataproto_audit.testing.faults import CATALOGUE, Fault
from dataproto_audit.testing.trace_scoring import BisectScore, score_verdict
from dataproto_audit.testing.traces import toy_scorers, write_simulated

HEALTHY_STEPS = 2
Pair = tuple[Fault, ...]


def one_step_faults() -> list[Fault]:
    """Faults that one step can hold: no lead of healthy steps, not over several steps."""
    return [fault for fault in CATALOGUE.values() if not fault.lead and fault.lasts == 1]


def singles() -> list[tuple[Pair, str]]:
    """Every fault on each of its bases."""
    return [((fault,), base) for fault in one_step_faults() for base in fault.bases]


def pairs(count: int, seed: int) -> list[tuple[Pair, str]]:
    """Pairs of faults that no stage is an accepted answer of both, on a base of both."""
    random = np.random.default_rng(seed)
    faults = [f for f in one_step_faults() if f.where in ("after_stage", "before_stage")]
    out: list[tuple[Pair, str]] = []
    while len(out) < count:
        left, right = (faults[int(at)] for at in random.choice(len(faults), 2, replace=False))
        shared = [base for base in left.bases if base in right.bases]
        if not shared or set(left.stages) & set(right.stages) or left.options or right.options:
            continue
        out.append(((left, right), shared[int(random.integers(len(shared)))]))
    return out


def run(
    faults: Pair, base: str, *, model: bool, seed: int = 0
) -> tuple[BisectScore, dict[str, Any], str]:
    """The score of one trace, the verdict, and what the stages behind a fault died of."""
    options = BASES[base]
    for fault in faults:
        options = replace(options, **fault.options)
    folder = tempfile.mkdtemp(prefix="dpa-")
    try:
        made = write_simulated(folder, options, faults, seed=seed)
        scorers = Scorers(**toy_scorers(made.options)) if model else Scorers()
        verdict = bisect(folder, scorers=scorers)
    finally:
        shutil.rmtree(folder)
    said = verdict.to_dict()
    return score_verdict(said, faults, made), said, made.crash


def tally(work: Sequence[tuple[Pair, str]], *, model: bool, seed: int) -> tuple[Counter[str], Any]:
    """Counts of what is right, and the misses."""
    counts: Counter[str] = Counter()
    misses = []
    for faults, base in work:
        score, said, crash = run(faults, base, model=model, seed=seed)
        counts["traces"] += 1
        counts["passes"] = max(counts["passes"], said["recomputations"])
        right = {name: getattr(score, name) for name in ("stage", "rows", "tokens", "second")}
        for name, value in right.items():
            if value is not None:
                counts[f"{name} of"] += 1
                counts[name] += bool(value)
        if False in right.values():
            misses.append((faults, base, said, crash))
    return counts, misses


def healthy(*, model: bool, seed: int) -> tuple[int, list[str]]:
    """Number of healthy traces, and those that were not called healthy."""
    wrong, number = [], 0
    for one in healthy_configurations():
        folder = tempfile.mkdtemp(prefix="dpa-")
        try:
            steps = min(HEALTHY_STEPS, one.steps)
            made = write_simulated(folder, one.options, steps=steps, seed=seed)
            for step in range(made.options.step, made.options.step + steps):
                scorers = Scorers(**toy_scorers(made.options, step=step)) if model else Scorers()
                verdict = bisect(folder, step=step, scorers=scorers)
                number += 1
                if verdict.verdict != "healthy":
                    wrong.append(f"{one.name}, step {step}: {verdict.stage} {verdict.missing}")
        finally:
            shutil.rmtree(folder)
    return number, wrong


def shares(counts: Mapping[str, int]) -> str:
    """``stage 520/530 98.1%``, one measure after the other."""
    measures = [name for name in ("stage", "rows", "tokens", "second") if counts.get(f"{name} of")]
    return ", ".join(
        f"{m} {counts[m]}/{counts[f'{m} of']} {counts[m] / counts[f'{m} of']:.1%}" for m in measures
    )


def lines(misses: Sequence[Any]) -> Iterator[str]:
    """One line for each miss."""
    for faults, base, said, crash in misses:
        wanted = " + ".join(f"{f.name} ({'/'.join(f.stages)})" for f in faults)
        later = ", ".join(f"{one['stage']}.{one['field']}" for one in said["later_faults"])
        got = f"{said['stage']}.{said['field']} rows {len(said['rows'])}; later {later or 'none'}"
        yield f"  {wanted} on {base}: {got}{f'; {crash}' if crash else ''}"


def main() -> None:
    """Run everything and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--misses", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-healthy", action="store_true")
    parser.add_argument("--models", choices=("both", "with", "without"), default="both")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    answer: dict[str, Any] = {}
    runs = {"both": (True, False), "with": (True,), "without": (False,)}
    for model in runs[given.models]:
        with_model = "with models" if model else "without models"
        parts = {"alone": singles(), "in pairs": pairs(given.pairs, given.seed)}
        for name, work in parts.items():
            began = time.monotonic()
            counts, misses = tally(work, model=model, seed=given.seed)
            answer[f"{name}, {with_model}"] = dict(counts)
            if not given.json:
                faults = len({f.name for faults, _ in work for f in faults})
                print(f"{name}, {with_model}: {counts['traces']} traces, {faults} faults: "
                      f"{shares(counts)}; at most {counts['passes']} passes; "
                      f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
                if given.misses:
                    print("\n".join(lines(misses)), flush=True)
        if not given.no_healthy:
            number, wrong = healthy(model=model, seed=given.seed)
            answer[f"healthy, {with_model}"] = {"steps": number, "wrong": wrong}
            if not given.json:
                print(f"healthy, {with_model}: {number - len(wrong)} of {number} steps called "
                      "healthy", *wrong, sep="\n  ", flush=True)  # fmt: skip
    if given.json:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
