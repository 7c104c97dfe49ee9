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
from dataproto_audit.probes.prefix_causes import causes_of
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.trie import (
    NEEDS,
    SharedCells,
    beyond_one,
    largest_sum,
    prefix_sums,
    shared_cells,
    spreads,
)

IMAGES = ("multi_modal_inputs", "multi_modal_data")


def _cells(view: BatchView, ctx: Context) -> SharedCells:
    if any(name in view and any(view.numpy(name).tolist()) for name in IMAGES):
        ctx.skip("images are part of the prefix")
    cells = shared_cells(view, ctx)
    if not len(cells.start):
        ctx.unknown("no two rows share a prefix")
    return cells


def _found(
    view: BatchView,
    ctx: Context,
    cells: SharedCells,
    field: str,
    noise: Noise,
    others: tuple[str, ...],
    *,
    bad: Any,
    wrong: int,
    odd: bool,
    expected: str,
    actual: str,
    evidence: dict[str, Any],
    hidden: str = "",
) -> Finding:
    """A finding whose first causes are those that a test supports.

    Where a second pass of another engine contradicts itself alike (``hidden``), both saw something
    that is not among the ids, so the rows do not share what the check takes for a prefix.

    Rows of one batch that were sampled with different weights contradict each other, too; unless
    that is excluded, what the rollout says is not held against it.
    """
    tested = dict(causes_of(view, cells, field, noise, bad=bad, wrong=wrong, odd=odd))
    evidence |= {cause: said for cause, said in tested.items() if said}
    if "shift" not in tested and hidden:
        ctx.unknown(f"{hidden} says so, too: something beside the ids belongs to the prefix")
    if "shift" not in tested and field == "rollout_log_probs" and ctx.settings.on_policy is None:
        ctx.unknown("tell settings.on_policy: rows of other weights contradict each other, too")
    return ctx.fail(
        field,
        cells=bad,
        expected=expected,
        actual=actual,
        evidence=evidence,
        causes=(*tested, *others),
    )


def _other_pass_agrees(
    view: BatchView, ctx: Context, cells: SharedCells, field: str, wrong: Any
) -> str:
    """The log-probs of another engine that sum to more than 1 after the same prefixes, or ''."""
    other = "rollout_log_probs" if field != "rollout_log_probs" else "old_log_probs"
    if other not in view.tensors or other in ctx.broken:
        return ""
    bound = largest_sum(noise_of(view, ctx, other, other))
    total = prefix_sums(cells, view.numpy(other)[cells.row, cells.column].astype(np.float64))
    return other if (total[wrong] > bound).all() else ""


def _late(cells: SharedCells, values: Any, noise: Noise) -> int:
    """Prefixes after which all distinct tokens have one log-prob, if that is so after every one.

    That is what log-probs of the token before look like. A uniform policy looks the same, but
    there the value does not differ from prefix to prefix either.
    """
    first, (starts, several) = values[cells.start], cells.prefixes
    if noise.token is None or np.count_nonzero(several) < 8 or not np.isfinite(first).all():
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
        cells = _cells(view, ctx)
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
                ("cross_row_leakage", "row_permutation"),
                bad=bad,
                wrong=len(wrong),
                odd=True,
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
        cells = _cells(view, ctx)
        noise = noise_of(view, ctx, field, field)
        values = view.numpy(field)[cells.row, cells.column].astype(np.float64)
        total, wrong = beyond_one(cells, values, noise)
        if len(wrong):
            bad = np.zeros(view.numpy(field).shape, bool)
            inside = np.isin(cells.prefix, wrong)
            bad[cells.row[inside], cells.column[inside]] = True
            hidden = _other_pass_agrees(view, ctx, cells, field, wrong)
            yield _found(
                view, ctx, cells, field, noise,
                ("positive_log_prob", "row_permutation"),
                bad=bad,
                wrong=len(wrong),
                odd=False,
                expected="probabilities of distinct next tokens sum to at most 1",
                actual=f"up to {total.max():.4g} after one prefix",
                evidence={"prefixes wrong": len(wrong), "bound": largest_sum(noise)},
                hidden=hidden,
            )  # fmt: skip

    probe("DPA306", stages=(stage,), needs=needs, applies=one_policy)(
        named(agrees, f"{field}_same_prefix", f"{field}: equal prefix and token, equal value.")
    )
    probe("DPA307", stages=(stage,), needs=needs, applies=one_policy)(
        named(sums, f"{field}_prefix_sum", f"{field}: next-token probabilities sum to <= 1.")
    )


for _field, _stage in PRODUCERS.items():
    _prefix_probes(_field, _stage)
