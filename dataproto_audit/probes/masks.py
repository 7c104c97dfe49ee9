"""Masks, padding and stop tokens (DPA201, DPA202, DPA205, DPA206, DPA208).

Shapes: B rows, P prompt columns, R response columns, T = P + R. None of these checks looks at
text, at multimodal position ids, or at whether a tool reply was tokenised as the engine saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit import fast
from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, filling_rows
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, any_of, per_row, some

AT = ("rollout", "validation")


def _end(on: Any) -> Any:
    """Columns of ``on [B,W]`` up to the last True of each row, holes counted; 0 without any."""
    if not on.shape[1]:
        return np.zeros(len(on), np.int64)
    last = on[:, ::-1].argmax(1)
    return np.where(on[np.arange(len(on)), -1 - last], on.shape[1] - last, 0)


RESPONSE_END = per_row("response_end", ATTENDED, lambda block: _end(block.response_attention))
"""Columns up to the last attended response token of each row."""


def _not_binary(mask: Any) -> Any:
    if mask.dtype.kind == "b":
        return np.zeros(mask.shape, bool)
    return (mask != 0) & (mask != 1)


def _binary(name: str) -> Any:
    def compute(block: Block) -> bool:
        mask = block[name] if name in block.view else block.attention
        if mask.dtype.kind in "iu":
            if (compiled := fast.loops(mask.size)) is not None:
                return bool(compiled.beyond_bits(mask, mask.dtype.type(1)))
            return some(mask & ~mask.dtype.type(1))
        return some(_not_binary(mask))

    return any_of(f"not_binary:{name}", (name,), compute)


@probe(
    "DPA201",
    stages=AT,
    needs=("attention_mask", "response_mask"),
    stats=(_binary("attention_mask"), _binary("response_mask")),
)
def mask_values(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """attention_mask [B,T] and response_mask [B,R] hold only 0 and 1."""
    for name in ("attention_mask", "response_mask"):
        if stats[f"not_binary:{name}"]:
            mask = view.numpy(name)
            bad = _not_binary(mask)
            yield ctx.fail(
                name,
                cells=bad,
                expected="0 or 1",
                actual=f"{sorted({float(v) for v in np.unique(mask[bad])[:5]})}",
                causes=("wrong_dtype", "stale_buffer"),
            )


def _changes_direction(block: Block) -> bool:
    """True when attention falls inside a prompt or rises inside a response."""
    on, prompt = block.attended, block.view.prompt or 0
    falls = np.greater(on[:, : max(prompt - 1, 0)], on[:, 1:prompt])
    rises = np.less(on[:, prompt:-1], on[:, prompt + 1 :])
    return some(falls) or some(rises)


def _ends(on: Any, hint: Any) -> Any:
    """For rows ``[k,W]`` that should read 1..1 0..0: the end that fits best, nearest to ``hint``.

    The best end leaves the fewest cells wrong; where several do, ``hint`` (another source's end)
    decides.
    """
    zero = np.zeros((len(on), 1), np.int64)
    missing = np.concatenate([zero, np.cumsum(~on, axis=1)], axis=1)
    beyond = on.sum(1, keepdims=True) - np.concatenate([zero, np.cumsum(on, axis=1)], axis=1)
    wrong = missing + beyond
    far = np.abs(np.arange(wrong.shape[1])[None] - hint[:, None])
    return np.lexsort((far.T, wrong.T), axis=0)[0]


def _misplaced(on: Any, hint: Any) -> Any:
    """Cells that keep rows ``[B,W]`` from reading 1..1 0..0."""
    return on != (np.arange(on.shape[1])[None] < _ends(on, hint)[:, None])


@probe(
    "DPA202", stages=AT, needs=ATTENDED, stats=(any_of("padding", ATTENDED, _changes_direction),)
)
def padding_side(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Prompts are padded left (0..0 1..1), responses right (1..1 0..0)."""
    if stats["padding"]:
        block, prompt = Block(view, slice(None)), view.prompt or 0
        used = block.mask if readable("response_mask", view, ctx) else block.response_attention
        filled = block.attended[:, :prompt]
        if readable("prompts", view, ctx) and ctx.settings.pad_id is not None:
            filled = view.numpy("prompts") != ctx.settings.pad_id
        bad = np.concatenate(
            [
                _misplaced(block.attended[:, :prompt][:, ::-1], _end(filled[:, ::-1]))[:, ::-1],
                _misplaced(block.response_attention, _end(used)),
            ],
            axis=1,
        )
        side = "prompt" if bad[:, :prompt].any() else "response"
        hole = side == "response" and _sampled(view, ctx, bad[:, prompt:], block)
        yield ctx.fail(
            "attention_mask",
            cells=bad,
            expected="0..0 1..1 over the prompt, 1..1 0..0 over the response",
            actual=f"the {side} part is attended in pieces",
            evidence={"log-probs of the engine there": "yes"} if hole else None,
            causes=("mask_hole", "left_right_padding") if hole else ("left_right_padding",),
        )


def _sampled(view: BatchView, ctx: Context, cells: Any, block: Block) -> bool:
    """Whether most of ``cells [B,R]`` are unattended and have a log-prob of the engine."""
    if not readable("rollout_log_probs", view, ctx):
        return False
    there = (view.numpy("rollout_log_probs") != 0) & cells & ~block.response_attention
    return bool(2 * there.sum() > cells.sum())


def readable(name: str, view: BatchView, ctx: Context) -> bool:
    """True for a tensor that is there and keeps its declaration."""
    return name in view.tensors and name not in ctx.broken


@probe(
    "DPA205",
    stages=AT,
    needs=("response_mask", *ATTENDED),
    stats=(
        any_of(
            "mask_outside",
            ("response_mask", *ATTENDED),
            lambda block: some(block.mask_differs) and some(block.mask_differs & block.mask),
        ),
    ),
)
def mask_on_padding(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """response_mask [B,R] <= attention_mask[:, P:]: no padding is trained on."""
    if stats["mask_outside"]:
        block = Block(view, slice(None))
        bad = block.mask & ~block.response_attention
        rows = np.flatnonzero(bad.any(1))
        yield ctx.fail(
            "response_mask",
            cells=bad,
            expected="0 where the response's attention is 0",
            actual=f"1 on {int(bad.sum())} padding slots in {len(rows)} rows",
            evidence={"trained tokens": int(block.mask.sum()), "on padding": int(bad.sum())},
            causes=_built_from(block) or ("mask_on_padding", "mask_from_prompt"),
            hint="multiply the mask by attention_mask[:, -R:]",
        )


def _built_from(block: Block) -> tuple[str, ...]:
    """What the mask is instead of the response's attention: that shifted, or the prompt's."""
    mask, attended = block.mask, block.response_attention
    width = mask.shape[1]
    if (mask[:, 1:] == attended[:, :-1]).all() or (mask[:, :-1] == attended[:, 1:]).all():
        return ("shift", "mask_on_padding")
    if (mask == block.attended[:, :width]).all():
        return ("mask_from_prompt", "mask_on_padding")
    return ()


@probe(
    "DPA206",
    stages=AT,
    needs=(*ATTENDED, "settings.stop_ids"),
    stats=(RESPONSE_END,),
    applies=lambda ctx: "turns may end in tool text" if ctx.settings.multi_turn else "",
)
def stop_token(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The last attended id is a stop id, or the response fills its limit.

    The limit is the ``max_tokens`` that the engine reports, else the configured one, else the
    width of the batch. Rows without any response token are left to other checks. Where
    ``finish_reason`` is present it must say the same: ``stop`` exactly when the last id is a stop
    id.
    """
    lengths = stats["response_end"]
    responses = view.numpy("responses")
    limit = _limit(ctx, responses.shape[1])
    last = responses[np.arange(len(lengths)), np.maximum(lengths - 1, 0)]
    stopped = np.zeros(len(last), bool)
    for stop in ctx.settings.stop_ids or ():
        stopped |= last == stop
    bad = (lengths > 0) & (lengths < limit) & ~stopped
    if bad.any():
        causes = ("silent_truncation", "wrong_stop_token")
        if bad.sum() > 2 and len(np.unique(last[bad])) == 1:  # text that is cut ends in many ids
            causes = causes[::-1]
        yield _ending(
            ctx, bad, lengths, "a stop id as last token", "another id before the limit", causes
        )
    reasons = view.arrays.get("finish_reason")
    if reasons is not None and "finish_reason" not in ctx.broken and reasons.ndim == 1:
        said = _said_stop(reasons)
        bad = (lengths > 0) & (said != stopped) & ~bad
        if bad.any():
            yield _ending(ctx, bad, lengths, "finish_reason 'stop' exactly after a stop id",
                          "they disagree", ("wrong_stop_token", "row_permutation"))  # fmt: skip


def _said_stop(reasons: Any) -> Any:
    """One by one: there may be arrays among the entries."""
    return np.array([isinstance(reason, str) and reason == "stop" for reason in reasons], bool)


def _limit(ctx: Context, width: int) -> int:
    sampling = ctx.evidence.get("sampling")
    used = sampling.get("max_tokens") if isinstance(sampling, Mapping) else None
    return int(used or ctx.settings.max_response_length or width)


def _ending(
    ctx: Context, bad: Any, lengths: Any, expected: str, actual: str, causes: tuple[str, ...]
) -> Finding:
    cells = np.zeros((len(lengths), int(lengths.max()) if len(lengths) else 0), bool)
    rows = np.flatnonzero(bad)
    cells[rows, lengths[rows] - 1] = True
    return ctx.fail("responses", cells=cells, expected=expected, actual=actual, causes=causes,
                    evidence={"stop ids": list(ctx.settings.stop_ids or ())})  # fmt: skip


@probe(
    "DPA208",
    stages=AT,
    needs=("response_mask", *ATTENDED, "settings.multi_turn", "settings.rejection"),
    stats=(
        any_of(
            "mask_missing",
            ("response_mask", *ATTENDED),
            lambda block: some(block.mask_differs) and some(block.mask_differs & ~block.mask),
        ),
    ),
    applies=lambda ctx: (
        "tool turns or rejection leave tokens out"
        if ctx.settings.multi_turn or ctx.settings.rejection
        else ""
    ),
)
def mask_complete(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Single turn, no rejection: response_mask [B,R] covers every sampled token.

    Rows that only fill the batch up are left out on purpose.
    """
    if stats["mask_missing"]:
        block = Block(view, slice(None))
        bad = block.response_attention & ~block.mask
        filling = filling_rows(view)
        if filling is not None:
            bad[filling] = False
        if not bad.any():
            return
        yield ctx.fail(
            "response_mask",
            cells=bad,
            expected="1 on every sampled token",
            actual=f"0 on {int(bad.sum())} sampled tokens",
            causes=tuple(
                "mask_hole" if cause == "mask_on_padding" else cause for cause in _built_from(block)
            )
            or ("mask_hole", "mask_from_prompt"),
        )
