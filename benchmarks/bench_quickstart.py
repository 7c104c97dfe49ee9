"""Does the quickstart learn, does it stay quiet, and what does auditing cost?

Runs the quickstart with several seeds, and the first ones again with the scores shuffled over the
rows (a control that cannot learn). Prints reward, gain, findings and CPU figures of each run, and
the reward curves in eighths.

    python benchmarks/bench_quickstart.py --seeds 5 --controls 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from dataproto_audit.dump.run import open_run
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.run import run
from dataproto_audit.trainer.workers.cluster import cluster


def shuffled(seed: int) -> Callbacks:
    """Each row keeps its place for a score, but gets the score of another row."""
    random = np.random.default_rng(seed)

    def hook(step: int, stage: str, batch: DataProto) -> None:
        if stage != "reward":
            return
        scores = batch.batch["token_level_scores"]
        total = scores.sum(1)[torch.from_numpy(random.permutation(len(batch)))]
        width = scores.shape[1]
        last = batch.batch["attention_mask"][:, -width:].sum(1) - 1
        moved = torch.zeros_like(scores)
        moved[torch.arange(len(batch)), last] = total
        batch.batch["token_level_scores"] = moved
        batch.batch["rm_scores"] = moved.clone()
        score = np.empty(len(batch), object)
        score[:] = total.tolist()
        batch.non_tensor_batch["score"] = score

    return Callbacks(after_stage=[hook])


def one(seed: int, *, control: bool, steps: int, folder: Path) -> dict[str, object]:
    """One run; its summary with the reward curve in eighths."""
    run_dir = folder / f"{'control' if control else 'seed'}-{seed}"
    config = load_config(
        "quickstart",
        [
            f"trainer.run_dir={run_dir}",
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"actor_rollout_ref.model.tiny.seed={seed}",
            f"trainer.total_training_steps={steps}",
            "audit.on_fail=record",
        ],
    )
    result = run(config, callbacks=shuffled(seed) if control else None).summary
    rewards = open_run(run_dir).metric("critic/score/mean").dropna().to_numpy()
    result["curve"] = [round(float(part.mean()), 3) for part in np.array_split(rewards, 8)]
    result["gain"] = result["reward_last"] - result["reward_first"]
    return result


def main() -> None:
    """Run all and print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--controls", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--json", type=Path, help="write all summaries here")
    args = parser.parse_args()
    runs: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch, cluster():
        for control, count in ((False, args.seeds), (True, args.controls)):
            for seed in range(2, 2 + count):
                summary = one(seed, control=control, steps=args.steps, folder=Path(scratch))
                runs.append({"seed": seed, "control": control, **summary})
                print(
                    f"{'control' if control else 'healthy'} seed {seed}: "
                    f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} "
                    f"(gain {summary['gain']:+.3f})  findings {summary['findings']}  "
                    f"audit {100 * float(str(summary['audit_cpu_share'])):.2f} % of "
                    f"{summary['cpu_ms_per_step']:.0f} CPU ms a step  "
                    f"{summary['samples_per_cpu_s']:.0f} samples/CPU s  curve {summary['curve']}",
                    flush=True,
                )
    gains = {c: [float(str(r["gain"])) for r in runs if r["control"] == c] for c in (False, True)}
    if all(gains.values()):
        print(
            f"gain: healthy min {min(gains[False]):+.3f}, shuffled max {max(gains[True]):+.3f}, "
            f"apart by {min(gains[False]) - max(gains[True]):+.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
