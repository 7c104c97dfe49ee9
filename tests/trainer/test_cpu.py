"""CPU seconds of processes, as the kernel counts them."""

import os
import subprocess
import sys

from dataproto_audit.trainer.cpu import CpuMeter, process_cpu_s

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_the_total_holds_children_that_run_and_that_have_ended():
    meter = CpuMeter()
    before = meter.total_s()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    ended = meter.total_s()
    assert ended >= before + 0.29
    child = subprocess.Popen(
        [sys.executable, "-c", f"{BUSY}print(flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        child.stdout.readline()
        assert meter.total_s() >= ended + 0.29
    finally:
        child.communicate(b"\n")


def test_a_measured_process_counts_once():
    meter = CpuMeter()
    meter.start([os.getpid(), 2**22 + 1])
    own = process_cpu_s(os.getpid())
    assert own <= meter.total_s() + 0.05
    assert process_cpu_s(2**22 + 1) == 0.0
