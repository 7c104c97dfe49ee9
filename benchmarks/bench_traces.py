"""Traces of one large step: size against verl's pickle, what the training thread waits for, and
how long one row of it takes to read.

The batch is that of an actor update, about 500 MB of tensors as verl holds them. One row is read
as `show --row` does, at a fresh :class:`Trace` each time: steps listed, boundary opened, row read.

Usage: python benchmarks/bench_traces.py [--rows 2112] [--repeat 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _large_batch import large_batch

from dataproto_audit.batch import BatchView
from dataproto_audit.dump.trace import Trace, TraceWriter
from dataproto_audit.protocol import DataProto

PROMPT, RESPONSE = 1024, 3072


def timed(call: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of each call."""
    out = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        out.append((time.perf_counter() - start) * 1e3)
    return out


def one_row(folder: Path, row: int) -> None:
    step = Trace(folder).step(1)
    view = step.boundaries[0].view(rows=[row])
    assert view.rows == 1


def measured(rows: int, repeat: int) -> dict[str, float]:
    made = large_batch(rows, PROMPT, RESPONSE)
    tensors = made["batch"]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    batch = DataProto.from_dict(tensors, made["non_tensor_batch"], meta_info=made["meta_info"])
    folder = Path(tempfile.mkdtemp(prefix="dpa-"))
    try:
        with TraceWriter(folder / "trace", retention="all") as writer:
            writer.begin_step(1)
            copy = timed(lambda: [tensor.clone() for tensor in tensors.values()], 3)
            view = BatchView.of(batch)
            [hashed] = timed(lambda: view.hash_rows(view.tensors), 1)  # as the auditor has already
            start, cpu = time.perf_counter(), time.thread_time()
            writer.write_boundary("advantage", view)
            blocked = (time.perf_counter() - start) * 1e3
            blocked_cpu = (time.thread_time() - cpu) * 1e3
            writer.end_step()
        files = (path for path in (folder / "trace").rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        pickled = len(pickle.dumps(batch))
        spread = np.linspace(0, rows - 1, repeat).astype(int).tolist()
        one_row(folder / "trace", 0)
        times = [timed(lambda row=row: one_row(folder / "trace", row), 1)[0] for row in spread]
    finally:
        shutil.rmtree(folder)
    return {
        "rows": rows, "held_mb": held / 1e6, "pickle_mb": pickled / 1e6, "trace_mb": size / 1e6,
        "size_ratio": size / pickled, "host_copy_ms": statistics.median(copy),
        "blocked_ms": blocked, "blocked_cpu_ms": blocked_cpu, "fingerprints_ms": hashed,
        "row_ms_median": statistics.median(times), "row_ms_most": max(times),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2112)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    told = measured(given.rows, given.repeat)
    if given.json:
        print(json.dumps(told))
        return
    print(f"step of {told['held_mb']:.0f} MB, {told['rows']} rows of {PROMPT} + {RESPONSE} tokens")
    print(f"trace {told['trace_mb']:.0f} MB, {told['size_ratio']:.2f} of verl's pickle "
          f"({told['pickle_mb']:.0f} MB)")  # fmt: skip
    print(f"training thread: {told['blocked_ms']:.0f} ms ({told['blocked_cpu_ms']:.0f} ms CPU), a "
          f"host copy takes {told['host_copy_ms']:.0f} ms; the fingerprints that the auditor takes "
          f"of a new batch {told['fingerprints_ms']:.0f} ms")  # fmt: skip
    print(f"one row: median {told['row_ms_median']:.1f} ms, most {told['row_ms_most']:.1f} ms")


if __name__ == "__main__":
    main()
