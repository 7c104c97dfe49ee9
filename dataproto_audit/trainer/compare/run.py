"""Run layouts on one batch and compare each with the expected values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends import hf, shards
from dataproto_audit.trainer.backends.base import OptimSpec
from dataproto_audit.trainer.backends.device import training_device
from dataproto_audit.trainer.backends.fsdp_limits import check_layout, check_model
from dataproto_audit.trainer.compare.judge import (
    Values,
    differences,
    first_wrong,
    gradient_factor,
    not_judged,
    sizes_of,
    tolerances,
    wrong_gradients,
    wrong_values,
)
from dataproto_audit.trainer.compare.layers import LayerGap, Told, gaps
from dataproto_audit.trainer.compare.layouts import Layout
from dataproto_audit.trainer.compare.pool import Pool
from dataproto_audit.trainer.compare.rank import Answer, Task
from dataproto_audit.trainer.compare.words import in_words
from dataproto_audit.trainer.megatron import check_role
from dataproto_audit.trainer.plans import ForwardPlan, MicroBatching, plan_forward, plan_update
from dataproto_audit.trainer.weight_files import check_weights
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
        """The step in float32; with the states of layers if those are to be compared."""

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
    layers: list[LayerGap] = field(default_factory=list)

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
            **({"layers": [asdict(gap) for gap in self.layers]} if self.layers else {}),
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

    With the ``rows`` of the batch, also for one whose micro-batches cannot fill its pipeline. What
    is said is said in the words of layouts.
    """
    try:
        _check(layout, rows=rows)
    except UsageError as error:
        raise in_words(error, layout.name) from None


def _check(layout: Layout, *, rows: int | None) -> None:
    config = hf.model_config(layout.model)
    check_weights(Path(layout.model.path), config, exact=layout.strategy == "megatron")
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
    layers: bool = False,
) -> list[Compared]:
    """Each layout's step on ``batch`` against the expected one; ``told`` hears what is going on.

    The batch holds the fields of an update and ``meta_info`` temperature. Layouts share
    processes. Raises ``UsageError`` for a layout that :func:`check` refuses, before any starts; an
    error of one that runs is its result, and the others go on. ``layers`` compares the hidden
    states of every layer, too, which ``expected`` must hold then.
    """
    for layout in layouts:
        check(layout, rows=len(batch))
    pool.start(max(layout.world for layout in layouts))
    results = []
    judged: dict[str, Judged] = {}
    for layout in layouts:
        if layout.dtype not in judged:
            told(f"expected values, {layout.dtype}")
            judged[layout.dtype] = _bounds(expected, batch, layout.dtype)
        told(layout.name)
        try:
            with_values = judged[layout.dtype].values.token_values is not None
            answers = run_layout(batch, layout, pool, layers=layers, values=with_values)
            results.append(_compared(batch, layout, answers, judged[layout.dtype], layers=layers))
        except CodedError as error:
            bounds = judged[layout.dtype].bounds
            results.append(Compared(layout, {}, bounds, [str(error)]))
    return results


class Judged(NamedTuple):
    """What layouts of one precision are judged by."""

    values: Values
    noise: Values
    bounds: dict[str, float]
    blind: list[str]
    """Differences that these bounds say nothing about."""


def _compared(
    batch: DataProto, layout: Layout, answers: Sequence[Answer], judged: Judged, *, layers: bool
) -> Compared:
    ours, bounds = _values(batch, layout, answers), judged.bounds
    found = differences(ours, judged.values)
    wrong = wrong_values(found, bounds)
    gradients = wrong_gradients(ours, judged.values, bound=bounds["max_abs_grad_diff"])
    seen = _layers(batch, layout, answers, judged) if layers else []
    first = next((gap.name for gap in seen if not gap.agrees), "") if layers else None
    if first:
        wrong.append("layers")
    found |= {
        "first_wrong": first_wrong(wrong, layer=first, gradients=gradients),
        "wrong_gradients": gradients,
        "not_judged": judged.blind,
        "gradient_factor": gradient_factor(ours, judged.values) if gradients else None,
    }
    return Compared(layout, found, bounds, wrong, _ranks(answers), seen)


def _layers(
    batch: DataProto, layout: Layout, answers: Sequence[Answer], judged: Judged
) -> list[LayerGap]:
    forward: ForwardPlan = answers[0].notes["forward"]
    told = [
        Told(
            answer.place.rank,
            answer.place.dp_rank,
            forward.ranks[answer.place.dp_rank],
            answer.layers,
        )
        for answer in answers
    ]
    mask, parts = batch.batch["attention_mask"], layout.data_parallel
    return gaps(told, judged.values.layers, judged.noise.layers, mask, parts=parts)


def _bounds(expected: Expected, batch: DataProto, dtype: str) -> Judged:
    values, noise = expected.values(batch, dtype), expected.noise(batch, dtype)
    sizes = sizes_of(values)
    _refuse_not_finite(sizes)
    bounds = tolerances(
        differences(noise, values),
        largest_gradient=sizes["max_abs_grad_diff"],
        largest_value_gradient=sizes["max_abs_value_grad_diff"],
        largest={
            "log_prob": sizes["max_abs_logprob_diff"],
            "entropy": sizes["max_abs_entropy_diff"],
            "value": sizes.get("max_abs_value_diff", 0.0),
        },
    )
    return Judged(values, noise, bounds, not_judged(bounds, sizes))


def _refuse_not_finite(sizes: Mapping[str, float]) -> None:
    """Raise DPA852 for a model that gives NaN or infinity by itself: it would agree with any."""
    wrong = [name for name, size in sizes.items() if not math.isfinite(size)]
    if wrong:
        names = [name.removeprefix("max_abs_").removesuffix("_diff") for name in wrong]
        raise UsageError(
            "DPA852",
            f"the model itself gives NaN or infinity on these rows ({', '.join(names)}), so there "
            "is nothing to compare with.",
            "Look at its weights, at the temperature and at the rows.",
        )


def run_layout(
    batch: DataProto, layout: Layout, pool: Pool, *, layers: bool = False, values: bool = False
) -> list[Answer]:
    """The answers of the layout's ranks, in their order; ``layers`` with the states of layers,
    ``values`` with a value model's step."""
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
             layout.tamper, layers, values)
        for rank in range(layout.world)
    ]  # fmt: skip
    answers = pool.run(tasks)
    del store
    for answer in answers:
        answer.notes |= {"plan": update, "forward": forward}
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
    told = [answer.values for answer in answers]
    asked = [one for one in told if one is not None]
    start = dict(hf.build_model(layout.model).named_parameters())
    return Values(
        log_probs=outputs.batch["old_log_probs"],
        entropy=outputs.batch["entropys"],
        terms={name: float(losses[name]) for name in TERMS},
        gradients=shards.join([answer.gradients for answer in answers]),
        moved={name: after[name].float() - start[name].detach().float() for name in after},
        token_values=torch.cat([one.values for one in kept(asked, places)]) if asked else None,
        value_gradients=shards.join([one.gradients for one in asked]) if asked else {},
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
