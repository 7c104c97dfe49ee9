"""The engine of each role of a training rank."""

from __future__ import annotations

import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import Backend, OptimSpec
from dataproto_audit.trainer.workers.spec import WorkerSpec, megatron_of, model_of, strategy_of


def make_backend(
    spec: WorkerSpec, *, device: torch.device, optim: OptimSpec | None, role: str = "actor"
) -> Backend:
    """The engine that the strategy of ``role`` names; raises DPA851 for an unknown one."""
    strategy, model = strategy_of(spec, role), model_of(spec, role)
    if strategy == "megatron":
        from dataproto_audit.trainer.backends.megatron.backend import MegatronBackend

        return MegatronBackend(
            model,
            device=device,
            optim=optim,
            options=megatron_of(spec, role),
            timeout_s=spec.collective_timeout_s,
            seed=spec.seed,
        )
    if strategy in ("fsdp", "fsdp2"):
        from dataproto_audit.trainer.backends.fsdp import FSDPBackend

        return FSDPBackend(model, device=device, optim=optim, options=spec.fsdp)
    raise UsageError(
        "DPA851", f"unknown {role}.strategy {strategy!r}.", "Choose fsdp2 or megatron."
    )
