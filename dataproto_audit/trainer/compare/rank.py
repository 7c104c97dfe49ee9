"""One rank of a layout under comparison: a process that runs the trainer's own worker."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dataproto_audit.codes import CodedError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.base import Backend
from dataproto_audit.trainer.batching import Index
from dataproto_audit.trainer.compare.critic import ValueAnswer, value_step
from dataproto_audit.trainer.compare.layers import States, collect
from dataproto_audit.trainer.compare.meter import Meter, Usage, size_of
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers.actor import TrainWorker
from dataproto_audit.trainer.workers.dispatch import Place
from dataproto_audit.trainer.workers.inputs import micro_batch
from dataproto_audit.trainer.workers.spec import WorkerSpec


@dataclass
class Task:
    """What a rank is to run. ``store`` is where the ranks of this layout meet; ``chunks`` holds
    the rows of every data-parallel rank, with the micro-batches of both passes; ``layers`` asks for
    the hidden states, ``values`` for a value model's step, too."""

    rank: int
    world: int
    store: tuple[str, int]
    spec: WorkerSpec
    chunks: list[DataProto]
    forward: tuple[tuple[Index, ...], ...]
    update: tuple[tuple[MiniBatchPlan, ...], ...]
    tamper: str | None = None
    layers: bool = False
    values: bool = False


@dataclass
class Answer:
    """What a rank computed and what that took. Pieces are those of :mod:`..backends.shards`."""

    place: Place
    outputs: DataProto
    update: DataProto
    gradients: shards.ShardPayload
    weights: shards.ShardPayload
    held: dict[str, int]
    usage: Usage
    startup_s: float
    step_cpu_s: float
    layers: States = field(default_factory=dict)
    values: ValueAnswer | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Failed:
    """A rank's error: the one meant for users, or the text of its traceback."""

    error: CodedError | None
    text: str


def serve(connection: Connection) -> None:
    """Run tasks that come over ``connection`` until None comes."""
    os.dup2(2, 1)  # what libraries print is not the answer
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    for module in TrainWorker.imports:
        importlib.import_module(module)
    while (task := connection.recv()) is not None:
        try:
            connection.send(run(task))
        except CodedError as error:
            connection.send(Failed(error, str(error)))
        except Exception:  # noqa: BLE001 - the driver tells
            connection.send(Failed(None, traceback.format_exc()))
        finally:
            _leave_megatron()
            if dist.is_initialized():
                dist.destroy_process_group()


def _leave_megatron() -> None:
    """Megatron's groups belong to the process, and the next task's are others."""
    model = sys.modules.get("dataproto_audit.trainer.backends.megatron.model")
    if model is not None:
        model.leave_groups()


def run(task: Task) -> Answer:
    """Score all rows, then three optimizer steps on the same rows: one for its values, one under
    the meter, one for its time."""
    worker = TrainWorker(task.rank, task.world, task.store, task.spec)
    begun = time.monotonic()
    place = worker.build()["actor"]
    startup = time.monotonic() - begun
    undo = _function(task.tamper)(worker.actor) if task.tamper else None
    try:
        return _measured(task, worker, place, startup)
    finally:
        if undo is not None:
            undo()


def _measured(task: Task, worker: TrainWorker, place: Place, startup: float) -> Answer:
    backend = worker.actor
    chunk, plan = task.chunks[place.dp_rank], task.update[place.dp_rank]
    lr = task.spec.optim.lr
    states = _layers(task, backend, chunk, place) if task.layers else {}
    outputs = worker.compute_log_prob(chunk, task.forward[place.dp_rank], "actor", True)
    kept: dict[str, Any] = {}
    with _before_step(backend, lambda: _keep(kept, backend, task)):
        update = worker.update_actor(chunk, plan, lr)
    weights = _payload(backend.shards(), task, backend)
    meter = Meter({"parameters": _parameters(backend), "optimizer": _optimizer(backend)})
    backend.weights_changed()  # so that the step gathers weights itself
    with _before_step(backend, lambda: _know_gradients(meter, backend)), meter:
        worker.update_actor(chunk, plan, lr)
    spent = time.process_time()
    worker.update_actor(chunk, plan, lr)
    spent = time.process_time() - spent
    return Answer(
        place=place,
        outputs=outputs,
        update=update,
        gradients=kept["payload"],
        weights=weights,
        held={
            "parameters": size_of(_parameters(backend)),
            "gradients": kept["bytes"],
            "optimizer": size_of(_optimizer(backend)),
        },
        usage=meter.usage(),
        startup_s=startup,
        step_cpu_s=spent,
        layers=states,
        values=_value_step(task, backend, chunk, place) if task.values else None,
    )


def _value_step(task: Task, backend: Backend, chunk: DataProto, place: Place) -> ValueAnswer:
    (plan,) = task.update[place.dp_rank]
    return value_step(
        task.spec, chunk, task.forward[place.dp_rank], plan, optim=task.spec.optim, like=backend
    )


def _layers(task: Task, backend: Backend, chunk: DataProto, place: Place) -> States:
    rows = task.forward[place.dp_rank]
    micros = [micro_batch(chunk.batch, index, device=backend.device) for index in rows]
    return collect(backend, micros, temperature=float(chunk.meta_info["temperature"]))


@contextmanager
def _before_step(backend: Backend, look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` ahead of the optimizer's steps inside."""
    step = backend.optimizer_step

    def looking() -> float:
        look()
        return step()

    backend.optimizer_step = looking  # type: ignore[method-assign]  # this instance only
    try:
        yield
    finally:
        backend.optimizer_step = step  # type: ignore[method-assign]


def _keep(kept: dict[str, Any], backend: Backend, task: Task) -> None:
    gradients = backend.gradients()
    kept["bytes"] = size_of(gradient for gradient, _ in gradients.values())
    kept["payload"] = _payload(gradients, task, backend)


def _know_gradients(meter: Meter, backend: Backend) -> None:
    # Looking at gradients may gather them, which is not the layout's doing.
    with meter.paused():
        gradients = [gradient for gradient, _ in backend.gradients().values()]
    meter.know("gradients", gradients)


def _payload(found: Any, task: Task, backend: Backend) -> shards.ShardPayload:
    payload = shards.pack(
        found, rank=task.rank, world_size=task.world, version=0, aliases=backend.aliases
    )
    payload.arrays.update({name: array.copy() for name, array in payload.arrays.items()})
    return payload


def _parameters(backend: Backend) -> list[Tensor]:
    return [piece for piece, _ in backend.shards().values()]


def _optimizer(backend: Backend) -> list[Tensor]:
    kept = ("optim/", "main/")
    return [value for key, value in backend.state().items() if key.startswith(kept)]


def _function(place: str) -> Any:
    file, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None, place
    assert spec.loader is not None, place
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
