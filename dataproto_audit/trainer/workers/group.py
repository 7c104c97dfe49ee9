"""The driver's side of the training ranks: one call here is one call on every rank.

A batch is cut in contiguous equal chunks over ranks and the answers are joined in rank order. The
first failure stops all ranks at once: a peer that waits in a collective would otherwise wait for
its time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import checkpoint
from dataproto_audit.trainer.backends.shards import add_checksums
from dataproto_audit.trainer.plans import MicroBatching, UpdatePlan, plan_forward, plan_update
from dataproto_audit.trainer.remedies import RESUME
from dataproto_audit.trainer.schedules import idle_shares
from dataproto_audit.trainer.workers import hang, placement
from dataproto_audit.trainer.workers.actor import TrainWorker
from dataproto_audit.trainer.workers.calls import CallFailed, gather
from dataproto_audit.trainer.workers.critic import VALUE_TERMS
from dataproto_audit.trainer.workers.dispatch import (
    Place,
    collect,
    dispatch,
    kept,
    merge_losses,
    spread,
    update_metrics,
    value_metrics,
)
from dataproto_audit.trainer.workers.failures import explain, hung
from dataproto_audit.trainer.workers.inputs import FORWARD_FIELDS
from dataproto_audit.trainer.workers.lengths import lengths_of, warmup_plan
from dataproto_audit.trainer.workers.spec import (
    CriticSpec,
    WorkerSpec,
    checkpoint_layout,
    lr_at,
    weight_decay_at,
)

LOCAL_TIMEOUT_S = 900.0
"""For calls without collectives (start, checkpoints): they leave no notes on the way."""
UPDATE_FIELDS = (*FORWARD_FIELDS, "response_mask", "old_log_probs", "advantages")
VALUE_FIELDS = (*FORWARD_FIELDS, "response_mask", "values", "returns")


@dataclass(frozen=True)
class Exported:
    """Checksums of the whole tensors exported last, and the CPU seconds that they cost."""

    checksums: dict[str, int]
    cpu_s: float


class WorkerGroup:
    """Training ranks on a running Ray cluster.

    Construction only starts the processes, so that other engines can start meanwhile;
    :meth:`build` waits for them. Every method blocks until all ranks are done and raises
    ``RunError`` DPA863 (a rank raised), DPA864 (a process died) or DPA866 (a collective was not
    finished in time), or the rank's own ``UsageError``; the group is stopped then.

    ``worker_class`` may be a subclass of :class:`TrainWorker`. ``pids`` are the processes of the
    ranks that run on this machine, known from :meth:`build` on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        world_size: int,
        worker_class: type[TrainWorker] = TrainWorker,
        gpus_per_worker: float | None = None,
    ) -> None:
        self.spec, self.world_size = spec, world_size
        self._call = 0
        self._stopped = False
        self._places: dict[str, list[Place]] = {}
        self.pids: list[int] = []
        host = placement.driver_address()
        self._store, port = hang.host_store(host)
        self._placed = placement.place(world_size, gpus_per_worker=gpus_per_worker)
        self._workers = [
            placement.start(
                worker_class, self._placed, rank, (rank, world_size, (host, port), spec)
            )
            for rank in range(world_size)
        ]

    # -- life ------------------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        """Wait for the processes, let ranks meet and build their models; settings in force."""
        about = self.call("start", "about", stall_s=LOCAL_TIMEOUT_S)
        self.pids = [answer["pid"] for answer in about if answer["host"] == placement.this_host()]
        self.take_places(self.call("build", "build", stall_s=LOCAL_TIMEOUT_S))
        return self.hparams()

    def take_places(self, answers: Sequence[dict[str, Place]]) -> None:
        """Remember each rank's part in batches, by role."""
        self._places = {role: [answer[role] for answer in answers] for role in answers[0]}

    @property
    def dp_size(self) -> int:
        """Number of chunks that a batch is cut into for the actor."""
        return self._places["actor"][0].dp_size

    def shutdown(self) -> None:
        """Stop the ranks and give their places back. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        placement.stop(self._workers, self._placed, self.pids)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- stages ----------------------------------------------------------------------------------

    def compute_log_prob(self, batch: DataProto, *, entropy: bool = True) -> DataProto:
        """``old_log_probs`` (and ``entropys``) f32[rows, response] of the actor.

        Reads input_ids, attention_mask, position_ids, responses and ``meta_info`` temperature.
        ``meta_info["ranks"]``: one dict a rank (rank, first_row, rows, tokens, micro_batches,
        indices, peak_token_sum, token_limit, bubble, cpu_s); indices are positions within the
        rank's rows.
        """
        return self._forward(batch, "old_log_prob", self.spec.log_prob_micro, "actor", entropy)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` f32[rows, response] of the frozen reference; else as above."""
        return self._forward(batch, "ref_log_prob", self.spec.ref_micro, "ref", False)

    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` f32[rows, response] of the critic; else as :meth:`compute_log_prob`."""
        return self._forward(batch, "values", self._critic.forward_micro, "critic")

    def plan_update(self, batch: DataProto, *, step: int, role: str = "actor") -> UpdatePlan:
        """The mini-batches that :meth:`update_actor` runs for update number ``step``, or
        :meth:`update_critic` as ``role`` says."""
        options = self.spec.update if role == "actor" else self._critic.update
        return plan_update(
            lengths_of(batch, "attention_mask"),
            lengths_of(batch, "response_mask"),
            ranks=self._places[role][0].dp_size,
            mini_batch_size=options.mini_batch_size or len(batch),
            width=int(batch.batch["responses"].shape[1]),
            micro=options.micro,
            epochs=options.epochs,
            shuffle=options.shuffle,
            seed=(options.seed, step),
        )

    def update_actor(
        self, batch: DataProto, *, step: int, plan: UpdatePlan | None = None
    ) -> DataProto:
        """Update the policy on ``batch``; ``step`` counts updates from 0.

        Reads the forward fields, response_mask, old_log_probs, advantages, and ref_log_prob
        where the KL loss is on. Returns rows in the order of ``batch``: ``update_log_probs``
        f32[rows, response] as computed in the row's mini-batch of the first epoch, before its
        optimizer step, ``update_entropys`` where the loss has an entropy term, and
        ``mini_batch`` i64[rows]. ``meta_info``: ``metrics`` (verl's names), ``losses`` (one dict
        a mini-batch: terms summed over ranks, normaliser) and ``ranks``.
        """
        plan = plan or self.plan_update(batch, step=step)
        loss, update = self.spec.loss, self.spec.update
        fields = (*UPDATE_FIELDS, *(("ref_log_prob",) if loss.use_kl_loss else ()))
        parts = dispatch(batch, fields=fields, meta=("temperature",), ranks=self.dp_size)
        rates = [at(self.spec.optim, update, step=step) for at in (lr_at, weight_decay_at)]
        args = [(part, minis, *rates) for part, minis in zip(parts, plan.ranks, strict=True)]
        answers = self._rows("update_actor", "update_actor", args, "actor")
        out = collect(answers)
        self._note_limit(out, update.micro)
        losses = merge_losses(answers, plan, mode=loss.loss_agg_mode)
        out.meta_info["losses"] = losses
        out.meta_info["metrics"] = update_metrics(
            losses, with_kl=loss.use_kl_loss, with_entropy=loss.entropy_coeff != 0.0
        )
        return out

    def update_critic(
        self, batch: DataProto, *, step: int, plan: UpdatePlan | None = None
    ) -> DataProto:
        """Update the critic on ``batch``; ``step`` counts its updates from 0.

        Reads the forward fields, response_mask, values and returns. Gives ``update_values``
        f32[rows, response] and ``value_mini_batch`` i64[rows] as :meth:`update_actor` gives
        log-probs and mini-batches; ``meta_info`` is of the same kind.
        """
        critic, ranks = self._critic, self._places["critic"][0].dp_size
        plan = plan or self.plan_update(batch, step=step, role="critic")
        parts = dispatch(batch, fields=VALUE_FIELDS, meta=(), ranks=ranks)
        rates = [at(critic.optim, critic.update, step=step) for at in (lr_at, weight_decay_at)]
        args = [(part, minis, *rates) for part, minis in zip(parts, plan.ranks, strict=True)]
        answers = self._rows("update_critic", "update_critic", args, "critic")
        out = collect(answers)
        self._note_limit(out, critic.update.micro)
        losses = merge_losses(answers, plan, mode=critic.loss.loss_agg_mode, terms=VALUE_TERMS)
        out.meta_info["losses"] = [{**entry, **asdict(critic.loss)} for entry in losses]
        out.meta_info["metrics"] = value_metrics(losses)
        return out

    def warmup(self, batch: DataProto, *, steps: int, lr: float) -> list[float]:
        """``steps`` supervised steps before RL, each on the next ``len(batch) / steps`` rows.

        Reads the forward fields and response_mask. Afterwards the reference holds the warmed-up
        weights and the optimizer starts afresh. Returns the loss of each step.
        """
        if not steps:
            return []
        stages = self.spec.megatron.pp if self.spec.strategy == "megatron" else 1
        micro = MicroBatching(divisible_by=stages)
        batch, plan = warmup_plan(batch, steps=steps, ranks=self.dp_size, micro=micro)
        fields = (*FORWARD_FIELDS, "response_mask")
        parts = dispatch(batch, fields=fields, meta=(), ranks=self.dp_size)
        args = [
            (part, mini_batches, lr) for part, mini_batches in zip(parts, plan.ranks, strict=True)
        ]
        shares = self._rows("warmup", "warmup", args, "actor")
        return [float(sum(values)) for values in zip(*shares, strict=True)]

    # -- weights ---------------------------------------------------------------------------------

    def export_weights(self, *, checksums: bool = False) -> list[Any]:
        """One object reference a rank, to a ``ShardPayload``; weights do not pass the driver.

        Give them to the receiver as top-level arguments; ``shards.join`` makes whole tensors.
        With ``checksums`` the ranks add those up on the way: :attr:`exported`.
        """
        self._call += 1
        pairs = [
            worker.execute.options(num_returns=2).remote(
                self._call, "sync_weights", "export_weights", checksums
            )
            for worker in self._alive()
        ]
        notes = self._gather("sync_weights", [answer for answer, _ in pairs])
        if checksums:
            total = add_checksums([note["checksums"] for note in notes])
            self.exported = Exported(total, sum(note["checksum_cpu_s"] for note in notes))
        return [payload for _, payload in pairs]

    def weights_checksum(self, *, role: str = "actor") -> dict[str, int]:
        """Checksum of every whole tensor, comparable with ``shards.checksum``."""
        return add_checksums(self.call("weights_checksum", "weights_checksum", [(role,)]))

    def save_checkpoint(
        self, folder: str | Path, *, step: int, extra: dict[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint into ``folder``; ``extra`` (plain data) comes back on loading."""
        folder = Path(folder).absolute()
        checkpoint.begin(folder)
        files = self.call(
            "save_checkpoint", "save_checkpoint", [(str(folder),)], stall_s=LOCAL_TIMEOUT_S
        )
        return checkpoint.write_index(
            folder, files, step=step, layout=checkpoint_layout(self.spec), extra=extra or {}
        )

    def load_checkpoint(self, folder: str | Path) -> checkpoint.Index:
        """Continue from ``folder``; a checkpoint of another layout or number of ranks is cut anew.

        Raises DPA804 if it is incomplete or does not fit the model.
        """
        folder = Path(folder).absolute()
        index = checkpoint.read_index(folder)
        method = "load_checkpoint"
        args: list[tuple[Any, ...]] = [(str(folder), file) for file in index.files]
        if not index.fits(world_size=self.world_size, layout=checkpoint_layout(self.spec)):
            method, args = "load_resharded", [(str(folder), index.files, index.layout)]
        self.call("load_checkpoint", method, args, stall_s=LOCAL_TIMEOUT_S)
        return index

    def hparams(self) -> dict[str, Any]:
        """Settings that the ranks compute with (of rank 0), and the number of parameters."""
        answers = self.call("hparams", "hparams")
        sizes = {name: size for answer in answers for name, size in answer["parameters"].items()}
        return {**answers[0], "parameters": sum(sizes.values())}

    # -- calls -----------------------------------------------------------------------------------

    def call(
        self,
        stage: str,
        method: str,
        args: Sequence[tuple[Any, ...]] = ((),),
        *,
        stall_s: float | None = None,
    ) -> list[Any]:
        """Run ``method`` on every rank; answers in rank order.

        ``args`` holds one tuple a rank, or a single one for all. ``stall_s`` seconds without a
        note of any rank count as a hang (default: a margin over the collective time-out).
        """
        self._call += 1
        args = args if len(args) == self.world_size else [args[0]] * self.world_size
        refs = [
            worker.execute.remote(self._call, stage, method, *args[rank])
            for rank, worker in enumerate(self._alive())
        ]
        return self._gather(stage, refs, stall_s=stall_s)

    def notes(self) -> list[hang.Note | None]:
        """Where each rank is; readable while a call runs."""
        return hang.read_notes(self._store, world_size=self.world_size)

    def _gather(self, stage: str, refs: list[Any], *, stall_s: float | None = None) -> list[Any]:
        timeout_s = self.spec.collective_timeout_s
        if stall_s is None:  # on GPUs the driver is to be first, see join_process_group
            stall_s = timeout_s if self._placed.gpus else 1.5 * timeout_s + 10.0
        try:
            return gather(refs, notes=self.notes, stall_s=stall_s)
        except CallFailed as failed:
            notes, call = self.notes(), self._call
            self.shutdown()
            about: dict[str, Any] = {"stage": stage, "call": call, "notes": notes}
            if failed.failures:
                raise explain(failed.failures, timeout_s=timeout_s, **about) from None
            raise hung(timeout_s=stall_s, **about) from None
        except BaseException:
            self.shutdown()
            raise

    def _alive(self) -> list[Any]:
        if self._stopped:
            raise RunError("DPA864", "the training ranks have been stopped.", RESUME)
        return self._workers

    @property
    def _critic(self) -> CriticSpec:
        if self.spec.critic is None:
            raise UsageError("DPA851", "there is no critic.", "Set algorithm.adv_estimator=gae.")
        return self.spec.critic

    def _forward(
        self, batch: DataProto, stage: str, micro: MicroBatching, role: str, *how: Any
    ) -> DataProto:
        """A pass of ``role`` without gradients; ``how`` is what its method takes besides."""
        ranks = self._places[role][0].dp_size
        plan = plan_forward(lengths_of(batch, "attention_mask"), ranks=ranks, micro=micro)
        parts = dispatch(batch, fields=FORWARD_FIELDS, meta=("temperature",), ranks=ranks)
        method, rest = ("compute_log_prob", (role, *how)) if how else ("compute_values", ())
        args = [
            (part, micro_batches, *rest)
            for part, micro_batches in zip(parts, plan.ranks, strict=True)
        ]
        out = collect(self._rows(stage, method, args, role))
        self._note_limit(out, micro)
        return out

    @staticmethod
    def _note_limit(out: DataProto, micro: MicroBatching) -> None:
        """Tell with each rank's notes the token limit that its micro-batches were cut by, and for
        which share of the time it waits, where its engine did not tell."""
        notes = out.meta_info["ranks"]
        shares = idle_shares([len(note["micro_batches"]) for note in notes])
        for note, share in zip(notes, shares, strict=True):
            note["token_limit"] = micro.max_tokens or None
            note.setdefault("bubble", share)

    def _rows(
        self, stage: str, method: str, chunks: Sequence[tuple[Any, ...]], role: str
    ) -> list[Any]:
        """A call on rows: ``chunks`` to the ranks they belong to, answers in the rows' order."""
        places = self._places[role]
        return kept(self.call(stage, method, spread(chunks, places)), places)
