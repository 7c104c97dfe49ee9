"""Groups by uid (DPA401 to DPA403). The order of the expansion is checked by the row relation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, group_codes, group_sizes
from dataproto_audit.probes.registry import probe


@probe("DPA401", stages=("union",), needs=("uid", "settings.n"))
def group_size(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Each uid occurs exactly n times. Runs with a variable n leave ``n`` unset.

    A batch whose rows are no multiple of n is a piece of one, where groups may be cut: ``info``.
    """
    codes, uids = group_codes(view, ctx)
    counts, n = group_sizes(view, ctx), ctx.settings.n
    wrong = np.flatnonzero((counts != n) & (counts > 0))
    counts = counts[counts > 0]
    if len(wrong):
        sizes, number = np.unique(counts, return_counts=True)
        causes: tuple[str, ...] = ("split_group", "rows_lost")
        alone = n != 1 and bool((counts == 1).all())
        if alone:
            causes = ("uid_after_repeat", "split_group")
        yield ctx.fail(
            "uid",
            stage="prompts" if alone else "",
            severity="info" if view.rows % (n or 1) and not alone else None,
            rows=np.flatnonzero(np.isin(codes, wrong)),
            expected=f"{n} rows per uid",
            actual=", ".join(f"{c} groups of {s}" for s, c in zip(sizes, number, strict=True)),
            evidence={"groups": len(uids), "wrong": len(wrong)},
            causes=causes,
        )


@probe(
    "DPA402",
    stages=("union",),
    needs=("uid", "prompts", "attention_mask", "responses"),
    applies=lambda ctx: "image ids may differ in number" if ctx.settings.image_ids else "",
)
def group_prompt(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows of one uid hold one prompt; where ``prompt_ids`` came along, exactly those ids.

    Prompts that were truncated on the way (more ids than columns) are not compared with their ids.
    Where no two rows of the batch have one prompt and n is unknown, the uid may name something
    else, such as a session with several prompts: ``info``.
    """
    prompts = view.numpy("prompts")
    codes, uids = group_codes(view, ctx)
    first = np.empty(len(uids), np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    told_apart = view.row_hashes("prompts")
    bad = np.zeros((view.rows, prompts.shape[1]), bool)
    if (told_apart != told_apart[first[codes]]).any():
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
        told = None
        if own is not None and "prompt_ids" not in ctx.broken:  # these tell each row's own prompt
            exact = _own_prompt_differs(own.tolist(), np.arange(view.rows), view, ctx)
            bad, told = (exact, own.tolist()) if exact.any() else (bad, None)
        usual = _usual_rows(view, codes, first)
        if told is None and (usual != first).any():
            bad = prompts != prompts[usual[codes]]
        rows = np.flatnonzero(bad.any(1))
        repeated = len(np.unique(view.row_hashes("prompts"))) < view.rows
        yield ctx.fail(
            "prompts",
            severity=None if repeated or ctx.settings.n is not None else "info",
            cells=bad,
            expected="the prompt of the row's own uid",
            actual=f"another prompt in {len(rows)} of {len(prompts)} rows",
            evidence={"groups": len(first)},
            causes=_order_of(view, usual[codes], told),
        )


def _usual_rows(view: BatchView, codes: Any, first: Any) -> Any:
    """For each group a row with the prompt that most of its rows have, the first of several."""
    hashes, rows = view.row_hashes("prompts"), first.copy()
    for code in range(len(first)):
        members = np.flatnonzero(codes == code)
        _, at, counts = np.unique(hashes[members], return_index=True, return_counts=True)
        most = at[counts == counts.max()].min()
        rows[code] = members[most]
    return rows


def _order_of(view: BatchView, usual: Any, own: Any) -> tuple[str, ...]:
    """Causes by where each row's prompt belongs: tiled, moved, unknown, or there too often.

    ``usual`` is a row with the prompt of each row's group ``[B]``; ``own`` are the prompt ids of
    each row, None to go by the groups.
    """
    prompts, width = view.numpy("prompts"), view.prompt or 0
    attended = Block(view, slice(None)).attended[:, :width]
    found = [tuple(row[on].tolist()) for row, on in zip(prompts, attended, strict=True)]
    wanted = [found[row] for row in usual.tolist()] if own is None else [*map(tuple, own)]
    if _tiled(found) != _tiled(wanted):
        return ("tiled_groups", "row_permutation", "not_repeated")
    if sorted(found) == sorted(wanted):
        return ("row_permutation", "tiled_groups", "not_repeated")
    if own is not None and not set(found) <= set(wanted):
        return ("field_overwritten", "row_permutation")
    return ("not_repeated", "row_permutation", "tiled_groups")


def _tiled(prompts: list[Any]) -> bool:
    """True for p0, p1, .., p0, p1, .. with at least two rounds."""
    turn = len(dict.fromkeys(prompts))
    if turn < 2 or len(prompts) < 2 * turn or len(set(prompts[:turn])) < turn:
        return False
    return all(prompt == prompts[row % turn] for row, prompt in enumerate(prompts))


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
