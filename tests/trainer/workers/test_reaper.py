import os
import subprocess
import sys
import time

import psutil

from dataproto_audit.trainer.workers.reaper import processes, reap

SLEEPER = "import time; time.sleep(600)"
PARENT = (
    "import subprocess, sys, time;"
    f"print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]).pid, flush=True);"
    "time.sleep(600)"
)
# A driver that starts a daemon with a child, has them watched, and is then killed.
DRIVER = (
    "import subprocess, sys, time;"
    "from dataproto_audit.trainer.workers.reaper import start_reaper;"
    f"p = subprocess.Popen([sys.executable, '-c', {PARENT!r}], stdout=subprocess.PIPE, text=True);"
    "child = int(p.stdout.readline());"
    "print(p.pid, child, start_reaper([p.pid], folder=sys.argv[1]).pid, flush=True);"
    "time.sleep(600)"
)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    """Whether all of them end within a minute; a killed process takes a moment."""
    deadline = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(runs, pids))


def test_a_tree_is_ended_and_others_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    root = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with root, other:
        child = int(root.stdout.readline())
        try:
            reap([(root.pid, processes()[root.pid][1])], patience_s=0.0)
            root.wait(timeout=10)
            assert gone([child])
            assert runs(other.pid)
        finally:
            other.kill()


def test_a_process_that_took_over_the_number_is_left_alone():
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as process:
        try:
            reap([(process.pid, "1")], patience_s=0.0)
            assert runs(process.pid)
        finally:
            process.kill()


def test_daemons_of_a_killed_driver_are_ended(tmp_path):
    (tmp_path / "session" / "logs").mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "session")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert all(map(runs, pids))
        psutil.Process(pids[0]).kill()  # as the kernel does with Ray's daemons
        driver.kill()
    assert gone(pids)
    assert not (tmp_path / "session").exists()
