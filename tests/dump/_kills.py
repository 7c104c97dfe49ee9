"""Kill a process that records a trace, at random times, and look at what it left.

    python _kills.py FOLDER NUMBER     counts as JSON on stdout

Run as a program of its own: it forks, which a test process full of threads must not.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace import Trace, TraceWriter, is_trace
from dataproto_audit.protocol import DataProto

STAGES = ("rollout", "old_log_prob", "advantage")
ROWS, COLUMNS = 64, 256


def batch(step: int, stage: int) -> DataProto:
    """Fields of a stage, told by the step: each holds one number."""
    names = ("responses", "old_log_probs", "advantages")[: stage + 1]
    return DataProto.from_dict(
        {name: torch.full((ROWS, COLUMNS), step * 10 + at) for at, name in enumerate(names)}
    )


def record(folder: Path) -> None:
    """Steps without end."""
    with TraceWriter(folder, retention="all") as writer:
        for step in range(1, 1 << 30):
            writer.begin_step(step)
            for number, stage in enumerate(STAGES):
                writer.write_boundary(stage, batch(step, number))
            writer.end_step()


def look(folder: Path) -> tuple[int, int]:
    """Whole and torn steps; raises where a whole one is not as it was recorded."""
    if not is_trace(folder):
        return 0, 0
    try:
        trace = Trace(folder)
    except UsageError as error:  # not one step is whole, and that is said
        if "not whole" not in str(error):
            raise
        return 0, 1
    for number in trace.steps:
        step = trace.step(number)
        assert [b.stage for b in step.boundaries] == list(STAGES), number
        for boundary in step.boundaries:
            view = boundary.view()
            for at, name in enumerate(view.names):
                assert (view.numpy(name) == number * 10 + at).all(), (number, name)
    return len(trace.steps), len(trace.torn)


def main() -> None:
    root, times = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(0)
    told = {"kills": 0, "whole": 0, "torn": 0, "went_on": 0}
    for number in range(times):
        folder = root / str(number)
        child = os.fork()
        if not child:
            record(folder)
            os._exit(0)
        while not (is_trace(folder) and (number % 2 or look(folder)[0])):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        told["kills"] += os.WIFSIGNALED(status)
        whole, torn = look(folder)
        told["whole"] += whole
        told["torn"] += torn
        with TraceWriter(folder, retention="all", after=whole) as writer:  # the run is resumed
            writer.begin_step(whole + 1)
            for at, stage in enumerate(STAGES):
                writer.write_boundary(stage, batch(whole + 1, at))
            writer.end_step()
        told["went_on"] += look(folder) == (whole + 1, 0)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
