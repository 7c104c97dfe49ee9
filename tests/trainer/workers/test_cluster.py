import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.workers import cluster as module
from dataproto_audit.trainer.workers.cluster import cluster

DRIVER = """
import os, signal, sys, time
import psutil, ray
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell leaves it ignored
from dataproto_audit.trainer.workers.cluster import cluster
with cluster(num_cpus=2):
    @ray.remote
    def pid():
        return os.getpid()
    ray.get(pid.remote())
    print(ray._private.worker._global_node.get_temp_dir_path(), flush=True)
    print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""


@ray.remote(num_cpus=0)
class Probe:
    def settings(self):
        return os.nice(0), dict(os.environ)

    def die(self):
        os._exit(1)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.engine
@pytest.mark.usefixtures("no_leftover_processes")
def test_workers_get_the_settings_and_nothing_stays(capsys):
    before, niceness = dict(os.environ), os.nice(0)
    with cluster(num_cpus=2, environment={"DPA_TEST_SETTING": "7"}):
        probe = Probe.remote()
        nice, environment = ray.get(probe.settings.remote())
        assert nice == niceness, "Ray's default would be 15 more"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["VERL_DATAPROTO_SERIALIZATION_METHOD"] == "numpy"
        assert environment["DPA_TEST_SETTING"] == "7"
        folder = Path(ray._private.worker._global_node.get_temp_dir_path())
        assert folder.is_dir()
        with cluster(num_cpus=2):
            assert ray.get(probe.settings.remote())[0] == nice
        assert ray.is_initialized(), "a Ray that ran already is left running"
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(probe.die.remote())
        time.sleep(1.0)
    assert not ray.is_initialized()
    assert dict(os.environ) == before
    assert not folder.exists()
    assert capsys.readouterr().out == "", "stdout belongs to the program's own answer"


@pytest.mark.engine
@pytest.mark.usefixtures("no_leftover_processes")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_when_the_driver_is_killed_or_interrupted(how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with driver:
        folder = Path(driver.stdout.readline().strip())
        assert folder.is_dir()
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) >= 5
        driver.send_signal(how)
        driver.wait(timeout=60)
    deadline = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if runs(pid)]
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not folder.exists()


def test_a_start_that_times_out_is_tried_again(monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        if len(calls) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(module.ray, "init", init)
    module._start({"num_cpus": 1}, {child.pid for child in psutil.Process().children()})
    assert len(calls) == 2


def test_a_start_that_fails_otherwise_is_one_clear_error(monkeypatch):
    def init(**options):
        raise ValueError("no such option")

    monkeypatch.setattr(module.ray, "init", init)
    with pytest.raises(RunError, match=r"DPA868 .*did not start: no such option"):
        module._start({}, {child.pid for child in psutil.Process().children()})
