"""One training rank: actor and, if asked for, a frozen reference and a critic, in one process.

Methods take and return batches; the driver's group cuts and joins them. Nothing here asks a peer
for counts: plans come with the call. Errors are raised as they are; the group stops the peers.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import shards as pieces
from dataproto_audit.trainer.backends.base import VALUE_HEAD, Backend, OptimSpec
from dataproto_audit.trainer.backends.checkpoint import RankFile, read_rank_file, write_rank_file
from dataproto_audit.trainer.backends.device import join_process_group
from dataproto_audit.trainer.backends.shards import ShardPayload
from dataproto_audit.trainer.batching import Index
from dataproto_audit.trainer.plans import MiniBatchPlan
from dataproto_audit.trainer.workers import critic, hang
from dataproto_audit.trainer.workers.dispatch import Place
from dataproto_audit.trainer.workers.engines import make_backend
from dataproto_audit.trainer.workers.inputs import micro_batch, scatter, token_counts
from dataproto_audit.trainer.workers.reshard import read_files, under, whole_of_role
from dataproto_audit.trainer.workers.spec import WorkerSpec, roles_of, strategy_of
from dataproto_audit.trainer.workers.update import (
    MiniBatchResult,
    train_mini_batch,
    train_supervised,
)

Note = dict[str, Any]


class TrainWorker:
    """A rank. Construction imports and connects to the driver; :meth:`build` needs peers."""

    imports: tuple[str, ...] = ("transformers",)
    """The slow part of start-up, done before any peer waits for this rank."""

    def __init__(
        self, rank: int, world_size: int, store: tuple[str, int], spec: WorkerSpec
    ) -> None:
        self.rank, self.world_size, self.spec = rank, world_size, spec
        self._store = hang.join_store(*store)
        self._notebook = hang.Notebook(self._store, rank=rank)
        self._version = 0
        self._reference_moved = False
        self.actor: Backend
        self.reference: Backend | None = None
        self.critic: Backend | None = None
        for module in self.imports:
            importlib.import_module(module)
        if "megatron" in {strategy_of(spec, role) for role in roles_of(spec)}:
            importlib.import_module("dataproto_audit.trainer.backends.megatron.backend")

    def execute(self, call: int, stage: str, method: str, *args: Any) -> Any:
        """Run one of the methods below, between two notes. ``call`` numbers the driver's calls."""
        self._notebook.begin(call, stage)
        result = getattr(self, method)(*args)
        self._notebook.end()
        return result

    def about(self) -> dict[str, Any]:
        """Who this is: rank, process, node."""
        return {"rank": self.rank, "pid": os.getpid(), "host": os.uname().nodename}

    def build(self) -> dict[str, Place]:
        """Meet the peers and build the models. Returns this rank's part in batches, by role."""
        device = join_process_group(
            self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self.spec.collective_timeout_s,
        )
        torch.manual_seed(self.spec.seed + self.rank)
        self.actor = make_backend(self.spec, device=device, optim=self.spec.optim)
        if self.spec.with_reference:
            self.reference = make_backend(self.spec, device=device, optim=None, role="ref")
        if self.spec.critic is not None:
            optim = self.spec.critic.optim
            self.critic = make_backend(self.spec, device=device, optim=optim, role="critic")
        return self.places()

    def places(self) -> dict[str, Place]:
        """This rank's part in batches, by role."""
        held = {"ref": self.reference, "critic": self.critic}
        engines = {"actor": self.actor, **{role: held[role] or self.actor for role in held}}
        return {
            role: Place(self.rank, engine.dp_rank, engine.dp_size, engine.collects)
            for role, engine in engines.items()
        }

    def hparams(self) -> dict[str, Any]:
        """Settings this rank computes with."""
        optim, loss = self.spec.optim, self.spec.loss
        return {
            "device": str(self.actor.device),
            "strategy": self.spec.strategy,
            "world_size": self.world_size,
            "threads": torch.get_num_threads(),
            "parameters": {name: _numel(spec) for name, (_, spec) in self.actor.shards().items()},
            "optim": {key: getattr(optim, key) for key in optim.__dataclass_fields__},
            "loss": {key: getattr(loss, key) for key in loss.__dataclass_fields__},
        }

    def compute_log_prob(
        self, data: DataProto, micro_batches: Sequence[Index], role: str, entropy: bool
    ) -> DataProto:
        """Log-probs of all rows by ``role`` (``actor`` or ``ref``), in the order of the rows.

        ``meta_info`` must hold ``temperature``. Returns ``old_log_probs`` or ``ref_log_prob``
        f32[rows, response], ``entropys`` if asked for, and this rank's note.
        """
        started = time.process_time()
        backend = self._engine(role)
        micros = [micro_batch(data.batch, rows, device=backend.device) for rows in micro_batches]
        outputs = backend.infer(
            micros,
            temperature=float(data.meta_info["temperature"]),
            entropy=entropy,
            before=lambda k: self._notebook.micro_batch(0, k, len(micros)),
        )
        rows, width = data.batch["responses"].shape
        tensors = {"old_log_probs" if role == "actor" else "ref_log_prob": torch.zeros(rows, width)}
        scatter(next(iter(tensors.values())), micro_batches, [out.log_probs_BR for out in outputs])
        if entropy:
            tensors["entropys"] = torch.zeros(rows, width)
            scatter(tensors["entropys"], micro_batches, [out.entropy_BR for out in outputs])
        note = self._note(data, [index.tolist() for index in micro_batches], started, backend)
        return DataProto.from_dict(tensors, meta_info={"rank": note})

    def update_actor(
        self,
        data: DataProto,
        plan: Sequence[MiniBatchPlan],
        lr: float,
        weight_decay: float | None = None,
    ) -> DataProto:
        """Run the mini-batches of ``plan`` in order, one optimizer step each, at rate ``lr``; at
        the optimizer's weight decay, or the given one.

        Returns per row ``update_log_probs`` and ``mini_batch`` (and ``update_entropys`` where
        the loss has an entropy term), all of the first epoch; in ``meta_info`` this rank's note
        and, for each mini-batch, its shares of the loss terms.
        """
        started = time.process_time()
        self.actor.set_rates(lr, weight_decay)
        rows, width = data.batch["responses"].shape
        tensors = {
            "update_log_probs": torch.zeros(rows, width),
            "mini_batch": torch.zeros(rows, dtype=torch.int64),
        }
        if self.spec.loss.entropy_coeff:
            tensors["update_entropys"] = torch.zeros(rows, width)
        steps: list[dict[str, Any]] = []
        micro_batches: list[list[int]] = []
        for mini in plan:
            result = train_mini_batch(
                self.actor,
                data.batch,
                mini,
                options=self.spec.loss,
                temperature=float(data.meta_info["temperature"]),
                before=lambda k, mini=mini: self._notebook.micro_batch(  # type: ignore[misc]  # bound now
                    mini.index, k, len(mini.micro_batches)
                ),
            )
            self._version += result.stepped
            micro_batches += [index.tolist() for index in mini.micro_batches]
            steps.append({"sums": result.sums, "grad_norm": result.grad_norm, "lr": lr})
            if mini.epoch == 0:
                _fill(tensors, mini, result)
        note = self._note(data, micro_batches, started, self.actor)
        note["mini_batches"] = [mini.index for mini in plan for _ in mini.micro_batches]
        return DataProto.from_dict(tensors, meta_info={"rank": note, "steps": steps})

    def compute_values(self, data: DataProto, micro_batches: Sequence[Index]) -> DataProto:
        """``values`` f32[rows, response] of all rows by the critic, and this rank's note."""
        started, backend = time.process_time(), self._valuing()
        count = len(micro_batches)
        values = critic.compute_values(
            backend,
            data.batch,
            micro_batches,
            before=lambda k: self._notebook.micro_batch(0, k, count),
        )
        note = self._note(data, [index.tolist() for index in micro_batches], started, backend)
        return DataProto.from_dict({"values": values}, meta_info={"rank": note})

    def update_critic(
        self,
        data: DataProto,
        plan: Sequence[MiniBatchPlan],
        lr: float,
        weight_decay: float | None = None,
    ) -> DataProto:
        """As :meth:`update_actor`, for the critic: per row what :func:`.critic.update_values`
        gives, and in ``meta_info`` this rank's note and shares of the value loss."""
        started, backend = time.process_time(), self._valuing()
        backend.set_rates(lr, weight_decay)
        assert self.spec.critic is not None, "whoever holds a critic has its spec"
        options, tell = self.spec.critic.loss, self._notebook.micro_batch
        tensors, steps = critic.update_values(
            backend, data.batch, plan, options=options, before=tell
        )
        micros = [(mini.index, index.tolist()) for mini in plan for index in mini.micro_batches]
        note = self._note(data, [rows for _, rows in micros], started, backend)
        note["mini_batches"] = [number for number, _ in micros]
        steps = [{**step, "lr": lr} for step in steps]
        return DataProto.from_dict(tensors, meta_info={"rank": note, "steps": steps})

    def warmup(self, data: DataProto, plan: Sequence[MiniBatchPlan], lr: float) -> list[float]:
        """Supervised steps with a fresh AdamW at ``lr``; then the reference takes the weights, the
        critic all but its head, and the optimizer starts over. Returns this rank's share of the
        loss of each step."""
        self.actor.reset_optimizer(OptimSpec(lr=lr, weight_decay=0.0, grad_clip=0.0))
        shares = []
        for mini in plan:
            shares.append(
                train_supervised(
                    self.actor,
                    data.batch,
                    mini,
                    before=lambda k, mini=mini: self._notebook.micro_batch(  # type: ignore[misc]  # bound now
                        mini.index, k, len(mini.micro_batches)
                    ),
                )
            )
        self.actor.reset_optimizer(self.spec.optim)
        self._version += len(plan)
        if self.reference is not None:
            self.reference.copy_weights(self.actor)
            self._reference_moved = True
        if self.critic is not None:
            self.critic.copy_weights(self.actor, but=VALUE_HEAD)
        return shares

    def export_weights(self, checksums: bool = False) -> tuple[dict[str, Any], ShardPayload]:
        """This rank's pieces of the actor's weights, without a collective.

        The note beside them holds their checksums if asked for, and what those cost.
        """
        payload = self._payload(self.actor)
        size = sum(array.nbytes for array in payload.arrays.values())
        started = time.process_time()
        sums = pieces.payload_checksums(payload) if checksums else {}
        spent = time.process_time() - started
        note = {"rank": self.rank, "version": self._version, "bytes": size}
        return {**note, "checksums": sums, "checksum_cpu_s": spent}, payload

    def weights_checksum(self, role: str) -> dict[str, int]:
        """Checksums of this rank's pieces."""
        return pieces.payload_checksums(self._payload(self._engine(role)))

    def _payload(self, backend: Backend) -> pieces.ShardPayload:
        return pieces.pack(
            backend.shards(),
            rank=self.rank,
            world_size=self.world_size,
            version=self._version,
            aliases=backend.aliases,
        )

    def save_checkpoint(self, folder: str) -> RankFile:
        """Write what the next step depends on: weights and optimizer of actor and critic, random
        state, and the reference where it is not the model folder's."""
        tensors = {f"actor/{key}": value for key, value in self.actor.state().items()}
        if self.reference is not None and self._reference_moved:
            state = self.reference.state()
            tensors |= {f"ref/{key}": value for key, value in state.items()}
        if self.critic is not None:
            tensors |= {f"critic/{key}": value for key, value in self.critic.state().items()}
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.actor.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state()
        tensors["version"] = torch.tensor(self._version)
        return write_rank_file(Path(folder), rank=self.rank, tensors=tensors)

    def load_checkpoint(self, folder: str, entry: RankFile) -> int:
        """Take back what :meth:`save_checkpoint` wrote; returns the weights' version."""
        tensors = read_rank_file(Path(folder), entry)
        self.actor.load_state(under("actor/", tensors))
        reference = under("ref/", tensors)
        if self.reference is not None and reference:
            self.reference.load_state(reference)
            self._reference_moved = True
        if self.critic is not None:
            self.critic.load_state(under("critic/", tensors))
        return self._take_rest(tensors)

    def load_resharded(
        self, folder: str, entries: Sequence[RankFile], layout: dict[str, Any]
    ) -> int:
        """Take what ranks of another layout wrote; returns the weights' version.

        Weights and moments are exact; the random state is that of one of the old ranks.
        """
        files, model = read_files(Path(folder), entries), Path(self.spec.model.path)
        held = (("actor", self.actor), ("ref", self.reference), ("critic", self.critic))
        for role, backend in held:
            whole = whole_of_role(files, role, layout, model=model) if backend else None
            if backend is None or (whole is None and role == "ref"):
                continue  # a reference that was not kept is the model folder's
            if whole is None:
                raise UsageError(
                    "DPA804", f"{folder} holds no {role}.", "Resume it as it was configured."
                )
            backend.load_state(backend.state_from(whole))
            self._reference_moved |= role == "ref"
        return self._take_rest(files[self.rank % len(files)])

    def _take_rest(self, tensors: dict[str, torch.Tensor]) -> int:
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self.actor.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/cuda"])
        self._version = int(tensors["version"])
        return self._version

    def _engine(self, role: str) -> Backend:
        if role == "actor":
            return self.actor
        return self._valuing() if role == "critic" else self._frozen()

    def _frozen(self) -> Backend:
        if self.reference is None:
            raise UsageError(
                "DPA851",
                "reference log-probs were asked for, but there is no reference model.",
                "Set actor.use_kl_loss=true.",
            )
        return self.reference

    def _valuing(self) -> Backend:
        if self.critic is None:
            raise UsageError(
                "DPA851", "values were asked for, but there is no critic.",
                "Set algorithm.adv_estimator=gae.",
            )  # fmt: skip
        return self.critic

    def _note(
        self,
        data: DataProto,
        micro_batches: list[list[int]],
        started: float,
        backend: Backend,
    ) -> Note:
        """What this rank did in a call: its rows, and what its micro-batches really held."""
        counts = token_counts(data.batch)
        sums = [int(counts[rows].sum()) for rows in micro_batches]
        packed = [
            {"micro_batch": number, **note}
            for number, note in enumerate(backend.packed_notes()[-len(sums) :])
        ]
        bubble = backend.bubble()
        return {
            "rank": self.rank,
            "rows": len(data),
            "tokens": int(counts.sum()),
            "micro_batches": sums,
            "indices": micro_batches,
            "peak_token_sum": max(sums, default=0),
            "cpu_s": time.process_time() - started,
            **({"packed": packed} if packed else {}),
            **({} if bubble is None else {"bubble": bubble}),
        }


def _fill(tensors: dict[str, torch.Tensor], mini: MiniBatchPlan, result: MiniBatchResult) -> None:
    outputs = result.outputs
    scatter(tensors["update_log_probs"], mini.micro_batches, [out.log_probs_BR for out in outputs])
    tensors["mini_batch"][torch.from_numpy(mini.rows)] = mini.index
    if "update_entropys" in tensors:
        scatter(tensors["update_entropys"], mini.micro_batches, [out.entropy_BR for out in outputs])


def _numel(spec: pieces.ShardSpec) -> int:
    return int(torch.Size(spec.shape).numel())
