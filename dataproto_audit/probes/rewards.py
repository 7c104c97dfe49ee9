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

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_sum
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, RESPONSE_LENGTH, any_of, per_row

AT = ("reward", "validation")
SCORES = "token_level_scores"
MODEL = "rm_scores"
SCORE_SUM = per_row("score_sum", (SCORES,), lambda block: row_sum(block[SCORES], np.float64))
SCORED = per_row("scored", (SCORES,), lambda block: row_sum(block[SCORES] != 0))
"""Non-zero scores of each row."""


@probe("DPA407", stages=AT, needs=(SCORES,), stats=(SCORE_SUM,), basic=True)
def reward_finite(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Every token-level score is finite, and so is every scalar ``score`` where there are such.

    Comes first: what is not finite has no place and no sum that other checks could speak of.
    """
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
            return
    scalar = _plain(view)
    if scalar is not None and not np.isfinite(scalar).all():
        yield ctx.fail(
            "score",
            rows=np.flatnonzero(~np.isfinite(scalar)),
            expected="finite scores",
            actual="NaN or infinity",
            causes=("non_finite",),
        )


def _sum_is_odd(block: Block) -> bool:
    return not np.isfinite(block[MODEL].sum(dtype=np.float64))


@probe(
    "DPA407",
    stages=("reward",),
    needs=(MODEL,),
    stats=(any_of("odd_model_scores", (MODEL,), _sum_is_odd),),
    basic=True,
)
def model_scores_finite(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """rm_scores [B,R], which token_level_scores are taken from, are finite.

    What is not finite in both is said of token_level_scores alone.
    """
    if stats["odd_model_scores"]:
        bad = ~np.isfinite(view.numpy(MODEL))
        if SCORES in view.tensors and view.numpy(SCORES).shape == bad.shape:
            bad &= np.isfinite(view.numpy(SCORES))
        if bad.any():
            yield ctx.fail(
                MODEL,
                cells=bad,
                expected="finite scores",
                actual=f"NaN or infinity in {int(bad.any(1).sum())} rows",
                causes=("non_finite",),
            )


@probe(
    "DPA405",
    stages=AT,
    needs=(SCORES, *ATTENDED),
    stats=(RESPONSE_LENGTH, SCORED),
    applies=lambda ctx: "process reward" if ctx.number("process_reward") else "",
)
def reward_placement(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The only non-zero score of a row is at its last attended response token.

    A row without any response token has no place for a score: its only place would be the column
    before the first, which wraps around to the last one. verl writes it there up to 0.9.1, and runs
    on (an aborted response of v0 with a score below 0); it is reported all the same, since the
    estimators sum rewards without the mask, so that the score moves the whole group (verl #6476,
    #6310; mended in #6508). A score of 0 is none.
    """
    scores, scored = view.numpy(SCORES), stats["scored"]
    repeated = _repeated(view, ctx, scores, scored)
    if 2 * (scored > 1).sum() > (scored > 0).sum() and not repeated:
        ctx.skip("process reward: most rows have scores on several tokens")
    last = stats["response_length"] - 1
    outside = scored - ((scores[np.arange(len(scores)), last] != 0) & (last >= 0))
    if not outside.any():
        return
    bad = (scores != 0) & np.isfinite(scores)
    filled = last >= 0
    bad[filled, last[filled]] = False
    if not bad.any():  # all that is outside is not finite
        return
    row, column = np.argwhere(bad)[0]
    on_padding = column > last[row]
    yield ctx.fail(
        SCORES,
        cells=bad,
        expected=(
            f"non-zero only at column {int(last[row])} of row {row}"
            if last[row] >= 0
            else f"no score in row {row}, which has no response token"
        ),
        actual=f"{scores[row, column]:.4g} at column {column}",
        evidence={"offset": int(column) - int(last[row])},
        causes=(
            ("reward_on_every_token", "reward_shifted")
            if repeated
            else ("reward_on_padding", "reward_shifted")
            if on_padding
            else ("reward_shifted", "row_permutation")
        ),
    )


def _repeated(view: BatchView, ctx: Context, scores: Any, scored: Any) -> bool:
    """True where every row with several scores holds its own scalar score in each of them."""
    rows = np.flatnonzero(scored > 1)
    if not len(rows) or "score" not in view or view.numpy("score").shape != (view.rows,):
        return False
    try:
        own = np.array([float(view.numpy("score")[row]) for row in rows])
    except (TypeError, ValueError):
        return False
    cells = scores[rows]
    same = np.abs(cells - own[:, None]) <= 1e-5 * np.maximum(1.0, np.abs(own))[:, None]
    return bool((same | (cells == 0)).all())


@probe("DPA406", stages=AT, needs=("score", SCORES), stats=(SCORE_SUM,))
def reward_sum(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The row sum of token_level_scores is the scalar score, within rounding (1e-6 in float32)."""
    scalar, total = _numbers(view, ctx), stats["score_sum"]
    unit = max(1e-6, 4 * torch.finfo(view.tensors[SCORES].dtype).eps)
    bad = ~(np.abs(total - scalar) <= unit * np.maximum(1.0, np.abs(scalar)))
    bad &= np.isfinite(total) & np.isfinite(scalar)
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
    scalar = _plain(view)
    if scalar is None:
        ctx.unknown("score holds other things than numbers")
    return scalar


def _plain(view: BatchView) -> Any:
    """The same, or None where there are none or other things."""
    if "score" not in view:
        return None
    try:
        return np.asarray([float(value) for value in view.numpy("score").tolist()], np.float64)
    except (TypeError, ValueError):
        return None
