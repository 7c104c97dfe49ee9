"""Which ids there may be, and where a response is over (DPA215, DPA216).

Shapes: B rows, P prompt columns, R response columns, T = P + R. Not covered: stop strings, which
are no ids, and ids that exist in the embedding and in no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.masks import AT, readable
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, Stat
from dataproto_audit.reasons import SettingUnknown


def _range(block: Block) -> tuple[int, int]:
    ids = block["input_ids"]
    return (int(ids.min()), int(ids.max())) if ids.size else (0, 0)


ID_RANGE = Stat("id_range", ("input_ids",), _range, list)


@probe("DPA215", stages=AT, needs=("input_ids", *ATTENDED), stats=(ID_RANGE,))
def ids_in_vocabulary(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Attended input_ids [B,T] lie in 0 to ``vocab_size`` - 1. Padding may hold any id."""
    size = ctx.settings.vocab_size
    lowest = min(low for low, _ in stats[ID_RANGE.name])
    highest = max(high for _, high in stats[ID_RANGE.name])
    if lowest < 0 or (size is not None and highest >= size):
        ids = view.numpy("input_ids")
        bad = (ids < 0) if size is None else (ids < 0) | (ids >= size)
        bad &= Block(view, slice(None)).attended
        if bad.any():
            row, column = np.argwhere(bad)[0]
            yield ctx.fail(
                "input_ids",
                cells=bad,
                expected="ids from 0 on" if size is None else f"ids from 0 to {size - 1}",
                actual=f"{int(ids[row, column])} at row {row}, column {column}; "
                f"{int(bad.sum())} such tokens",
                causes=("wrong_dtype", "stale_buffer"),
                hint="the embedding has no such row: an index error on CPU, a device assert on GPU",
            )
            return
    if size is None:
        ctx.unknown(SettingUnknown.of("vocab_size"))


def _inside(view: BatchView, stops: Sequence[int]) -> tuple[Any, Any]:
    """Rows and columns of attended stop ids whose next column is attended, too."""
    ids, attention, start = view.numpy("responses"), view.attention, view.prompt or 0
    found = np.zeros(ids.shape, bool)
    for stop in stops:
        found |= ids == stop
    rows, columns = np.divmod(np.flatnonzero(found), max(ids.shape[1], 1))
    inner = columns < ids.shape[1] - 1
    rows, columns = rows[inner], columns[inner]
    assert attention is not None  # ATTENDED is needed
    on = attention[rows, start + columns] != 0
    on &= attention[rows, start + columns + 1] != 0
    return rows[on], columns[on]


def _over(ctx: Context) -> str:
    """Why a stop id may stand inside a response; '' where nothing is known to allow it."""
    if ctx.settings.multi_turn:
        return "each of several turns may end in a stop id"
    sampling = ctx.given("sampling")
    return "the engine was told to ignore stop ids" if (sampling or {}).get("ignore_eos") else ""


@probe(
    "DPA216",
    stages=AT,
    needs=(*ATTENDED, "settings.stop_ids"),
    applies=_over,
)
def nothing_after_stop(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """In a single turn no attended token of responses [B,R] follows a stop id.

    Stop and pad ids may follow: that they are attended is for other checks. Where nobody told
    whether there are several turns, a response mask with holes says that there are, and without
    holes the finding is a ``warn``.
    """
    listed = sorted(ctx.settings.stop_ids or ())
    rows, columns = _inside(view, listed)
    if not len(rows):
        return
    block, responses = Block(view, slice(None)), view.numpy("responses")
    attended, stops = block.response_attention, np.zeros(responses.shape, bool)
    stops[rows, columns] = True
    after = np.zeros(responses.shape, bool)
    after[:, 1:] = np.logical_or.accumulate(stops[:, :-1], axis=1)
    free = [*listed, *([] if ctx.settings.pad_id is None else [ctx.settings.pad_id])]
    after &= attended & ~np.isin(responses, free)
    if not after.any():
        return
    known = ctx.settings.multi_turn is False
    if not known and readable("response_mask", view, ctx) and (attended & ~block.mask).any():
        ctx.skip("several turns: the response mask leaves tokens out")
    row = int(np.flatnonzero(after.any(1))[0])
    first = int(np.flatnonzero(stops[row])[0])
    yield ctx.fail(
        "responses",
        cells=after,
        severity="fail" if known else "warn",
        expected=f"no token after the stop id {int(responses[row, first])} at column {first} of "
        f"row {row}",
        actual=f"{int(after.sum())} tokens after a stop id in {int(after.any(1).sum())} rows",
        evidence={"stop ids": listed},
        causes=("wrong_stop_token", "stale_buffer"),
        hint="compare the engine's stop ids; of several turns, say multi_turn=True",
    )
