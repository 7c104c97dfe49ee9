"""Exact zeros that stand for 'not computed' (DPA304, DPA309, DPA414).

A log-prob of exactly 0.0 is a certain token: healthy where the trainer is certain, too, or where
others are nearly certain: rounding makes 0.0 only of probabilities that differ from 1 by less than
6e-8, and a policy that is so sure of some tokens is a little less sure of more of them. A value of
exactly 0.0 is possible, but not in a few cells of a batch whose other values are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, filling_rows
from dataproto_audit.probes.prefix_causes import zeros
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, any_of, some

CERTAIN = 0.03
"""Nats within which half precision may see a certain token."""
NEARLY = 0.01
"""Nats from 0 within which a token is nearly certain: 12 nats of logits lie between that and 0."""
FEWEST = 3
"""Zeros from which the lack of nearly certain tokens is no coincidence."""
SHARE = 0.25
"""Nearly certain tokens for each certain one that make zeros credible."""
BOTH = ("rollout_log_probs", "old_log_probs", "response_mask")


def _off_mask(block: Block) -> bool:
    return some((block["rollout_log_probs"] != 0) & ~block.mask)


@probe(
    "DPA304",
    stages=("rollout",),
    needs=("rollout_log_probs", "response_mask"),
    stats=(any_of("off_mask", ("rollout_log_probs", "response_mask"), _off_mask),),
    later=False,
)
def log_probs_in_place(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """No row's log-probs [B,R] fill its first columns while its mask has gaps there.

    As many values as trained tokens, from column 0 on, some on tokens that are not trained: they
    were joined without the gaps. Other values off the mask say nothing.
    """
    if not stats["off_mask"]:
        return
    values, mask = view.numpy("rollout_log_probs"), view.numpy("response_mask") != 0
    there, count = values != 0, mask.sum(1)
    first = np.arange(mask.shape[1])[None] < count[:, None]
    joined = (there == first).all(1) & (first != mask).any(1)
    stray = (there & ~mask).any(1)
    if not joined.any() or 2 * joined.sum() < stray.sum():
        return
    apart = np.zeros_like(values)
    apart[mask & joined[:, None]] = values[first & joined[:, None]]
    bad = (values != apart) & joined[:, None]
    yield ctx.fail(
        "rollout_log_probs",
        cells=bad,
        expected="log-probs on trained tokens, 0 between them",
        actual=f"{int(joined.sum())} rows filled from column 0 on, their last trained tokens empty",
        evidence={"rows with gaps": int((first != mask).any(1).sum())},
        causes=("shift", "placeholder_log_prob"),
        hint="leave as many zeros between two turns as the tool wrote tokens",
    )


ZERO = any_of(
    "zero",
    ("rollout_log_probs", "response_mask"),
    lambda block: some((block["rollout_log_probs"] == 0) & block.mask),
)


@probe(
    "DPA309",
    stages=("rollout",),
    needs=("rollout_log_probs", "response_mask", *ATTENDED, "settings.top_p", "settings.top_k"),
    stats=(ZERO,),
    applies=lambda ctx: _sampled_with_filter(ctx) or _greedy(ctx),
    later=False,
)
def zeros_are_certain(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Log-probs [B,R] of exactly 0.0 come with others that are nearly 0.

    Not covered here: fewer than three zeros, and batches that are mostly zeros; old log-probs tell
    of those.
    """
    if not stats["zero"]:
        return
    block, values = Block(view, slice(None)), view.numpy("rollout_log_probs")
    mask, filling = block.mask & block.response_attention, filling_rows(view)
    if filling is not None:
        mask = mask & ~filling[:, None]
    zero = (values == 0) & mask
    nearly = int(((values < 0) & (values > -NEARLY) & mask).sum())
    count = int(zero.sum())
    if count < FEWEST or nearly >= SHARE * count or 2 * count > mask.sum():
        ctx.skip("zeros among nearly certain tokens, or too few or too many of them to tell")
    causes = zeros(zero, mask)
    if causes[0] == "mask_on_tool" and ctx.settings.multi_turn is False:
        causes = causes[::-1]
    yield ctx.fail(
        "response_mask" if causes[0] == "mask_on_tool" else "rollout_log_probs",
        cells=zero,
        expected="the engine's log-prob of every trained token",
        actual=f"exactly 0.0 on {count} of {int(mask.sum())} trained tokens",
        evidence={f"tokens within {NEARLY:g} nats of 0": nearly},
        causes=causes,
        hint="0.0 is what stands for tokens that the engine did not sample",
    )


def _greedy(ctx: Context) -> str:
    temperature = ctx.settings.temperature
    return "greedy" if temperature is not None and temperature <= 0 else ""


def _filled_in(block: Block) -> Any:
    zero = (block["rollout_log_probs"] == 0) & block.mask
    return zero & (block["old_log_probs"] < -CERTAIN)


def _sampled_with_filter(ctx: Context) -> str:
    return "a filter may leave one token only" if ctx.settings.filtered else ""


@probe(
    "DPA309",
    stages=("old_log_prob",),
    needs=BOTH,
    stats=(any_of("filled_in", BOTH, lambda block: some(_filled_in(block))),),
    applies=_sampled_with_filter,
)
def no_placeholder_log_probs(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """rollout_log_probs [B,R] is exactly 0.0 on a trained token only where old is about 0, too."""
    if stats["filled_in"]:
        block = Block(view, slice(None))
        bad = _filled_in(block)
        yield ctx.fail(
            "rollout_log_probs",
            stage="rollout",
            cells=bad,
            expected="the engine's log-prob of every trained token",
            actual=f"exactly 0.0 on {int(bad.sum())} tokens that old scores down to "
            f"{view.numpy('old_log_probs')[bad].min():.4g}",
            causes=(*zeros(bad, block.mask), "shift"),
            hint="0.0 is what stands for tokens that the engine did not sample",
        )


@probe("DPA414", stages=("values",), needs=("values", "response_mask"))
def no_placeholder_values(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """values [B,R] is nowhere exactly 0.0 on a trained token, unless it mostly is."""
    mask = view.numpy("response_mask") != 0
    bad = (view.numpy("values") == 0) & mask
    if bad.any() and 2 * bad.sum() < mask.sum():
        yield ctx.fail(
            "values",
            cells=bad,
            expected="a value on every trained token",
            actual=f"exactly 0.0 on {int(bad.sum())} of {int(mask.sum())}",
            causes=("row_permutation", "placeholder_log_prob"),
            hint="values multiplied by a mask in another row order look like this",
        )
