"""Run layouts on one batch and compare each with the expected values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dataproto_audit.codes import CodedError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import hf, shards
from dataproto_audit.trainer.backends.base import OptimSpec
from dataproto_audit.trainer.backends.device import training_device
from dataproto_audit.trainer.backends.fsdp_limits import check_layout, check_model
from dataproto_audit.trainer.compare.judge import Values, differences, tolerances, wrong_values
from dataproto_audit.trainer.compare.layouts import Layout
from dataproto_audit.trainer.compare.pool import Pool
from dataproto_audit.trainer.compare.rank import Answer, Task
from dataproto_audit.trainer.megatron import check_role
from dataproto_audit.trainer.plans import MicroBatching, plan_forward, plan_update
from dataproto_audit.trainer.workers import hang
from dataproto_audit.trainer.workers.dispatch import collect, kept, merge_losses
from dataproto_audit.trainer.workers.spec import LossOptions, UpdateOptions, WorkerSpec

HERE = "127.0.0.1"
TIMEOUT_S = 300.0
"""Of collectives: ranks wait for peers that still import."""
OPTIM = OptimSpec(lr=1e-3, weight_decay=0.0, grad_clip=1e9)
LOSS = LossOptions(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
TERMS = ("pg_loss", "kl_loss", "entropy_loss", "total")


class Expected(Protocol):
    """Where the expected values come from: the same step, computed by something else."""

    def values(self, batch: DataProto, dtype: str) -> Values:
        """The step in float32."""

    def noise(self, batch: DataProto, dtype: str) -> Values:
        """The same, computed another way: other micro-batches and kernels, or ``dtype``."""


@dataclass
class Compared:
    """One layout's result. ``wrong`` names what is beyond its tolerance, or holds the reason why
    the layout could not run."""

    layout: Layout
    found: dict[str, Any]
    bounds: dict[str, float]
    wrong: list[str]
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether every value is within its tolerance."""
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        """The layout's entry of the JSON answer; without figures if it could not run."""
        verdict = {"name": self.layout.name, "agree": self.agree, "wrong": self.wrong}
        if not self.ranks:
            return {**verdict, "ranks": []}
        most = max(self.ranks, key=lambda rank: int(rank["peak_bytes"]))
        return {
            **verdict,
            **self.found,
            "tolerance": self.bounds,
            "peak_bytes": most["peak_bytes"],
            "comm_bytes": max(sum(rank["comm_bytes"].values()) for rank in self.ranks),
            "startup_s": max(rank["startup_s"] for rank in self.ranks),
            "step_cpu_s": sum(rank["step_cpu_s"] for rank in self.ranks),
            "micro_batches": most["micro_batches"],
            "ranks": self.ranks,
        }


def check(layout: Layout, *, rows: int | None = None) -> None:
    """Raise a ``UsageError`` for a layout that cannot hold its model, before anything starts.

    With the ``rows`` of the batch, also for one whose micro-batches cannot fill its pipeline.
    """
    config = hf.model_config(layout.model)
    if layout.strategy == "megatron":
        from dataproto_audit.trainer.backends.megatron import layout as megatron

        megatron.check_layout(
            layout.megatron, config, world_size=layout.world, dtype=layout.model.dtype
        )
        a_rank = None if rows is None else rows // layout.data_parallel
        check_role(_spec(layout), "actor", rows=a_rank)
        return
    device = training_device().type
    check_layout(layout.model, layout.fsdp, world_size=layout.world, device=device)
    check_model(layout.model, layout.fsdp, config)


def compare(
    batch: DataProto,
    layouts: Sequence[Layout],
    *,
    expected: Expected,
    pool: Pool,
    told: Callable[[str], None] = lambda _: None,
) -> list[Compared]:
    """Each layout's step on ``batch`` against the expected one; ``told`` hears what is going on.

    The batch holds the fields of an update and ``meta_info`` temperature. Layouts of one engine
    share processes; Megatron keeps state in the process, so each of its layouts gets new ones.
    Raises ``UsageError`` for a layout that :func:`check` refuses, before any starts; an error of
    one that runs is its result, and the others go on.
    """
    for layout in layouts:
        check(layout, rows=len(batch))
    together = [layout.world for layout in layouts if layout.strategy != "megatron"]
    if together and layouts[0].strategy != "megatron":
        pool.start(max(together))
    results = []
    judged: dict[str, tuple[Values, dict[str, float]]] = {}
    for layout in layouts:
        if layout.dtype not in judged:
            told(f"expected values, {layout.dtype}")
            judged[layout.dtype] = _bounds(expected, batch, layout.dtype)
        values, bounds = judged[layout.dtype]
        told(layout.name)
        if layout.strategy == "megatron":
            pool.close()
        try:
            answers = run_layout(batch, layout, pool)
            found = differences(_values(batch, layout, answers), values)
        except CodedError as error:
            results.append(Compared(layout, {}, bounds, [str(error)]))
            continue
        finally:
            if layout.strategy == "megatron":
                pool.close()
        results.append(
            Compared(layout, found, bounds, wrong_values(found, bounds), _ranks(answers))
        )
    return results


def _bounds(expected: Expected, batch: DataProto, dtype: str) -> tuple[Values, dict[str, float]]:
    values = expected.values(batch, dtype)
    noise = differences(expected.noise(batch, dtype), values)
    largest = max(float(grad.abs().max()) for grad in values.gradients.values())
    return values, tolerances(noise, largest_gradient=largest)


def run_layout(batch: DataProto, layout: Layout, pool: Pool) -> list[Answer]:
    """The answers of the layout's ranks, in their order."""
    lengths, trained = (
        batch.batch[name].sum(-1).numpy().astype(np.int64)
        for name in ("attention_mask", "response_mask")
    )
    parts = layout.data_parallel
    forward = plan_forward(lengths, ranks=parts, micro=replace(layout.micro, divisible_by=1))
    update = plan_update(
        lengths, trained, ranks=parts, mini_batch_size=len(batch), shuffle=False,
        width=int(batch.batch["responses"].shape[1]), micro=layout.micro,
    )  # fmt: skip
    spec = _spec(layout)
    store, port = hang.host_store(HERE)
    chunks = batch.chunk(parts)
    tasks = [
        Task(rank, layout.world, (HERE, port), spec, chunks, forward.ranks, update.ranks,
             layout.tamper)
        for rank in range(layout.world)
    ]  # fmt: skip
    answers = pool.run(tasks)
    del store
    for answer in answers:
        answer.notes["plan"] = update
    return answers


def _spec(layout: Layout) -> WorkerSpec:
    return WorkerSpec(
        model=layout.model,
        optim=OPTIM,
        loss=LOSS,
        update=UpdateOptions(micro=layout.micro),
        log_prob_micro=MicroBatching(),
        fsdp=layout.fsdp,
        megatron=layout.megatron,
        strategy=layout.strategy,
        with_reference=False,
        collective_timeout_s=TIMEOUT_S,
    )


def _values(batch: DataProto, layout: Layout, answers: Sequence[Answer]) -> Values:
    places = [answer.place for answer in answers]
    outputs = collect(kept([answer.outputs for answer in answers], places))
    updates = kept([answer.update for answer in answers], places)
    (losses,) = merge_losses(updates, answers[0].notes["plan"], mode=LOSS.loss_agg_mode)
    after = shards.join([answer.weights for answer in answers])
    start = dict(hf.build_model(layout.model).named_parameters())
    return Values(
        log_probs=outputs.batch["old_log_probs"],
        entropy=outputs.batch["entropys"],
        terms={name: float(losses[name]) for name in TERMS},
        gradients=shards.join([answer.gradients for answer in answers]),
        moved={name: after[name].float() - start[name].detach().float() for name in after},
    )


def _ranks(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """What each rank held and sent."""
    out = []
    for answer in answers:
        note = answer.update.meta_info["rank"]
        out.append({
            "rank": answer.place.rank,
            "tokens": note["tokens"],
            "micro_batches": len(note["micro_batches"]),
            "peak_token_sum": note["peak_token_sum"],
            "held_bytes": answer.held,
            "peak_bytes": answer.usage.peak_bytes,
            "peak_by_kind": answer.usage.peak,
            "comm_calls": answer.usage.calls,
            "comm_bytes": answer.usage.sent,
            "startup_s": answer.startup_s,
            "step_cpu_s": answer.step_cpu_s,
        })  # fmt: skip
    return out
