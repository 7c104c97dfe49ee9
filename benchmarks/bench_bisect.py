"""Bisect on traces with seeded faults: alone on every base, in pairs, and healthy ones.

Every fault of the catalogue that one step can hold is made in a simulated step and recorded; the
trace alone is what bisect gets, once with the models of the step and once without any. Pairs are
drawn at random from faults of different stages that share a base.

The same is done with steps of verl's own runs, from the files in ``--samples``: what its calls
returned is the record, the stages behind a fault are run again, and cells that moved by less than
bfloat16 rounds may be named or not (``testing/recorded_faults.py``).

Usage: python benchmarks/bench_bisect.py [--seed 0] [--pairs 200] [--misses] [--json]
       [--models with|without] [--runs own|verl] [--no-healthy]
       [--samples DIR] [--every K]    (each K-th of the faults that are made alone)
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
from pathlib import Path
from typing import Any

import numpy as np

from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.bases import BASES, healthy_configurations
from dataproto_audit.testing.faults import CATALOGUE, Fault
from dataproto_audit.testing.recorded_faults import NotHere, score_recorded, write_recorded
from dataproto_audit.testing.recorded_steps import RecordedStep
from dataproto_audit.testing.trace_scoring import BisectScore, score_verdict
from dataproto_audit.testing.traces import toy_scorers, write_simulated
from dataproto_audit.testing.verl_samples import verl_steps

HEALTHY_STEPS = 2
SAMPLES = Path(__file__).parents[1] / "tests" / "data" / "samples"
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


def run_verl(
    faults: Pair, step: RecordedStep, *, model: bool
) -> tuple[BisectScore, dict[str, Any], str]:
    """The same of a trace of verl's; raises :class:`NotHere` for faults that it cannot hold."""
    folder = tempfile.mkdtemp(prefix="dpa-")
    try:
        made = write_recorded(folder, step, faults)
        said = bisect(folder, scorers=_scorers(step) if model else Scorers()).to_dict()
    finally:
        shutil.rmtree(folder)
    return score_recorded(said, faults, made), said, made.crash


def _scorers(step: RecordedStep) -> Scorers:
    """The step's weights, without what bfloat16 rounds: the engine's numbers, where they are."""
    fields = step.final.batch.keys()
    exact = "rollout_log_probs" if "rollout_log_probs" in fields else "old_log_probs"
    scorer = step.run().model.scorer(exact)
    return Scorers(policy=scorer, reference=scorer)


NO_FAULT = ("half_precision_pass",)
"""What is a fault in a run in float32 only."""


def in_verl(
    samples: Path, count: int, seed: int
) -> tuple[list[tuple[Pair, Any]], list[tuple[Pair, Any]]]:
    """Faults to make alone in each step of verl's, and ``count`` pairs of different stages."""
    alone: list[tuple[Pair, Any]] = []
    for step, bases in verl_steps(samples):
        alone += [((fault,), step) for fault in one_step_faults()
                  if set(bases) & set(fault.bases) and fault.name not in NO_FAULT
                  and not fault.options]  # fmt: skip
    random, both = np.random.default_rng(seed), []
    while alone and len(both) < count:
        (left,), step = alone[int(random.integers(len(alone)))]
        others = [f for (f,), other in alone if other is step]
        right = others[int(random.integers(len(others)))]
        if not set(left.stages) & set(right.stages):
            both.append(((left, right), step))
    return alone, both


def tally(
    work: Sequence[tuple[Pair, Any]], *, model: bool, seed: int
) -> tuple[Counter[str], list[Any]]:
    """Counts of what is right, and the misses."""
    counts: Counter[str] = Counter()
    misses = []
    held = set()
    for faults, base in work:
        try:
            if isinstance(base, RecordedStep):
                score, said, crash = run_verl(faults, base, model=model)
                base = base.name
            else:
                score, said, crash = run(faults, base, model=model, seed=seed)
        except NotHere:
            continue
        held |= {fault.name for fault in faults}
        counts["faults"] = len(held)
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


def healthy_verl(samples: Path, *, model: bool) -> tuple[int, list[str]]:
    """The same of verl's."""
    wrong, number = [], 0
    for step, _ in verl_steps(samples):
        folder = tempfile.mkdtemp(prefix="dpa-")
        try:
            write_recorded(folder, step)
            verdict = bisect(folder, scorers=_scorers(step) if model else Scorers())
        finally:
            shutil.rmtree(folder)
        number += 1
        if verdict.verdict != "healthy":
            wrong.append(f"{step.name}: {verdict.stage} {verdict.missing}")
    return number, wrong


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
    parser.add_argument("--runs", choices=("both", "own", "verl"), default="both")
    parser.add_argument("--samples", type=Path, default=SAMPLES)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--models", choices=("both", "with", "without"), default="both")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    answer: dict[str, Any] = {}
    runs = {"both": (True, False), "with": (True,), "without": (False,)}
    for model in runs[given.models]:
        with_model = "with models" if model else "without models"
        parts: dict[str, Any] = {}
        if given.runs != "verl":
            parts |= {
                "alone": singles()[:: given.every],
                "in pairs": pairs(given.pairs, given.seed),
            }
        if given.runs != "own":
            alone, both = in_verl(given.samples, given.pairs, given.seed)
            parts |= {"verl, alone": alone[:: given.every], "verl, in pairs": both} if alone else {}
        for name, work in parts.items():
            began = time.monotonic()
            counts, misses = tally(work, model=model, seed=given.seed)
            answer[f"{name}, {with_model}"] = dict(counts)
            if not given.json:
                print(f"{name}, {with_model}: {counts['traces']} traces, {counts['faults']} faults"
                      f": {shares(counts)}; at most {counts['passes']} passes; "
                      f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
                if given.misses:
                    print("\n".join(lines(misses)), flush=True)
        if not given.no_healthy:
            found = {} if given.runs == "verl" else {"": healthy(model=model, seed=given.seed)}
            if given.runs != "own":
                found["verl, "] = healthy_verl(given.samples, model=model)
            for whose, (number, wrong) in found.items():
                answer[f"{whose}healthy, {with_model}"] = {"steps": number, "wrong": wrong}
                if not given.json:
                    print(f"{whose}healthy, {with_model}: {number - len(wrong)} of {number} steps "
                          "called healthy", *wrong, sep="\n  ", flush=True)  # fmt: skip
    if given.json:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
