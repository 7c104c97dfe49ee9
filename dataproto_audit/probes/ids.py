"""Token ids and positions (DPA203, DPA204, DPA207).

Shapes: B rows, P prompt columns, R response columns, T = P + R. None of these checks looks at
text, or at whether a tool reply was tokenised as the engine saw it; positions on several axes are
looked at in :mod:`.multimodal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit import fast
from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_sum
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.masks import AT, readable
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, Stat, any_of, some


def _ids_bad(block: Block) -> Any:
    prompt = block.view.prompt or 0
    ids = block["input_ids"]
    return (ids[:, :prompt] != block["prompts"]), (ids[:, prompt:] != block["responses"])


def _ids_differ(block: Block) -> bool:
    ids = block["input_ids"]
    if (compiled := fast.loops(ids.size)) is not None:
        return bool(compiled.ids_differ(ids, block["prompts"], block["responses"]))
    return any(map(some, _ids_bad(block)))


@probe(
    "DPA203",
    stages=AT,
    needs=("input_ids", "prompts", "responses"),
    stats=(
        any_of(
            "ids_layout",
            ("input_ids", "prompts", "responses"),
            _ids_differ,
        ),
    ),
)
def ids_layout(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """input_ids [B,T] is prompts [B,P] followed by responses [B,R]."""
    if stats["ids_layout"]:
        bad = np.concatenate(_ids_bad(Block(view, slice(None))), axis=1)
        rows = np.flatnonzero(bad.any(1))
        causes = ["shift", "stale_buffer"] if _moved(view, bad) else ["stale_buffer", "shift"]
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


def _moved(view: BatchView, bad: Any) -> bool:
    """Whether the rows of ``input_ids`` that are wrong hold the response one column further."""
    rows, prompt = bad[:, view.prompt or 0 :].any(1), view.prompt or 0
    have, want = view.numpy("input_ids")[rows, prompt:], view.numpy("responses")[rows]
    moves = (have[:, 1:] == want[:, :-1], have[:, :-1] == want[:, 1:])
    return bool(rows.any()) and any(bool(fits.all()) for fits in moves)


def _positions(attended: Any) -> Any:
    counted = np.cumsum(attended, axis=1)
    counted -= 1
    return np.maximum(counted, 0, out=counted)


def _position_bad(block: Block) -> Any:
    return (block["position_ids"] != _positions(block.attended)) & block.attended


def _positions_wrong(block: Block) -> bool:
    """Whether any attended position is wrong. In an unbroken row they count from 0."""
    positions, on = block["position_ids"], block.attended
    if positions.ndim != 2:  # rotary positions on several axes, [B, axes, T]
        return False
    if (compiled := fast.loops(positions.size)) is not None:
        return bool(compiled.positions_wrong(positions, on))
    begins = on.copy()
    begins[:, 1:] &= ~on[:, :-1]
    if int(row_sum(begins).max(initial=0)) > 1:
        return some(_position_bad(block))
    goes_on = on[:, 1:] & on[:, :-1]
    steps = positions[:, 1:] - positions[:, :-1]
    return some(positions[begins]) or some((steps != 1) & goes_on)


@probe(
    "DPA204",
    stages=AT,
    needs=("position_ids", *ATTENDED),
    stats=(
        any_of(
            "positions",
            ("position_ids", *ATTENDED),
            _positions_wrong,
        ),
    ),
)
def positions(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """position_ids [B,T] == clip(cumsum(attention_mask) - 1, 0) on attended tokens.

    Padding slots are free: some paths continue the count there, others leave zeros. Where a row's
    positions count another attention without a gap, it is the attention that is named, unless ids
    and response mask bear the attention out.
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
    from_padding = (found == np.arange(found.shape[1])[None]).all(1)  # attention was not looked at
    attention = bad.any(1) & (other.sum(1) < bad.sum(1)) & fits & ~from_padding
    attention &= ~_borne_out(view, ctx, block, other)
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


def _borne_out(view: BatchView, ctx: Context, block: Block, other: Any) -> Any:
    """Rows whose attention is right by ids or response mask in most of the cells ``other [B,T]``.

    What an id says is only used of prompts: within a response the pad id may be a stop token.
    """
    pad, prompt = ctx.settings.pad_id, view.prompt or 0
    right, wrong = np.zeros((2, *other.shape), bool)
    if pad is not None and readable("prompts", view, ctx):
        filled = np.logical_or.accumulate(view.numpy("prompts") != pad, axis=1)
        right[:, :prompt] = filled == block.attended[:, :prompt]
        wrong[:, :prompt] = ~right[:, :prompt]
    if readable("response_mask", view, ctx):
        right[:, prompt:] = block.mask & block.response_attention
        wrong[:, prompt:] = block.mask & ~block.response_attention
    return (right & other).sum(1) > (wrong & other).sum(1)


def _counted(positions: Any) -> Any:
    """The attention that positions ``[B,T]`` count: where they rise, and where they start."""
    rises = np.zeros(positions.shape, bool)
    rises[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    starts = np.zeros(positions.shape, bool)
    starts[:, :-1] = (positions[:, :-1] == 0) & rises[:, 1:]
    return rises | starts


def _pad_bad(block: Block, pad: int) -> Any:
    return (block["input_ids"] != pad) & ~block.attended


def _unattended_range(block: Block) -> tuple[int, int] | None:
    """Smallest and largest id off the attention mask; None without any."""
    ids = block["input_ids"]
    if (compiled := fast.loops(ids.size)) is not None:
        limits, kind = np.iinfo(ids.dtype), ids.dtype.type
        empty = kind(limits.max), kind(limits.min)
        low, high = compiled.range_where(ids, ~block.attended, kind(0), empty, kind(0))
        least, most = int(low.min()), int(high.max())
        return None if least > most else (least, most)
    ids = ids[~block.attended]
    return (int(ids.min()), int(ids.max())) if ids.size else None


UNATTENDED = Stat("unattended_ids", ("input_ids", *ATTENDED), _unattended_range, list)


@probe(
    "DPA207",
    stages=AT,
    needs=("input_ids", *ATTENDED, "settings.pad_id"),
    stats=(UNATTENDED,),
)
def pad_ids(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """input_ids [B,T] hold the pad id wherever the attention mask is 0."""
    pad = int(ctx.settings.pad_id or 0)
    if any(found not in (None, (pad, pad)) for found in stats[UNATTENDED.name]):
        bad = _pad_bad(Block(view, slice(None)), pad)
        yield ctx.fail(
            "input_ids",
            cells=bad,
            expected=f"pad id {pad} off the attention mask",
            actual=f"{int(bad.sum())} other ids",
            causes=("stale_buffer", "left_right_padding"),
        )
