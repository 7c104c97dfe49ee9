"""Whether the rows can be cut as configured (DPA117 to DPA120).

These are arithmetic on row counts and lengths, before anything is sent to a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, filling_field, filling_rows
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, PROMPT_LENGTH, RESPONSE_LENGTH

AT = ("dispatch",)
LENGTHS = (PROMPT_LENGTH, RESPONSE_LENGTH)


@probe("DPA117", stages=AT, needs=("settings.world_size",), later=False)
def rows_over_ranks(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The rows are a multiple of the data-parallel ranks."""
    ranks = ctx.settings.world_size or 1
    if view.rows % ranks:
        padded = -(-view.rows // ranks) * ranks
        yield ctx.fail(
            "batch_size",
            expected=f"a multiple of dp_size = {ranks}",
            actual=f"{view.rows} rows",
            evidence={"rows after padding": padded, "rows to add": padded - view.rows},
            causes=("pad_divisor", "rows_lost"),
            hint=f"pad to {padded} rows, taking rows again from the start where there are too few",
        )


@probe("DPA117", stages=AT, needs=("settings.micro_batch_size", "settings.world_size"), later=False)
def rows_over_micro_batches(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The rows of a rank are a multiple of the micro-batch size, or all fit into one."""
    size, ranks = ctx.settings.micro_batch_size or 1, ctx.settings.world_size or 1
    if ctx.settings.max_token_len:
        ctx.skip("micro-batches are cut by tokens")
    whole = view.rows if view.rows % ranks else view.rows // ranks
    if whole > size and whole % size:
        yield ctx.fail(
            "batch_size",
            expected=f"a multiple of micro_batch_size = {size} on each of {ranks} ranks",
            actual=f"{view.rows} rows",
            causes=("pad_divisor", "rows_lost"),
        )


def _parallel(ctx: Context) -> int:
    return (ctx.settings.cp_size or 1) * (ctx.settings.tp_size or 1) * (ctx.settings.sp_size or 1)


@probe(
    "DPA118",
    stages=AT,
    needs=(*ATTENDED, "settings.cp_size"),
    stats=LENGTHS,
    applies=lambda ctx: "" if ctx.settings.cp_size is None or _parallel(ctx) > 1 else "no split",
    severity="warn",
    later=False,
)
def long_enough_to_split(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Every row has at least one token for each rank that its sequence is split over."""
    lengths, parts = stats["prompt_length"] + stats["response_length"], _parallel(ctx)
    short = np.flatnonzero(lengths < parts)
    if len(short):
        yield ctx.fail(
            "attention_mask",
            rows=short,
            expected=f"at least {parts} tokens a row (tp·cp·sp)",
            actual=f"{int(lengths.min())} tokens in row {int(lengths.argmin())}",
            causes=("short_for_split",),
            hint="some ranks would slice behind the end of such a row",
        )


@probe("DPA119", stages=AT, needs=(*ATTENDED, "settings.max_token_len"), stats=LENGTHS, later=False)
def row_fits_token_limit(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """No row is longer than the token limit of a micro-batch; ``info`` where only padding is."""
    limit = ctx.settings.max_token_len or 0
    lengths = stats["prompt_length"] + stats["response_length"]
    width = (view.prompt or 0) + (view.response or 0)
    long = np.flatnonzero(lengths > limit)
    if len(long):
        yield ctx.fail(
            "attention_mask",
            rows=long,
            expected=f"at most max_token_len = {limit} tokens a row",
            actual=f"{int(lengths.max())} tokens in row {int(lengths.argmax())}",
            causes=("token_limit_exceeded",),
        )
    elif width > limit:
        yield ctx.fail(
            "attention_mask",
            severity="info",
            expected=f"the limit of {limit} tokens counts attended tokens",
            actual=f"padded width {width}, longest row {int(lengths.max(initial=0))}",
            causes=("padded_width",),
            hint="a guard that compares the padded width would refuse this batch",
        )


@probe(
    "DPA120",
    stages=("update_actor",),
    needs=("settings.actor_micro_batch_size",),
    applies=lambda ctx: "" if ctx.number("micro_batch_size") else "no such meta entry",
    later=False,
)
def own_micro_batch_size(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The actor's update does not read the micro-batch size that another stage left in meta."""
    own, left = ctx.settings.actor_micro_batch_size, ctx.evidence["micro_batch_size"]
    if left != own:
        yield ctx.fail(
            "meta_info.micro_batch_size",
            expected=f"{own} (configured for the actor)",
            actual=f"{left} (left by another stage)",
            causes=("stage_meta_leak",),
        )


@probe("DPA211", stages=("rollout", "union", *AT), needs=("response_mask",))
def padding_rows_untrained(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Rows that only fill the batch up (``is_pad``, ``is_padding``) have no trained token.

    Said once a step of the same rows.
    """
    name = filling_field(view)
    if name is None or name not in view:  # or not yet: it is said where the rows are marked
        ctx.skip("no padding rows")
    filling = filling_rows(view)
    if filling is None:
        ctx.unknown(f"{name} does not have one entry a row")
    bad = (view.numpy("response_mask") != 0) & filling[:, None]
    if bad.any() and ctx.cache.get("filling") != (told := int(bad.sum())):
        ctx.cache["filling"] = told
        mask = view.numpy("response_mask") != 0
        yield ctx.fail(
            "response_mask",
            stage="dispatch" if name == "is_pad" else "",  # filled up for the ranks, by the driver
            cells=bad,
            expected="0 on rows that only fill the batch up",
            actual=f"{int(bad.sum())} of {int(mask.sum())} trained tokens are on such rows",
            causes=("mask_on_padding",),
            hint="they enlarge the token count that the loss is divided by",
        )
