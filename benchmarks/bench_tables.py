"""CPU time that the tables of one realistic step cost: ``python benchmarks/bench_tables.py``.

The step: 60 metrics, 150 fields, 300 outcomes in 28 boundaries, 64 groups, 512 rows, 64 tokens,
8 ranks, 8 loss terms. Prints CPU milliseconds per step, what lands on disk, and what closing the
run costs. On a busy machine the 10th percentile tells more than the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dataproto_audit.dump.tables import Block, TableWriter

BOUNDARIES = 28
STAGES = ("prompts", "rollout", "union", "balance", "dispatch", "reward", "old_log_prob")


class Step:
    """Content of a step as the trainer has it, drawn once."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.uids = np.array([f"{i:08x}-{rng.integers(1 << 62):023x}" for i in range(64)], object)
        self.row_uids = np.repeat(self.uids, 8)
        self.keys = np.array([f"{u}:{i % 8}" for i, u in enumerate(self.row_uids)], object)
        self.metrics = [f"family/metric_{i}" for i in range(60)]
        self.boundaries = [
            (STAGES[i // 2 % len(STAGES)], ("before", "after")[i % 2]) for i in range(BOUNDARIES)
        ]

    def outcomes(self, i: int) -> list[tuple[Any, ...]]:
        """Rows of the outcomes table at boundary ``i``."""
        stage, when = self.boundaries[i]
        many = 300 // BOUNDARIES + (i < 300 % BOUNDARIES)
        return [
            (stage, when, f"check_number_{j}", f"DPA{100 + j}", "passed", None) for j in range(many)
        ]

    def fields(self, i: int) -> list[tuple[Any, ...]]:
        """Rows of the fields table at boundary ``i``."""
        stage, when = self.boundaries[i]
        many = 150 // BOUNDARIES + (i < 150 % BOUNDARIES)
        low, high, mean = self.rng.standard_normal(3).tolist()
        return [
            (stage, when, f"field_{j}", "f32", "[512,128]", 512, low, high, mean, 0, 0, 0.43,
             f"{hash((i, j)) & (1 << 62) - 1:016x}")
            for j in range(many)
        ]  # fmt: skip


def write_step(tables: TableWriter, step: Step, number: int, blocks: list[Block] | None) -> None:
    """One step through the writer; ``blocks`` are cached outcomes, None converts them anew."""
    rng = step.rng
    for i in range(BOUNDARIES):
        if blocks is None:
            tables.append_rows("outcomes", step.outcomes(i))
        else:
            tables.append_block(blocks[i])
        tables.append_rows("fields", step.fields(i))
    values = rng.standard_normal(60).tolist()
    tables.append("steps", {"metric": step.metrics, "value": values})
    score = rng.integers(0, 2, 512).astype(np.float64)
    group = score.reshape(64, 8)
    tables.append("groups", {
        "uid": step.uids, "rows": 8, "score_mean": group.mean(1), "score_std": group.std(1),
        "score_min": group.min(1), "score_max": group.max(1), "advantage_mean": np.zeros(64),
        "length_mean": rng.uniform(10, 100, 64), "degenerate": group.std(1) == 0,
    })  # fmt: skip
    lengths = rng.integers(1, 128, 512).astype(np.int32)
    tables.append("rows", {
        "row": np.arange(512, dtype=np.int32), "row_key": step.keys, "uid": step.row_uids,
        "prompt_length": lengths, "response_length": lengths, "trained_tokens": lengths,
        "score": score, "advantage": rng.standard_normal(512),
        "rollout_old_gap_max": rng.exponential(1e-6, 512), "old_ref_gap_max": np.zeros(512),
        "finish_reason": "stop", "flags": "",
    })  # fmt: skip
    log_probs = rng.exponential(1, 64).astype(np.float32)
    tables.append("tokens", {
        "row": np.arange(64) // 32, "row_key": step.keys[:64], "column": np.arange(64) % 32,
        "token_id": rng.integers(0, 1000, 64), "mask": np.ones(64, bool),
        "rollout_log_prob": log_probs, "old_log_prob": log_probs, "ref_log_prob": log_probs,
        "reward": np.zeros(64, np.float32), "advantage": log_probs, "flag": "",
    })  # fmt: skip
    eight = np.arange(8)
    tables.append("ranks", {
        "stage": "update_actor", "rank": eight, "rows": 64, "tokens": eight * 1000,
        "micro_batches": 4, "peak_token_sum": 4096, "bubble": eight / 100, "cpu_s": eight / 10,
    })  # fmt: skip
    tables.append("loss", {
        "mini_batch": eight // 4, "term": ["pg", "kl", "entropy", "total"] * 2,
        "value": values[:8], "normaliser": 12000.0, "recomputed": values[:8], "difference": 0.0,
    })  # fmt: skip
    tables.flush_step(number)


def measure(steps: int, *, cached: bool) -> str:
    """Write ``steps`` steps and say in one line what they cost."""
    with tempfile.TemporaryDirectory() as folder:
        step = Step()
        tables = TableWriter(folder)
        names = ("stage", "when", "check", "code", "kind", "reason")
        blocks = [
            tables.block("outcomes", dict(zip(names, zip(*step.outcomes(i), strict=True),
                                              strict=True)))
            for i in range(BOUNDARIES)
        ]  # fmt: skip
        spent, whole = [], []
        for number in range(1, steps + 1):
            before, writer = time.process_time(), tables.cpu_s
            write_step(tables, step, number, blocks if cached else None)
            whole.append(1e3 * (time.process_time() - before))
            spent.append(1e3 * (tables.cpu_s - writer))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        before = time.process_time()
        tables.close()
        close = 1e3 * (time.process_time() - before)
        compact = sum(path.stat().st_size for path in Path(folder).iterdir())
    warm = sorted(spent[5:])
    return (
        f"outcomes {'as blocks' if cached else 'as tuples'}: writer CPU per step "
        f"median {statistics.median(warm):.2f} ms, 10th percentile {warm[len(warm) // 10]:.2f} ms "
        f"(median {statistics.median(whole[5:]):.2f} ms with the making of the values); "
        f"on disk {size / steps / 1024:.0f} KiB per step, {compact / steps / 1024:.0f} KiB as "
        f"Parquet; close {close:.0f} ms, {close / steps:.2f} ms per step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    for cached in (True, False):
        print(measure(args.steps, cached=cached))


if __name__ == "__main__":
    main()
