"""Where the reward sits and what it sums to (DPA405 to DPA407).

Outcome rewards only. A process reward, which scores several tokens of a row, makes the placement
not applicable; it is told by ``evidence["process_reward"]``, or by most scored rows having several
scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, RESPONSE_LENGTH, per_row

AT = ("reward", "validation")
SCORES = "token_level_scores"
SCORE_SUM = per_row("score_sum", (SCORES,), lambda block: block[SCORES].sum(1, dtype=np.float64))
SCORED = per_row("scored", (SCORES,), lambda block: (block[SCORES] != 0).sum(1))
"""Non-zero scores of each row."""


@probe(
    "DPA405",
    stages=AT,
    needs=(SCORES, *ATTENDED),
    stats=(RESPONSE_LENGTH, SCORED),
    applies=lambda ctx: "process reward" if ctx.evidence.get("process_reward") else "",
)
def reward_placement(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The only non-zero score of a row is at its last attended response token.

    A row without any response token may carry its score on the last column.
    """
    scores, scored = view.numpy(SCORES), stats["scored"]
    if 2 * (scored > 1).sum() > (scored > 0).sum():
        ctx.skip("process reward: most rows have scores on several tokens")
    last = stats["response_length"] - 1
    outside = scored - (scores[np.arange(len(scores)), last] != 0)
    if not outside.any():
        return
    bad = scores != 0
    bad[np.arange(len(bad)), last] = False
    row, column = np.argwhere(bad)[0]
    on_padding = column > last[row] and last[row] >= 0
    yield ctx.fail(
        SCORES,
        cells=bad,
        expected=f"non-zero only at column {int(last[row])} of row {row}",
        actual=f"{scores[row, column]:.4g} at column {column}",
        evidence={"offset": int(column) - int(last[row])},
        causes=(
            ("reward_on_padding", "reward_shifted")
            if on_padding
            else ("reward_shifted", "row_permutation")
        ),
    )


@probe("DPA406", stages=AT, needs=("score", SCORES), stats=(SCORE_SUM,))
def reward_sum(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The row sum of token_level_scores is the scalar score, within rounding (1e-6 in float32)."""
    scalar, total = _numbers(view, ctx), stats["score_sum"]
    unit = max(1e-6, 4 * torch.finfo(view.tensors[SCORES].dtype).eps)
    bad = ~(np.abs(total - scalar) <= unit * np.maximum(1.0, np.abs(scalar)))
    bad &= ~(np.isnan(total) & np.isnan(scalar))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        same = np.array_equal(np.sort(total), np.sort(scalar.astype(np.float32)))
        yield ctx.fail(
            SCORES,
            rows=np.flatnonzero(bad),
            expected=f"row {row} sums to {scalar[row]:.6g}",
            actual=f"{total[row]:.6g}",
            causes=("reward_rows_shifted",) if same else ("reward_lost", "reward_rows_shifted"),
        )


def _numbers(view: BatchView, ctx: Context) -> Any:
    """The scalar scores as float64 ``[rows]``."""
    listed = view.numpy("score").tolist()
    try:
        scalar = np.asarray([float(value) for value in listed], np.float64)
    except (TypeError, ValueError):
        ctx.unknown("score holds other things than numbers")
    return scalar


@probe("DPA407", stages=AT, needs=(SCORES,), stats=(SCORE_SUM,))
def reward_finite(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Every token-level score is finite."""
    if not np.isfinite(stats["score_sum"]).all():
        bad = ~np.isfinite(view.numpy(SCORES))
        if bad.any():
            yield ctx.fail(
                SCORES,
                cells=bad,
                expected="finite scores",
                actual="NaN or infinity",
                causes=("non_finite",),
            )
