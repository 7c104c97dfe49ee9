"""Running micro-batches through the pipeline, whatever its schedule.

``get_forward_backward_func`` gives no pipelining, 1F1B or the interleaved schedule. All of them
take the whole list of micro-batches, ask the model for a forward of the next one, and ask the last
stage for a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from dataproto_audit.trainer.backends.base import Loss, MicroBatch, TokenOutputs
from dataproto_audit.trainer.backends.layers import compared_tokens, line_positions
from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.backends.megatron.modules import positions
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.backends.megatron.outputs import scores
from dataproto_audit.trainer.backends.megatron.rows import Aligned, align, line_up
from dataproto_audit.trainer.schedules import (
    Op,
    interleaved,
    one_forward_one_backward,
    pipeline_bubble,
)

Before = Callable[[int], None]


class Ran(NamedTuple):
    """One list of micro-batches: (micro-batch, chunk) of this rank's forwards in their order."""

    order: list[tuple[int, int]]
    micros: int
    trains: bool


def schedule_of(stages: int, chunks: int, micros: int, *, trains: bool) -> list[list[Op]]:
    """The order that megatron-core's schedules run in, forwards alone where nothing is trained."""
    if chunks > 1:
        made = interleaved(stages, micros, chunks=chunks)
    else:
        made = one_forward_one_backward(stages, micros)
    return [[op for op in ops if trains or not op.backward] for ops in made]


class Schedule:
    """Runs lists of micro-batches through ``modules``, this rank's chunks.

    ``packed`` lays rows on one line, ``fused`` leaves the logits out, ``values`` says that the
    model has a value head. ``notes`` collects what the
    probe of packed rows reads.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        options: MegatronOptions,
        *,
        vocabulary: int,
        packed: bool,
        fused: bool,
        values: bool = False,
    ) -> None:
        self._modules, self._options, self._vocabulary = list(modules), options, vocabulary
        self._packed, self._fused, self._values = packed, fused, values
        self._multiple = 2 * options.cp if options.cp > 1 else 1
        self._multiple *= options.tp if options.sp else 1
        self.notes: list[dict[str, Any]] = []
        self._ran: list[Ran] = []

    def bubble(self, stage: int) -> float | None:
        """See :meth:`Backend.bubble`: idle share of ``stage`` over the runs since the last call;
        None without a pipeline, or if forwards came in an order that the schedule does not have."""
        ran, self._ran = self._ran, []
        stages, chunks = self._options.pp, self._options.vpp or 1
        idle = units = 0.0
        for order, micros, trains in ran:
            made = schedule_of(stages, chunks, micros, trains=trains)
            if order != [(op.micro, op.chunk) for op in made[stage] if not op.backward]:
                return None
            share, work = pipeline_bubble(made)[stage], len(made[stage])
            idle, units = idle + work * share / (1 - share), units + work / (1 - share)
        return idle / units if units and stages > 1 else None

    def run(
        self,
        micros: Sequence[MicroBatch],
        *,
        loss: Loss | None,
        temperature: float,
        entropy: bool,
        before: Before,
    ) -> list[TokenOutputs]:
        """Outputs of every micro-batch, zeros on ranks outside of the last stage.

        Without ``loss`` there is no backward pass, and an interleaved pipeline is filled up with
        the last micro-batch to the number it takes.
        """
        lay = line_up if self._packed else align
        rows = [lay(micro, multiple=self._multiple) for micro in micros]
        self.notes += [aligned.note for aligned in rows if aligned.note is not None]
        count, stages = len(rows), self._options.pp
        if loss is None and self._options.vpp:
            rows += [rows[-1]] * (-len(rows) % stages)
        seen: dict[int, TokenOutputs] = {}
        order: list[tuple[int, int]] = []
        self._ran.append(Ran(order, len(rows), loss is not None))

        def score(position: int, head: Any, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            outputs = self._outputs(
                rows[position], hidden, head, temperature=temperature, entropy=entropy
            )
            share = hidden.new_zeros(()) if loss is None else loss(position, outputs)
            seen[position] = outputs.detach()
            # The schedule divides by the number of micro-batches, the gradient buffers by that
            # of the data-parallel ranks.
            scale = len(rows) * groups.get_data_parallel_world_size()
            return share * scale, {}

        def forward(todo: Iterator[int], module: Any) -> tuple[Tensor, Any]:
            position = next(todo)
            order.append((position, self._modules.index(module)))
            if module is self._modules[0] and position < count:
                before(position)
            aligned = rows[position]
            tokens = self._part(aligned.tokens_BS)
            hidden = module(tokens, None, None, packed_seq_params=_line(aligned))
            whole = getattr(module, "module", module)  # what wraps it for gradients
            return hidden, partial(score, position, whole)

        with shims.region():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(range(len(rows))) for _ in self._modules],
                model=self._modules,
                num_microbatches=len(rows),
                seq_length=max(aligned.tokens_BS.shape[1] for aligned in rows),
                micro_batch_size=len(rows[0].tokens_BS),
                forward_only=loss is None,
            )
        values = self._values
        return [seen.get(k) or _nothing(rows[k], entropy, values=values) for k in range(count)]

    def hidden_states(self, micro: MicroBatch, output_SBH: Tensor) -> Tensor:
        """See :meth:`Backend.hidden_states`; the sequence is put together over its ranks."""
        if self._options.sp:
            output_SBH = gather_from_sequence_parallel_region(output_SBH)
        if self._options.cp > 1:
            output_SBH = self._whole(output_SBH)
        if self._packed:
            return output_SBH[line_positions(micro), 0]
        rows, _, places = compared_tokens(micro.attention_mask_BT)
        return output_SBH[places, rows]

    def _part(self, tokens_BS: Tensor) -> Tensor:
        """This context-parallel rank's columns."""
        ranks = self._options.cp
        if ranks == 1:
            return tokens_BS
        width = tokens_BS.shape[1] // ranks
        here = positions(width, ranks, groups.get_context_parallel_rank(), tokens_BS.device)
        return tokens_BS[:, here]

    def _outputs(
        self, aligned: Aligned, hidden_SBH: Tensor, head: Any, *, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """Log-probs and entropies of the responses from the last stage's hidden states."""
        options = self._options
        values = head.value_head if self._values else None
        if options.sp:
            # Parts of the vocabulary give parts of the gradient; a value head gives the whole.
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_SBH, tensor_parallel_output_grad=values is None
            )
        hidden_BSH = hidden_SBH.transpose(0, 1)
        if values is not None:
            hidden_NH = hidden_BSH.flatten(0, 1)
            if options.cp == 1:
                given = values(hidden_NH[aligned.index_N])
            else:
                given = self._joined(values(hidden_NH).view(hidden_BSH.shape[:2]))[aligned.index_N]
            return TokenOutputs.of_values(aligned.spread(given))
        of = partial(
            scores,
            vocabulary=self._vocabulary,
            group=groups.get_tensor_model_parallel_group(),
            temperature=temperature,
            entropy=entropy,
            fused=self._fused,
            summed=options.sp,
        )
        weight = head.head_weight()
        if options.cp == 1:
            log_probs, spread = of(
                hidden_BSH.flatten(0, 1)[aligned.index_N], weight, aligned.labels_N
            )
        else:
            labels = self._part(aligned.labels_BS())
            log_probs, spread = of(hidden_BSH.flatten(0, 1), weight, labels.flatten())
            log_probs = self._joined(log_probs.view_as(labels))[aligned.index_N]
            if spread is not None:
                spread = self._joined(spread.view_as(labels))[aligned.index_N]
        return TokenOutputs(
            aligned.spread(log_probs), None if spread is None else aligned.spread(spread)
        )

    def _joined(self, part_BS: Tensor) -> Tensor:
        """Values of all columns in one line, of which each context-parallel rank holds a part."""
        return self._whole(part_BS.t().contiguous()).t().flatten()

    def _whole(self, part_S: Tensor) -> Tensor:
        """[S, ...] of all columns from the context-parallel ranks' parts, in the rows' order."""
        ranks, group = self._options.cp, groups.get_context_parallel_group()
        width = part_S.shape[0]
        every = [positions(width, ranks, rank, part_S.device) for rank in range(ranks)]
        return _join(part_S, group)[torch.cat(every).argsort()]


def _line(aligned: Aligned) -> PackedSeqParams | None:
    """Where rows on a line begin and end, for attention and rotary embeddings."""
    if aligned.lengths is None:
        return None
    lengths = torch.tensor((0, *aligned.lengths), dtype=torch.int32)
    ends = lengths.cumsum(0, dtype=torch.int32).to(aligned.tokens_BS.device)
    longest = max(aligned.lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _nothing(aligned: Aligned, entropy: bool, *, values: bool) -> TokenOutputs:
    zeros = torch.zeros(aligned.shape, device=aligned.tokens_BS.device)
    if values:
        return TokenOutputs.of_values(zeros)
    return TokenOutputs(zeros, zeros.clone() if entropy else None)


def _join(part: Tensor, group: Any) -> Tensor:
    whole: Tensor = _Join.apply(part, group)  # type: ignore[no-untyped-call]  # torch's
    return whole


class _Join(torch.autograd.Function):
    """Joins the ranks' parts along dimension 0. Every rank goes on to the same loss, so the
    gradient of a part is that rank's own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.size = group, part.shape[0]
        whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        start = ctx.group.rank() * ctx.size
        return grads[0][start : start + ctx.size].contiguous(), None
