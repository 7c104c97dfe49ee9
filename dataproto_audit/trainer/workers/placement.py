"""Where ranks run: a placement group with one bundle a rank, and starting and ending actors."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataproto_audit.codes import UsageError

PLACEMENT_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Placed:
    """A reserved placement group; ``gpus`` for each of its bundles."""

    group: Any
    gpus: float


def place(world_size: int, *, gpus_per_worker: float | None = None) -> Placed:
    """Reserve one CPU (and one GPU where the cluster has any) for each rank.

    Raises DPA854 if the cluster cannot hold them.
    """
    resources = ray.cluster_resources()
    gpus = gpus_per_worker
    if gpus is None:
        gpus = 1.0 if resources.get("GPU", 0) >= 1 else 0.0
    bundle = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
    wanted = {name: amount * world_size for name, amount in bundle.items()}
    short = {
        name: resources.get(name, 0.0) for name in wanted if resources.get(name, 0.0) < wanted[name]
    }
    if short:
        raise UsageError(
            "DPA854",
            f"{world_size} ranks need {wanted}, the Ray cluster has {short}.",
            "Set trainer.n_gpus_per_node to the GPUs there are, or start a larger cluster.",
        )
    group = placement_group([bundle] * world_size, strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise UsageError(
            "DPA854",
            f"no room for {world_size} ranks on the Ray cluster within {PLACEMENT_TIMEOUT_S:g} s.",
            "Stop what else uses it.",
        )
    return Placed(group, gpus)


def start(actor_class: type, placed: Placed, rank: int, args: Sequence[Any]) -> Any:
    """A Ray actor of ``actor_class`` in the bundle of ``rank``; returns its handle at once."""
    remote = ray.remote(actor_class).options(
        num_cpus=1,
        num_gpus=placed.gpus,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=placed.group, placement_group_bundle_index=rank
        ),
    )
    return remote.remote(*args)


def stop(workers: Sequence[Any], placed: Placed, pids: Sequence[int]) -> None:
    """Kill the actors, free their places and wait until processes on this node are gone."""
    for worker in workers:
        with contextlib.suppress(Exception):  # a dead cluster has nothing left to kill
            ray.kill(worker, no_restart=True)
    with contextlib.suppress(Exception):
        remove_placement_group(placed.group)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)


def driver_address() -> str:
    """The address under which ranks reach the driver: loopback unless there are other nodes."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) <= 1:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def this_host() -> str:
    """Name of this machine, as ranks report theirs."""
    return os.uname().nodename


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
