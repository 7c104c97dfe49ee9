"""Groups by uid (DPA401 to DPA403). The order of the expansion is checked by the row relation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, group_codes
from dataproto_audit.probes.registry import probe


@probe("DPA401", stages=("union",), needs=("uid", "settings.n"))
def group_size(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Each uid occurs exactly n times. Runs with a variable n leave ``n`` unset."""
    codes, uids = group_codes(view, ctx)
    counts = np.bincount(codes, minlength=len(uids))
    n = ctx.settings.n
    wrong = np.flatnonzero(counts != n)
    if len(wrong):
        sizes, number = np.unique(counts, return_counts=True)
        causes: tuple[str, ...] = ("split_group", "rows_lost")
        if n != 1 and bool((counts == 1).all()):
            causes = ("uid_after_repeat", "split_group")
        yield ctx.fail(
            "uid",
            rows=np.flatnonzero(np.isin(codes, wrong)),
            expected=f"{n} rows per uid",
            actual=", ".join(f"{c} groups of {s}" for s, c in zip(sizes, number, strict=True)),
            evidence={"groups": len(uids), "wrong": len(wrong)},
            causes=causes,
        )


@probe("DPA402", stages=("union",), needs=("uid", "prompts", "attention_mask", "responses"))
def group_prompt(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows of one uid hold one prompt; where ``prompt_ids`` came along, exactly those ids.

    Prompts that were truncated on the way (more ids than columns) are not compared with their ids.
    """
    prompts = view.numpy("prompts")
    codes, uids = group_codes(view, ctx)
    first = np.empty(len(uids), np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    bad = prompts != prompts[first[codes]]
    own = view.arrays.get("prompt_ids")
    if own is not None and "prompt_ids" not in ctx.broken and not bad.any():
        listed = own.tolist()
        shared = [listed[row] for row in first.tolist()]
        if all(map(is_, listed, map(shared.__getitem__, codes.tolist()))):
            bad[first] = _own_prompt_differs(shared, first, view, ctx)
            bad = bad[first[codes]]
        else:
            bad = _own_prompt_differs(listed, np.arange(len(listed)), view, ctx)
    if bad.any():
        rows = np.flatnonzero(bad.any(1))
        yield ctx.fail(
            "prompts",
            cells=bad,
            expected="the prompt of the row's own uid",
            actual=f"another prompt in {len(rows)} of {len(prompts)} rows",
            evidence={"groups": len(first)},
            causes=("tiled_groups", "row_permutation", "not_repeated"),
        )


def _own_prompt_differs(lists: list[Any], rows: Any, view: BatchView, ctx: Context) -> Any:
    """Cells where the padded prompt of ``rows`` differs from their ids ``lists``, ``[rows, P]``."""
    prompts, width = view.numpy("prompts")[rows], view.prompt or 0
    try:
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        flat = np.fromiter(chain.from_iterable(lists), prompts.dtype, int(lengths.sum()))
    except (TypeError, ValueError):
        ctx.unknown("prompt_ids holds other things than token ids")
    used = np.arange(width)[None] >= width - lengths[:, None]
    fits = lengths <= width
    want = prompts.copy()
    want[used & fits[:, None]] = flat[np.repeat(fits, lengths)]
    attended = Block(view, slice(None)).attended[rows, :width]
    return ((prompts != want) | (used != attended)) & fits[:, None]


@probe("DPA403", stages=("prompts",), needs=("uid",), later=False)
def uid_per_prompt(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Before the repeat every row is one prompt and has a uid of its own."""
    codes, uids = group_codes(view, ctx)
    if len(uids) != len(codes):
        counts = np.bincount(codes)
        yield ctx.fail(
            "uid",
            rows=np.flatnonzero(counts[codes] > 1),
            expected=f"{len(codes)} distinct uids",
            actual=f"{len(uids)}",
            causes=("uid_reused",),
        )
