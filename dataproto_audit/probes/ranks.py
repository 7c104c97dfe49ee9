"""How the rows were spread over ranks and micro-batches (DPA7xx).

Evidence is what each rank noted while it ran: its rows, the rows of each micro-batch, and their
token sums. Padding inside a micro-batch is not counted as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.reasons import NotRecorded

NUMBERS = (int, np.integer)
STAGES = ("old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")
UNEVEN = 2.0
"""Ratio of the fullest to the emptiest rank above which the imbalance is worth a line."""


def _noted(ctx: Context, *counts: str, lists: tuple[str, ...] = ()) -> list[Mapping[str, Any]]:
    """What the ranks noted. The verdict is open where one left out a count or a list."""
    ranks: list[Mapping[str, Any]] = list(ctx.evidence["ranks"])
    for number, rank in enumerate(ranks):
        for name in (*counts, *lists):
            value = rank.get(name)
            fits = isinstance(value, (list, tuple) if name in lists else NUMBERS)
            if not fits:
                ctx.unknown(NotRecorded.of(f"{name} of ranks[{number}]"))
    return ranks


@probe("DPA701", stages=STAGES, needs=("evidence.ranks",))
def rank_rows(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Every rank holds the same number of rows, and together they hold the batch."""
    rows = [int(rank["rows"]) for rank in _noted(ctx, "rows")]
    if len(set(rows)) > 1 or (view.rows and sum(rows) != view.rows):
        yield ctx.fail(
            "ranks",
            expected=f"{view.rows // max(1, len(rows))} rows on each of {len(rows)} ranks",
            actual=f"{rows}",
            causes=("rows_lost", "unbalanced_ranks"),
        )


@probe("DPA702", stages=STAGES, needs=("evidence.ranks",), severity="info")
def rank_tokens(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Token sums of the ranks lie within a factor of two."""
    tokens = [int(rank["tokens"]) for rank in _noted(ctx, "tokens")]
    ctx.measure("global_seqlen/balanced_min", min(tokens))
    ctx.measure("global_seqlen/balanced_max", max(tokens))
    if max(tokens) > UNEVEN * max(1, min(tokens)):
        yield ctx.fail(
            "ranks",
            expected=f"within a factor of {UNEVEN:g}",
            actual=f"tokens per rank {tokens}",
            causes=("unbalanced_ranks",),
        )


@probe("DPA703", stages=STAGES, needs=("evidence.ranks",))
def micro_batch_partition(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Each rank's micro-batches hold each of its rows exactly once (in each epoch)."""
    end, seen = 0, False
    for number, rank in enumerate(_noted(ctx, "rows")):
        rows, lists = int(rank["rows"]), rank.get("indices")
        end += rows
        if lists is None:
            continue
        seen = True
        held = np.fromiter(chain.from_iterable(lists), np.int64)
        inside = (held >= 0) & (held < rows)
        times = np.bincount(held[inside], minlength=rows)
        epochs = max(1, len(held) // max(1, rows))
        wrong = np.flatnonzero(times != epochs)
        if len(wrong) or not inside.all():
            yield ctx.fail(
                "ranks",
                rows=wrong + end - rows,
                expected=f"rows 0..{rows - 1} of rank {rank.get('rank', number)}, "
                f"{epochs} times each",
                actual=f"{int((times < epochs).sum())} rows too rarely, "
                f"{int((times > epochs).sum())} too often, {int((~inside).sum())} are none",
                evidence={
                    "rank": rank.get("rank", number),
                    "rows of the rank": wrong.tolist()[:16],
                },
                causes=("lost_micro_batch",),
            )
    if not seen:
        ctx.unknown(NotRecorded.of("indices of micro-batches"))


@probe("DPA704", stages=STAGES, needs=("evidence.ranks",))
def token_limit(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """No micro-batch holds more tokens than the limit it was cut by."""
    limits = [rank.get("token_limit") for rank in ctx.evidence["ranks"]]
    if not any(limits):
        ctx.skip("micro-batches are cut by rows, not by tokens")
    noted = _noted(ctx, "peak_token_sum")
    for number, (rank, limit) in enumerate(zip(noted, limits, strict=True)):
        if limit and int(rank["peak_token_sum"]) > int(limit):
            yield ctx.fail(
                "ranks",
                expected=f"at most {limit} tokens in a micro-batch",
                actual=f"{rank['peak_token_sum']} on rank {rank.get('rank', number)}",
                causes=("token_limit_exceeded",),
            )


@probe("DPA705", stages=STAGES, needs=("evidence.ranks",))
def micro_batch_counts(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """All ranks run the same number of micro-batches."""
    counts = [len(rank["micro_batches"]) for rank in _noted(ctx, lists=("micro_batches",))]
    if len(set(counts)) > 1:
        yield ctx.fail(
            "ranks",
            expected="one count on all ranks",
            actual=f"micro-batches per rank {counts}",
            causes=("unequal_micro_batches",),
        )


@probe("DPA706", stages=STAGES, needs=("evidence.ranks",))
def packed_rows(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows that run as one: positions begin anew at each row, and no mask lies over all of them.

    Attention over packed rows is cut where positions begin anew; a mask of ones cuts nowhere.
    """
    first, seen, rows, masked, micros = 0, 0, [], [], 0
    if not any(rank.get("packed") for rank in ctx.evidence["ranks"]):
        ctx.skip("rows are not packed")
    for rank in _noted(ctx, "rows", lists=("indices",)):
        for told in rank.get("packed") or ():
            seen += len(told["restarts"]) > 1
            held = rank["indices"][told["micro_batch"]]
            wrong = [first + row for row, good in zip(held, told["restarts"], strict=False)
                     if not good and row >= 0]  # fmt: skip
            if told["mask"] == "all ones" and len(held) > 1:
                masked += [first + row for row in held if row >= 0]
            micros += bool(wrong)
            rows += wrong
        first += int(rank["rows"])
    if rows or masked:
        yield ctx.fail(
            "position_ids" if rows else "attention_mask",
            rows=np.asarray(sorted(rows or masked), np.int64),
            expected="position 0 at the first token of each packed row" if rows
            else "no mask over packed rows",
            actual=f"{len(rows)} rows in {micros} micro-batches go on from the row before" if rows
            else f"a mask of ones over {len(masked)} packed rows",
            evidence={"micro-batches with several rows": seen},
            causes=("packed_rows_leak",),
        )  # fmt: skip


@probe("DPA707", stages=STAGES, needs=("evidence.ranks",))
def attended_tokens(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """As many tokens of each row attend to each other as the row has.

    Of a row that is cut over ranks which do not exchange it, the largest part counts. Not covered:
    which tokens these are, and workers that run with the batch's own mask.
    """
    if not any(rank.get("attended") for rank in ctx.evidence["ranks"]):
        ctx.skip("no worker told of a mask of its own")
    first, wrong = 0, {}
    for rank in _noted(ctx, "rows", lists=("indices",)):
        for told in rank.get("attended") or ():
            held = rank["indices"][told["micro_batch"]]
            for row, length, seen in zip(held, told["lengths"], told["seen"], strict=False):
                if row >= 0 and seen != length:
                    wrong[first + row] = (seen, length)
        first += int(rank["rows"])
    if wrong:
        row, (seen, length) = min(wrong.items())
        yield ctx.fail(
            "attention_mask",
            rows=np.asarray(sorted(wrong), np.int64),
            expected=f"all {length} tokens of row {row}",
            actual=f"{seen}; {len(wrong)} rows are attended to otherwise than in full",
            causes=("wrong_attention_mask",),
        )
