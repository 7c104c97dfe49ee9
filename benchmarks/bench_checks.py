"""What checking costs: declarations, values per 100 MB, memory, and the neighbours' figures.

    python benchmarks/bench_checks.py

Prints, in CPU time of one thread:

- the structure of a batch with 25 fields (declared kinds, sizes bound across fields), the first
  time its signature is met and afterwards, beside a pandera schema of the same fields and a
  beartype-checked dataclass of jaxtyping annotations;
- the value probes of a finished step, in numpy and with the compiled loops of the extra ``fast``;
- resident memory that a full check of 1 GB of tensors adds at its peak, in a process of its own;
- ``debug_metrics`` beside verl's ``calculate_debug_metrics`` on 1024 x (2048 + 8192), where
  ``make test-verl`` has built an environment with verl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _large_batch
import _structure
import torch

from dataproto_audit import debug_metrics, fast
from dataproto_audit.auditor import Auditor, Level
from dataproto_audit.batch import BatchView
from dataproto_audit.checker.config import settings_from

ROOT = Path(__file__).resolve().parents[1]
SIZES = (
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
)


def least(run: Callable[[], Any], times: int = 5) -> float:
    """CPU seconds of the quickest of several runs."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return min(spent)


def audited(batch: dict[str, Any], level: Level) -> Callable[[], None]:
    """Lead a batch that no step was seen of through all boundaries up to the actor update."""
    settings, _ = settings_from(None, batch["meta_info"])

    def run() -> None:
        auditor = Auditor(settings, level=level, on_fail="record")
        auditor.begin_step(1)
        auditor.boundary("update_actor", batch)
        assert not auditor.findings, auditor.findings[0]

    return run


def values(rows: int) -> None:
    """Milliseconds per 100 MB of the value probes alone: full level minus shape level."""
    batch = _large_batch.large_batch(rows, 512, 1024)
    size = _large_batch.megabytes(batch)
    for name, seen in (("numpy", -(1 << 62)), ("compiled", 1 << 40)):
        fast._seen = seen
        audited(batch, "full")()  # compiles, or loads what was compiled
        shape, full = least(audited(batch, "shape")), least(audited(batch, "full"))
        print(
            f"value probes, {name:8} {1e5 * (full - shape) / size:6.1f} ms per 100 MB; row keys "
            f"and declarations {1e5 * shape / size:5.1f} ({size:.0f} MB, {rows} rows)",
            flush=True,
        )


def memory(rows: int) -> None:
    """Peak memory that a check adds; run in a process of its own."""
    batch = _large_batch.large_batch(rows, 512, 1024)
    fast._seen = 1 << 40
    audited(_large_batch.large_batch(128, 512, 1024), "full")()  # imports, caches, compiled loops
    before = resident()
    audited(batch, "full")()
    size, after = _large_batch.megabytes(batch), peak()
    print(f"memory: {after - before:.0f} MB more at the peak of checking {size:.0f} MB", flush=True)


def resident() -> float:
    """MB of this process now; the peak is set back to it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def peak() -> float:
    """The largest MB of this process since :func:`resident`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def metrics_batch(rows: int) -> dict[str, Any]:
    """Log-probs of two engines that differ by a hundredth of a nat."""
    random = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(rows, 8192, generator=random)
    rollout = (old + 0.01 * torch.randn(rows, 8192, generator=random)).clamp(max=0)
    length = torch.randint(2048, 8193, (rows, 1), generator=random)
    mask = (torch.arange(8192) < length).long()
    fields = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}
    return {"batch": {**fields, "responses": mask}, "non_tensor_batch": {}, "meta_info": {}}


def verl_side(rows: int) -> None:
    """In verl's environment: its function on the same numbers; prints JSON."""
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    torch.set_num_threads(1)
    batch = DataProto.from_dict(metrics_batch(rows)["batch"])
    spent = least(lambda: calculate_debug_metrics(batch))
    found = calculate_debug_metrics(batch)
    mine = least(lambda: debug_metrics(batch))
    print(json.dumps({"spent": spent, "ours": mine, "numbers": [float(found[n]) for n in SIZES],
                      "our_numbers": [debug_metrics(batch)[n] for n in SIZES]}))  # fmt: skip


def beside_verl(rows: int) -> None:
    """Both functions in one process of verl's environment."""
    python = ROOT / ".venvs" / "verl-0.9.1" / "bin" / "python"
    if not python.exists():
        print("debug_metrics beside verl: not run, `make test-verl` builds .venvs/verl-0.9.1")
        return
    command = [str(python), __file__, "--verl-side", "--rows", str(rows)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer = json.loads(told.splitlines()[-1])
    apart = max(abs(a - b) for a, b in zip(answer["numbers"], answer["our_numbers"], strict=True))
    print(
        f"debug_metrics {1e3 * answer['ours']:.0f} ms, verl {1e3 * answer['spent']:.0f} ms: "
        f"{answer['spent'] / answer['ours']:.1f} times faster, numbers apart by {apart:.1g}"
    )


def structure() -> None:
    """Microseconds for 25 fields."""
    batch = _structure.batch(64)
    view = BatchView.of(batch)
    for name, run in _structure.sides(view, batch).items():
        print(f"structure of {len(view.names)} fields, {name:24} {1e6 * run():8.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--verl-side", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.verl_side:
        verl_side(args.rows)
    elif args.memory:
        memory(12 * args.rows)
    else:
        structure()
        values(args.rows)
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        subprocess.run([sys.executable, __file__, "--memory"], check=True)
        beside_verl(args.rows)


if __name__ == "__main__":
    main()
