"""Starting and stopping Ray on one machine, leaving nothing behind.

Settings go into the environment before ``ray.init``, from where Ray's daemons and workers inherit
them; no runtime environment is needed. They are put back afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import ray
import torch
from omegaconf import DictConfig

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.workers.reaper import start_reaper

ENVIRONMENT: dict[str, str] = {
    # Ray starts workers at nice 15: on a shared machine they would starve.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's coming default; leaving it unset makes it warn.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Batches travel as plain arrays, out of band.
    "VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy",
    "TOKENIZERS_PARALLELISM": "false",
    # Models come from local folders.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
}
CPU_ENVIRONMENT: dict[str, str] = {
    # A second OpenMP thread spins at barriers; with several processes a core it only costs.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # All ranks are on this machine. Not for clusters of several nodes.
    "GLOO_SOCKET_IFNAME": "lo",
    # glibc gives large blocks back to the kernel and pays page faults for them in every layer.
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(256 * 2**20),
}
STOP_TIMEOUT_S = 5.0
START_ATTEMPTS = 2


def ray_options(config: DictConfig) -> dict[str, Any]:
    """What a run's configuration says about :func:`cluster`."""
    trainer = config.trainer
    ranks = int(trainer.nnodes) * int(trainer.n_gpus_per_node)
    return {
        "object_store_bytes": int(trainer.ray_object_store_bytes),
        "num_cpus": max(8, ranks + 2),  # one for each rank, and for the engine
    }


@contextlib.contextmanager
def cluster(
    *,
    num_cpus: int = 8,
    object_store_bytes: int = 128 * 2**20,
    environment: Mapping[str, str] | None = None,
    log_to_driver: bool = False,
    keep_logs: bool = False,
) -> Iterator[None]:
    """Ray for the length of the block; a Ray that runs already is used and left running.

    ``num_cpus`` is the number of actors that may run, not of cores. ``environment`` adds to the
    settings above; what the user has set already stays. Worker output goes to files in a
    temporary folder unless ``log_to_driver``; ``keep_logs`` keeps that folder.
    """
    if ray.is_initialized():
        yield
        return
    wanted = {**ENVIRONMENT, **({} if torch.cuda.is_available() else CPU_ENVIRONMENT)}
    with _environment({**wanted, **(environment or {})}):
        folder = tempfile.mkdtemp(prefix="dpa-", dir="/tmp")  # socket paths must stay short
        options = {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": object_store_bytes,
            "_temp_dir": folder,
            "_node_ip_address": "127.0.0.1",
            "logging_level": "ERROR",
            "log_to_driver": log_to_driver,
        }
        others = {child.pid for child in psutil.Process().children()}
        reaper = None
        try:
            _start(options, others)
            _print_daemon_messages(log_to_driver)
            roots = [child.pid for child in psutil.Process().children() if child.pid not in others]
            reaper = start_reaper(roots, folder="" if keep_logs else folder)
            others.add(reaper.pid)
            yield
        finally:
            _stop(others)
            if reaper is not None:
                reaper.kill()
                reaper.communicate()
            if not keep_logs:
                shutil.rmtree(folder, ignore_errors=True)


def _start(options: Mapping[str, Any], others: set[int]) -> None:
    """``ray.init``, once more if its daemons did not come up in the time that Ray gives them.

    That time is fixed at 30 seconds, which a machine under heavy load can exceed.
    """
    for attempt in range(START_ATTEMPTS):
        try:
            with _own_sessions():
                ray.init(**options)
            return
        except Exception as error:  # Ray raises no narrower class here
            _stop(others)
            if attempt + 1 == START_ATTEMPTS or "timed out" not in str(error):
                raise RunError(
                    "DPA868",
                    f"Ray's own processes did not start: {error}",
                    "Free the machine, or look into Ray's logs with keep_logs.",
                ) from error


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Ray's daemons start in sessions of their own, so a signal to our group is ours alone.

    ``timeout``, a batch system or a terminal that closes signals the whole group; with the daemons
    gone, the driver would wait a minute for them and exit without clearing up. Ray has no public
    option for it, and keeps only SIGINT from them. They end with the driver all the same (the
    kernel's parent-death signal, and the reaper).
    """
    services = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        yield
        return
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _print_daemon_messages(enabled: bool) -> None:
    """Ray prints "A worker died ..." on the driver's stdout, where programs read our JSON.

    Our own error says the same on stderr. Ray has no public switch for it.
    """
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = enabled


def _stop(others: set[int]) -> None:
    """Shut Ray down and wait for its processes; end by force what does not go.

    Ray's processes are the children of this one but for ``others``, and what they started.
    """
    started: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                started += [child, *child.children(recursive=True)]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=STOP_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    added = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
        if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del os.environ["PYTHONBREAKPOINT"]  # Ray sets it in the driver and leaves it there
