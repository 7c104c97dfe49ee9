"""Masks, ids, positions and stop tokens (DPA2xx).

Shapes: B rows, P prompt columns, R response columns, T = P + R. None of these checks looks at
text, at multimodal position ids, or at whether a tool reply was tokenised as the engine saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, RESPONSE_LENGTH, any_of, some

AT = ("rollout", "validation")


def _not_binary(mask: Any) -> Any:
    if mask.dtype.kind == "b":
        return np.zeros(mask.shape, bool)
    return (mask != 0) & (mask != 1)


def _binary(name: str) -> Any:
    def compute(block: Block) -> bool:
        mask = block[name] if name in block.view else block.attention
        if mask.dtype.kind in "iu":
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
    falls = on[:, : max(prompt - 1, 0)] & ~on[:, 1:prompt]
    rises = ~on[:, prompt:-1] & on[:, prompt + 1 :]
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
        used = block.mask if _readable("response_mask", view, ctx) else block.response_attention
        width = used.shape[1]
        ends = np.where(used.any(1), width - used[:, ::-1].argmax(1), 0)
        filled = block.attended[:, :prompt][:, ::-1]
        if _readable("prompts", view, ctx) and ctx.settings.pad_id is not None:
            filled = (view.numpy("prompts") != ctx.settings.pad_id)[:, ::-1]
        starts = np.where(filled.any(1), prompt - filled[:, ::-1].argmax(1), 0)
        bad = np.concatenate(
            [
                _misplaced(block.attended[:, :prompt][:, ::-1], starts)[:, ::-1],
                _misplaced(block.response_attention, ends),
            ],
            axis=1,
        )
        side = "prompt" if bad[:, :prompt].any() else "response"
        yield ctx.fail(
            "attention_mask",
            cells=bad,
            expected="0..0 1..1 over the prompt, 1..1 0..0 over the response",
            actual=f"the {side} part is attended in pieces",
            causes=("left_right_padding",),
        )


def _readable(name: str, view: BatchView, ctx: Context) -> bool:
    return name in view.tensors and name not in ctx.broken


def _ids_bad(block: Block) -> Any:
    prompt = block.view.prompt or 0
    ids = block["input_ids"]
    return (ids[:, :prompt] != block["prompts"]), (ids[:, prompt:] != block["responses"])


@probe(
    "DPA203",
    stages=AT,
    needs=("input_ids", "prompts", "responses"),
    stats=(
        any_of(
            "ids_layout",
            ("input_ids", "prompts", "responses"),
            lambda block: any(map(some, _ids_bad(block))),
        ),
    ),
)
def ids_layout(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """input_ids [B,T] is prompts [B,P] followed by responses [B,R]."""
    if stats["ids_layout"]:
        bad = np.concatenate(_ids_bad(Block(view, slice(None))), axis=1)
        rows = np.flatnonzero(bad.any(1))
        causes = ["shift", "stale_buffer"]
        whole = np.concatenate([view.numpy("prompts"), view.numpy("responses")], 1)
        have = {row.tobytes() for row in view.numpy("input_ids")}
        if all(whole[row].tobytes() in have for row in rows):
            causes = ["row_permutation", "shift"]
        yield ctx.fail(
            "input_ids",
            cells=bad,
            expected="prompts then responses, id by id",
            actual=f"{int(bad.sum())} ids differ in {len(rows)} rows",
            causes=causes,
        )


def _positions(attended: Any) -> Any:
    counted = np.cumsum(attended, axis=1)
    counted -= 1
    return np.maximum(counted, 0, out=counted)


def _position_bad(block: Block) -> Any:
    positions = block["position_ids"]
    if positions.ndim != 2:  # rotary positions on several axes, [B, axes, T]
        return np.zeros((1, 1), bool)
    return (positions != _positions(block.attended)) & block.attended


@probe(
    "DPA204",
    stages=AT,
    needs=("position_ids", *ATTENDED),
    stats=(
        any_of(
            "positions",
            ("position_ids", *ATTENDED),
            lambda block: some(_position_bad(block)),
        ),
    ),
)
def positions(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """position_ids [B,T] == clip(cumsum(attention_mask) - 1, 0) on attended tokens.

    Padding slots are free: some paths continue the count there, others leave zeros. Where a row's
    positions count another attention without a gap, it is the attention that is named.
    """
    found = view.numpy("position_ids")
    if found.ndim != 2:
        ctx.skip("positions on several axes follow the image grid")
    if not stats["positions"]:
        return
    block = Block(view, slice(None))
    bad, counted = _position_bad(block), _counted(found)
    other = counted != block.attended
    fits = ((found == _positions(counted)) | ~counted).all(1)  # it counts from 0, without a gap
    attention = bad.any(1) & (other.sum(1) < bad.sum(1)) & fits
    for name, cells in (
        ("attention_mask", other & attention[:, None]),
        ("position_ids", bad & ~attention[:, None]),
    ):
        if cells.any():
            row, column = np.argwhere(bad & cells.any(1)[:, None])[0]
            want = int(_positions(block.attended)[row, column])
            yield ctx.fail(
                name,
                cells=cells,
                expected=f"position {want} at row {row}, column {column}",
                actual=f"{found[row, column]}",
                evidence={"offset": int(found[row, column]) - want},
                causes=("wrong_position_ids", "left_right_padding"),
            )


def _counted(positions: Any) -> Any:
    """The attention that positions ``[B,T]`` count: where they rise, and where they start."""
    rises = np.zeros(positions.shape, bool)
    rises[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    starts = np.zeros(positions.shape, bool)
    starts[:, :-1] = (positions[:, :-1] == 0) & rises[:, 1:]
    return rises | starts


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
            causes=("mask_on_padding", "mask_from_prompt"),
            hint="multiply the mask by attention_mask[:, -R:]",
        )


@probe(
    "DPA206",
    stages=AT,
    needs=(*ATTENDED, "settings.stop_ids"),
    stats=(RESPONSE_LENGTH,),
    applies=lambda ctx: "turns may end in tool text" if ctx.settings.multi_turn else "",
)
def stop_token(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The last attended id is a stop id, or the response fills its limit.

    The limit is the ``max_tokens`` that the engine reports, else the configured one, else the
    width of the batch. Rows without any response token are left to other checks. Where
    ``finish_reason`` is present it must say the same: ``stop`` exactly when the last id is a stop
    id.
    """
    lengths = stats["response_length"]
    responses = view.numpy("responses")
    limit = _limit(ctx, responses.shape[1])
    last = responses[np.arange(len(lengths)), np.maximum(lengths - 1, 0)]
    stopped = np.zeros(len(last), bool)
    for stop in ctx.settings.stop_ids or ():
        stopped |= last == stop
    bad = (lengths > 0) & (lengths < limit) & ~stopped
    if bad.any():
        yield _ending(ctx, bad, lengths, "a stop id as last token", "another id before the limit",
                      ("silent_truncation", "wrong_stop_token"))  # fmt: skip
    reasons = view.arrays.get("finish_reason")
    if reasons is not None and "finish_reason" not in ctx.broken and reasons.ndim == 1:
        said = _said_stop(reasons)
        bad = (lengths > 0) & (said != stopped) & ~bad
        if bad.any():
            yield _ending(ctx, bad, lengths, "finish_reason 'stop' exactly after a stop id",
                          "they disagree", ("wrong_stop_token", "row_permutation"))  # fmt: skip


def _said_stop(reasons: Any) -> Any:
    try:
        said = reasons == "stop"
    except ValueError:  # arrays among the entries
        said = None
    if isinstance(said, np.ndarray) and said.dtype.kind == "b":
        return said
    return np.array([isinstance(reason, str) and reason == "stop" for reason in reasons])


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


def _pad_bad(block: Block, pad: int) -> Any:
    return (block["input_ids"] != pad) & ~block.attended


@probe("DPA207", stages=AT, needs=("input_ids", *ATTENDED, "settings.pad_id"))
def pad_ids(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """input_ids [B,T] hold the pad id wherever the attention mask is 0."""
    pad = int(ctx.settings.pad_id or 0)
    if any(some(_pad_bad(block, pad)) for block in view.blocks()):
        bad = _pad_bad(Block(view, slice(None)), pad)
        yield ctx.fail(
            "input_ids",
            cells=bad,
            expected=f"pad id {pad} off the attention mask",
            actual=f"{int(bad.sum())} other ids",
            causes=("stale_buffer", "left_right_padding"),
        )


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
    """Single turn, no rejection: response_mask [B,R] covers every sampled token."""
    if stats["mask_missing"]:
        block = Block(view, slice(None))
        bad = block.response_attention & ~block.mask
        shifted = np.zeros_like(block.mask)
        shifted[:, :-1] = block.mask[:, 1:]
        fits = bool((shifted[:, :-1] == block.response_attention[:, :-1]).all())
        yield ctx.fail(
            "response_mask",
            cells=bad,
            expected="1 on every sampled token",
            actual=f"0 on {int(bad.sum())} sampled tokens",
            causes=("shift", "mask_hole") if fits else ("mask_hole", "mask_from_prompt"),
        )
