"""What shared prefixes say about log-probs, without a model and without a second log-prob.

Rows of a group share prefixes. The same token after the same prefix has one log-prob (DPA306), and
the probabilities of distinct tokens after one prefix sum to at most 1 (DPA307). Covered are cells
under the response mask whose prefix at least two rows share; images, which are part of the prefix
without being tokens, make both checks not applicable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.logprobs import PRODUCERS, named, noise_of
from dataproto_audit.probes.noise import Noise
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.trie import (
    NEEDS,
    STATS,
    SharedCells,
    largest_sum,
    prefix_sums,
    shared_cells,
    spreads,
)

IMAGES = ("multi_modal_inputs", "multi_modal_data")
SHIFTS = (1, -1)


def _cells(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> SharedCells:
    if any(name in view and any(view.numpy(name).tolist()) for name in IMAGES):
        ctx.skip("images are part of the prefix")
    cells = shared_cells(view, ctx, stats)
    if not len(cells.start):
        ctx.unknown("no two rows share a prefix")
    return cells


def _shift_repairs(view: BatchView, cells: SharedCells, field: str, noise: Noise, bad: Any) -> str:
    """The column shift of ``field`` after which both checks hold, in words; '' if there is none.

    A shift for which no cell of ``bad [B,R]`` has a source repairs nothing.
    """
    whole, width = view.numpy(field), view.numpy(field).shape[1]
    for shift in SHIFTS:
        source = cells.column + shift
        inside = (source >= 0) & (source < width)
        values = np.where(inside, whole[cells.row, source.clip(0, width - 1)], np.nan)
        values = values.astype(np.float64)
        wrong = len(spreads(cells, values, noise)[2])
        wrong += int((prefix_sums(cells, values) > largest_sum(noise)).sum())
        if (inside & bad[cells.row, cells.column]).any() and not wrong:
            return f"nothing wrong after a shift by {-shift:+d}"
    return ""


def _found(
    view: BatchView,
    ctx: Context,
    cells: SharedCells,
    field: str,
    noise: Noise,
    others: tuple[str, ...],
    *,
    bad: Any,
    expected: str,
    actual: str,
    evidence: dict[str, Any],
) -> Finding:
    """A finding whose first cause is a shift where a shift repairs it.

    Rows of one batch that were sampled with different weights contradict each other, too; unless
    that is excluded, what the rollout says is not held against it.
    """
    repair = _shift_repairs(view, cells, field, noise, bad)
    if repair:
        evidence["shift"] = repair
    mixed = field == "rollout_log_probs" and ctx.settings.on_policy is None and not repair
    return ctx.fail(
        field,
        severity="info" if mixed else None,
        cells=bad,
        expected=expected,
        actual=actual,
        evidence=evidence,
        causes=("shift", *others) if repair else others,
        hint="tell whether all rows were sampled with the same weights" if mixed else "",
    )


def _late(cells: SharedCells, values: Any, noise: Noise) -> int:
    """Prefixes after which all distinct tokens have one log-prob, if that is so after every one.

    That is what log-probs of the token before look like. A uniform policy looks the same, but
    there the value does not differ from prefix to prefix either.
    """
    prefix, first = cells.prefix[cells.start], values[cells.start]
    starts = np.flatnonzero(np.diff(prefix, prepend=-1))
    several = np.diff(starts, append=len(prefix)) > 1
    if noise.token is None or several.sum() < 8 or not np.isfinite(first).all():
        return 0
    low = np.minimum.reduceat(first, starts)[several]
    high = np.maximum.reduceat(first, starts)[several]
    alike = bool((high - low <= noise.token / 10).all()) and float(low.std()) > 0.1
    return int(several.sum()) if alike else 0


def _prefix_probes(field: str, stage: str) -> None:
    """Register the two shared-prefix checks of one log-prob field."""
    needs = (field, *NEEDS)

    def one_policy(ctx: Context) -> str:
        stale = field == "rollout_log_probs" and ctx.settings.on_policy is False
        return "rows may come from different weights" if stale else ""

    def agrees(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        cells = _cells(view, stats, ctx)
        noise = noise_of(view, ctx, field, field)
        values = view.numpy(field)[cells.row, cells.column].astype(np.float64)
        spread, bound, wrong = spreads(cells, values, noise)
        ctx.measure(f"audit/trie_spread_max/{field}", float(spread.max()))
        if len(wrong):
            bad = np.zeros(view.numpy(field).shape, bool)
            end = cells.start + cells.sizes()
            for pair in wrong.tolist():
                part = slice(int(cells.start[pair]), int(end[pair]))
                off = np.abs(values[part] - np.median(values[part])) > bound[pair] / 2
                bad[cells.row[part][off], cells.column[part][off]] = True
            worst = int(wrong[spread[wrong].argmax()])
            yield _found(
                view, ctx, cells, field, noise,
                ("row_permutation", "cross_row_leakage", "shift"),
                bad=bad,
                expected="one log-prob for one token after one prefix",
                actual=f"spread {spread[worst]:.4g} over equal prefixes",
                evidence={"noise model": noise.name, "bound": float(bound[worst]),
                          "pairs wrong": len(wrong), "pairs": len(cells.start)},
            )  # fmt: skip
        elif late := _late(cells, values, noise):
            yield ctx.fail(
                field,
                code="DPA304",
                cells=view.numpy("response_mask") != 0,
                expected="distinct tokens after one prefix with log-probs of their own",
                actual=f"one log-prob for all of them after each of {late} prefixes",
                evidence={"noise model": noise.name, "prefixes": late},
                causes=("shift",),
                hint=f"column t of {field} must score responses[:, t]",
            )

    def sums(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        cells = _cells(view, stats, ctx)
        noise = noise_of(view, ctx, field, field)
        values = view.numpy(field)[cells.row, cells.column].astype(np.float64)
        total = prefix_sums(cells, values)
        wrong = np.flatnonzero(total > largest_sum(noise))
        if len(wrong):
            bad = np.zeros(view.numpy(field).shape, bool)
            inside = np.isin(cells.prefix, wrong)
            bad[cells.row[inside], cells.column[inside]] = True
            yield _found(
                view, ctx, cells, field, noise,
                ("positive_log_prob", "row_permutation", "shift"),
                bad=bad,
                expected="probabilities of distinct next tokens sum to at most 1",
                actual=f"up to {total.max():.4g} after one prefix",
                evidence={"prefixes wrong": len(wrong), "bound": largest_sum(noise)},
            )  # fmt: skip

    probe("DPA306", stages=(stage,), needs=needs, stats=STATS, applies=one_policy)(
        named(agrees, f"{field}_same_prefix", f"{field}: equal prefix and token, equal value.")
    )
    probe("DPA307", stages=(stage,), needs=needs, stats=STATS, applies=one_policy)(
        named(sums, f"{field}_prefix_sum", f"{field}: next-token probabilities sum to <= 1.")
    )


for _field, _stage in PRODUCERS.items():
    _prefix_probes(_field, _stage)
