"""Rows that disagree while the rest of the batch agrees (DPA305, DPA310 to DPA312).

Where nobody told the precision, the batch itself shows how far two passes lie apart: by what most
rows differ. Compared are old with rollout log-probs, and old with reference where the two are
equal bit for bit on most rows, which only equal weights explain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_max
from dataproto_audit.probes.context import Context, row_numbers
from dataproto_audit.probes.logprobs import incomparable, noise_of
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.repairs import SHIFTS
from dataproto_audit.probes.scan import TRAINED_TOKENS, masked_gap, per_row

ROW_FACTOR = 20.0
LEAST = 0.1
"""A row stands out when its largest gap is both this many times that of the median row, and this
many nats. Heavy tails of half precision reach a factor of about 10 between rows."""
CELL_FACTOR = 2.0
"""Cells of such a row count from this many times the largest gap of the other rows."""
SEEN = 0.03
"""Nats. bf16 autocast against float32 differed by at most 0.028 over 73 runs of a small model."""
MOST_NATS = 20.0
"""Gaps are cut here before they are exponentiated."""
SHIFT_FACTOR = 5.0
"""A shift explains a row when the row is this many times as far off as the median one, and the
shift brings it this many times nearer."""
LEAST_SHIFTED = 5
"""Tokens of a row below which a shift that fits may be chance."""
FEW = 3
"""Rows below which there is no usual row, and tokens below which there is no unusual one."""
ISOLATED = 0.2
"""Share of a row's tokens below which those that stand out are single tokens, and no row."""
MULTIPLE = 1.05
"""Mean of exp(|old - rollout|) up to which single tokens are left to the kernels: NeMo-RL's
``token_mult_prob_error``, whose guide asks to look from here on (docs/guides/grpo.md)."""
REF_GAP = "audit/ref_gap_max"
"""Largest gap between old and reference log-probs of a step."""
BOTH = ("old_log_probs", "rollout_log_probs", "response_mask")
GAP = masked_gap(*BOTH[:2])
TO_REFERENCE = masked_gap("old_log_probs", "ref_log_prob")


def _gap(view: BatchView, left: str, right: str) -> NDArray[np.float64]:
    """``|left - right|`` on trained tokens, 0 elsewhere and where one is not finite; ``[B,R]``."""
    gap: NDArray[np.float64] = np.abs(
        np.subtract(view.numpy(left), view.numpy(right), dtype=np.float64)
    )
    gap[(view.numpy("response_mask") == 0) | ~np.isfinite(gap)] = 0.0
    return gap


def _standing_out(of_row: NDArray[np.float64]) -> tuple[Any, float]:
    """Rows that stand out by their largest gap ``[B]``, and the largest gap of the others."""
    trained = of_row[of_row > 0]
    if len(trained) < FEW:
        return np.zeros(len(of_row), bool), 0.0
    out = of_row > max(ROW_FACTOR * float(np.median(trained)), LEAST)
    return out, float(of_row[~out].max(initial=0.0))


def _shifted(
    view: BatchView, gap: NDArray[np.float64]
) -> tuple[int, NDArray[np.bool_], dict[str, str]]:
    """A shift of old log-probs by one or two columns that makes some rows agree as the others do:
    how far, in which rows ``[B]``, and how well. ``gap`` is :func:`_gap` of the two.

    Where most rows disagree, the whole batch is another check's; a row of few tokens tells nothing.
    Before and after are means over the same tokens, so that one odd token at an end counts neither
    way. Only rows whose whole gap could be that large are shifted: in good health, none.
    """
    old, rollout = (view.numpy(name) for name in BOTH[:2])
    mask = (view.numpy("response_mask") != 0) & np.isfinite(old) & np.isfinite(rollout)
    size, total, trained = mask.sum(1), gap.sum(1), mask.any(1)
    usual = float(np.median(total[trained] / size[trained]))
    least = max(SEEN, SHIFT_FACTOR * usual)
    best: tuple[Any, int, float, float] = (np.zeros(0, np.int64), 0, 0.0, 0.0)
    for by in SHIFTS:
        if abs(by) >= old.shape[1]:
            continue
        both = mask & np.roll(mask, by, 1)
        both[:, slice(by) if by > 0 else slice(by, None)] = False  # came from the other end
        held = both.sum(1)
        rows = np.flatnonzero((held >= LEAST_SHIFTED) & (total > least * held))
        here, right = both[rows], rollout[rows].astype(np.float64)
        before, after = (
            np.where(here, np.abs(left - right), 0.0).sum(1) / held[rows]
            for left in (old[rows], np.roll(old[rows], by, 1))
        )
        fits = (before > least) & (after * SHIFT_FACTOR < before)
        if len(best[0]) < fits.sum() < trained.sum() / 2:
            best = rows[fits], by, float(before[fits].mean()), float(after[fits].mean())
    rows, by, off, left = best
    shown = np.zeros(len(old), bool)
    shown[rows] = True
    return by, shown, {f"shift by {by:+d}": f"mean gap {off:.3g} -> {left:.3g} nats"}


@probe("DPA310", stages=("old_log_prob",), needs=BOTH, stats=(GAP,), applies=incomparable)
def rows_alike(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """No row's log-probs [B,R] disagree far more than those of most rows.

    Judged only where the noise model has no bound for a single token; with one, DPA303 says more.
    Single tokens far off are ``info`` where the batch as a whole is as near as published runs are.
    """
    if noise_of(view, ctx, "old_log_probs", "rollout_log_probs").token is not None:
        ctx.skip("single tokens have a bound of their own")
    versions = row_numbers(view, "weight_version")
    if versions is not None and len(np.unique(versions)) > 1:
        ctx.skip("rows of several weight versions")
    largest = stats[GAP.name].largest
    out, rest = _standing_out(stats[GAP.name].row_max)
    if largest <= SEEN:
        return
    gap = _gap(view, *BOTH[:2])
    by, shifted, told = _shifted(view, gap)
    if by:
        yield ctx.fail(
            "old_log_probs",
            code="DPA304",
            cells=shifted[:, None] & (gap > 0),
            expected="rollout_log_probs of the same columns, as in the other rows",
            actual=f"those of other columns in {int(shifted.sum())} rows",
            evidence=told,
            causes=("shift", "row_outlier"),
            hint="column t of old_log_probs must score responses[:, t]",
        )
        return
    bad = out[:, None] & (gap > CELL_FACTOR * rest)
    trained = view.numpy("response_mask") != 0
    multiple = float(np.exp(np.minimum(gap[trained], MOST_NATS)).mean()) if trained.any() else 1.0
    if multiple <= MULTIPLE:
        bad &= (bad.sum(1) >= np.maximum(FEW, ISOLATED * trained.sum(1)))[:, None]
    if not bad.any():
        yield ctx.fail(
            "old_log_probs",
            severity="info",
            cells=gap > SEEN,
            expected=f"within {SEEN:g} nats, the most that half precision showed on small models",
            actual=f"up to {largest:.4g} on {int((gap > SEEN).sum())} tokens",
            causes=("precision", "stale_rollout_weights", "sampling_filter", "row_outlier"),
            hint="tell precision and staleness, or pass model= to recompute",
        )
    if bad.any():
        old, rollout = (view.numpy(name)[bad] for name in BOTH[:2])
        suspect = "rollout_log_probs" if rollout.min() < 2 * old.min() else "old_log_probs"
        yield ctx.fail(
            suspect,
            cells=bad,
            expected=f"within {CELL_FACTOR:g} times the {rest:.3g} nats of the other rows",
            actual=f"up to {np.abs(old - rollout).max():.4g} nats on {int(bad.sum())} tokens",
            evidence={
                "rows": int(bad.any(1).sum()),
                "largest gap of the others": rest,
                "token_mult_prob_error": multiple,
            },
            causes=("row_outlier", "cross_row_leakage", "dropout_on", "forced_token"),
        )


@probe(
    "DPA311",
    stages=("old_log_prob",),
    needs=(*BOTH, "weight_version"),
    stats=(GAP,),
    applies=incomparable,
    absent=lambda view, ctx: (
        "every rollout comes from the newest weights, as configured"
        if "weight_version" not in view and ctx.settings.on_policy
        else ""
    ),
)
def one_weight_version(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Rows of an older weight version do not disagree where rows of the newest agree.

    Runs that declare staleness (``on_policy=False``) are left out. Where old log-probs were
    computed by a version that no rollout came from, ratios are anchored to a policy that sampled
    nothing: ``warn``, since a correction for it may be configured.
    """
    versions = row_numbers(view, "weight_version")
    if versions is None:
        ctx.unknown("weight_version does not hold one number a row")
    gap = stats[GAP.name].row_max
    newest = versions == versions.max()
    older, usual = gap[~newest], float(gap[newest].max(initial=0.0))
    if len(older) and older.max() > max(ROW_FACTOR * usual, LEAST):
        yield ctx.fail(
            "rollout_log_probs",
            rows=np.flatnonzero(~newest & (gap > max(CELL_FACTOR * usual, LEAST))),
            expected=f"within {usual:.3g} nats, as rows of version {versions.max():g}",
            actual=f"up to {older.max():.4g} nats in rows of older versions",
            causes=("stale_prefix_cache", "stale_rollout_weights"),
        )
    scored_by = ctx.evidence.get("old_log_prob_version")
    if isinstance(scored_by, (int, float)) and (versions != scored_by).all():
        yield ctx.fail(
            "old_log_probs",
            severity="warn",
            rows=range(view.rows),
            expected=f"old log-probs of version {versions.max():g}, which sampled the rows",
            actual=f"of version {scored_by:g}",
            causes=("stale_rollout_weights",),
            hint="configure a correction, or take the rollout's log-probs as old ones",
        )


@probe(
    "DPA312",
    stages=("old_log_prob",),
    needs=BOTH,
    stats=(GAP,),
    applies=lambda ctx: "" if ctx.settings.exact_log_probs else "nobody promised equal bits",
)
def exactly_equal(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Where engine and trainer promise bit-equal log-probs [B,R], they are."""
    if stats[GAP.name].largest:
        bad = _gap(view, *BOTH[:2]) != 0
        yield ctx.fail(
            "old_log_probs",
            cells=bad,
            expected="rollout_log_probs, bit for bit (declared)",
            actual=f"{int(bad.sum())} tokens differ",
            causes=("precision", "backend_drift"),
        )


@probe(
    "DPA305",
    stages=("ref_log_prob",),
    needs=("old_log_probs", "ref_log_prob", "response_mask"),
    stats=(TO_REFERENCE, TRAINED_TOKENS),
    applies=lambda ctx: (
        "old_ref_first says more" if ctx.settings.ref_from_actor and ctx.step == 1 else ""
    ),
)
def ref_equal_elsewhere(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Where reference and old log-probs [B,R] are bit-equal on most rows, they are on all.

    Equality on whole rows means equal weights, and equal weights score every row alike.
    """
    largest, trained = stats[TO_REFERENCE.name].largest, stats[TRAINED_TOKENS.name] > 0
    ctx.measure(REF_GAP, largest)
    equal = (stats[TO_REFERENCE.name].row_max == 0) & trained
    if 2 * equal.sum() < trained.sum() or equal.sum() < FEW:
        ctx.skip("the policy has moved away from the reference")
    if largest > LEAST:
        gap = _gap(view, "old_log_probs", "ref_log_prob")
        bad = gap > LEAST
        signed = np.subtract(view.numpy("ref_log_prob"), view.numpy("old_log_probs"))[bad]
        both = bool((signed > 0).any() and (signed < 0).any())
        row, column = np.argwhere(bad)[0]
        yield ctx.fail(
            "ref_log_prob",
            cells=bad | ((gap != 0) & bad.any(1, keepdims=True)),
            expected=f"old_log_probs, as on {int(equal.sum())} other rows",
            actual=f"{np.abs(signed).max():.4g} nats apart, first at row {row}, column {column}",
            evidence={"both directions": both},
            causes=("dropout_on", "row_outlier") if both else ("row_outlier", "dropout_on"),
        )


UPDATED = ("update_log_probs", "mini_batch", "old_log_probs", "response_mask")
FLOOR = 2e-4
"""Nats. Float32 passes of one engine over one row differ by a tenth of it."""


def _first_mini_batch(block: Block) -> Any:
    gap = np.abs(block["update_log_probs"] - block["old_log_probs"])
    gap[~(block.mask & np.isfinite(gap)) | (block["mini_batch"] != 0)[:, None]] = 0.0
    return row_max(gap)


@probe(
    "DPA310",
    stages=("update_actor",),
    needs=UPDATED,
    stats=(per_row("first", UPDATED, _first_mini_batch),),
)
def update_rows_alike(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """First mini-batch: no row's new log-probs [B,R] differ from old ones far more than others'.

    Most rows show what the two passes differ by; a few that exceed it were computed otherwise, also
    where the bound of the noise model would let them pass. In half precision tails are heavy, and
    nothing is judged.
    """
    noise = noise_of(view, ctx, "update_log_probs", "old_log_probs")
    if noise.token is None:
        ctx.skip("half precision has heavy tails")
    of_row = stats["first"]
    seen = (view.numpy("mini_batch") == 0) & (view.numpy("response_mask") != 0).any(1)
    if seen.sum() <= FEW or of_row.max() <= FLOOR:
        return
    usual = float(np.median(of_row[seen]))
    out = seen & (of_row > max(ROW_FACTOR * usual, FLOOR))
    rest = float(of_row[seen & ~out].max(initial=0.0))
    old, mask = view.numpy("old_log_probs"), view.numpy("response_mask") != 0
    gap = np.abs(np.subtract(view.numpy("update_log_probs"), old, dtype=np.float64))
    if not out.any() or noise.exceeded(gap, old, mask & seen[:, None]) is not None:
        return  # beyond its bound, DPA501 says it
    bad = out[:, None] & mask & (gap > CELL_FACTOR * rest)
    yield ctx.fail(
        "update_log_probs",
        cells=bad,
        expected=f"within {rest:.3g} nats of the old ones, as the other rows",
        actual=f"up to {of_row.max():.3g} nats in {int(out.sum())} rows",
        evidence={"median of the rows": usual},
        causes=("precision", "row_outlier", "dropout_on"),
    )
