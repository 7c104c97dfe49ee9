"""Samples of one prompt that repeat each other (DPA415)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, filling_rows
from dataproto_audit.probes.registry import probe

SURE = -20.0
"""Log-probability of a whole response below which it is not sampled twice: among a million pairs of
rows one such coincidence is expected in 500 batches."""
MOST = -2.0
"""Nats that one token counts at most: a token that was forced is improbable and no coincidence."""


def _greedy(ctx: Context) -> str:
    temperature = ctx.settings.temperature
    return "greedy decoding repeats itself" if temperature is not None and temperature <= 0 else ""


@probe(
    "DPA415",
    stages=("rollout",),
    needs=("prompts", "responses", "response_mask", "rollout_log_probs"),
    applies=_greedy,
)
def samples_differ(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """No two rows hold the same prompt and a response too improbable to be sampled twice.

    Covered are long or unlikely responses: a short one is often sampled twice in good health. Rows
    that only fill the batch up repeat others on purpose.
    """
    if MOST * (view.response or 0) > SURE:
        ctx.skip("responses this short are sampled twice in good health")
    whole = view.row_hashes("prompts") * np.uint64(3) + view.row_hashes("responses")
    filling = filling_rows(view)
    kept = np.ones(view.rows, bool) if filling is None else ~filling
    _, group, counts = np.unique(whole[kept], return_inverse=True, return_counts=True)
    if counts.max(initial=0) < 2:
        return
    mask = view.numpy("response_mask") != 0
    each = np.where(mask, view.numpy("rollout_log_probs"), 0.0).clip(min=MOST)
    likely = each.sum(1, dtype=np.float64)[kept]
    bad = np.flatnonzero(kept)[(counts[group] > 1) & (likely < SURE)]
    if len(bad):
        yield ctx.fail(
            "responses",
            rows=bad,
            expected="samples of their own for each row of a prompt",
            actual=f"{len(bad)} rows repeat another one",
            evidence={"log-probability of such a response": float(likely[likely < SURE].max())},
            causes=("same_seed", "repeated_twice"),
            hint="give each request, or each engine, a seed of its own",
        )
