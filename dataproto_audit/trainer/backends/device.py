"""Which device and process-group transport to use: the one place that tells CPU from GPU."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # conditional there


def training_device() -> torch.device:
    """This process's GPU, or the CPU. Ray shows each worker its own GPU as number 0."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def transport(device: torch.device) -> str:
    """NCCL on GPUs, gloo on CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def join_process_group(
    store: Store, *, rank: int, world_size: int, timeout_s: float
) -> torch.device:
    """Meet the peers over ``store`` and return this rank's device.

    ``timeout_s`` bounds every collective. gloo raises after it. NCCL's watchdog would end the
    *waiting* process, so it gets three times as long and the driver, which reads the ranks'
    notes, is first.
    """
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        transport(device),
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s * (3 if device.type == "cuda" else 1)),
        device_id=device if device.type == "cuda" else None,
    )
    return device
