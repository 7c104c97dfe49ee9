"""What the response mask trains on: sampled tokens, all of them (DPA205, DPA208 to DPA212).

Which tokens were sampled is read off the engine's log-probs: it reports 0.0 for tokens that a tool
or a user wrote. A mask that was cut on purpose afterwards (rejection, overlong filtering) leaves
out sampled tokens, too; it is told apart by what it cuts: rows without a stop token, or tokens on
which engine and trainer disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.advantages import leaves_values
from dataproto_audit.probes.context import Context, filling_rows
from dataproto_audit.probes.estimates import WHITENED
from dataproto_audit.probes.masks import RESPONSE_END, readable
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, TRAINED_TOKENS, any_of, some

ENGINE = ("rollout_log_probs", "response_mask", *ATTENDED)
TWINS = ("tool_mask", "loss_mask")
"""Masks of other names that say the same as the response mask."""
FEW = 4
"""Trained tokens below which their gaps show no range."""


def is_in(ids: Any, listed: Iterable[int] | None) -> Any:
    """Cells of ``ids`` that hold one of the listed ids."""
    return np.isin(ids, list(listed or ()))


def _left_out(block: Block) -> Any:
    """Cells that the engine sampled and that the mask leaves out, ``[block, R]``."""
    return block.response_attention & ~block.mask & (block["rollout_log_probs"] != 0)


@probe(
    "DPA208",
    stages=("old_log_prob",),
    needs=("old_log_probs", *ENGINE),
    stats=(
        any_of(
            "sampled_left_out",
            ENGINE,
            lambda block: some(block.mask_differs) and some(_left_out(block)),
        ),
    ),
    applies=lambda ctx: "rejection cuts the mask" if ctx.settings.rejection else "",
)
def sampled_tokens_trained(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The mask [B,R] covers the tokens that the engine sampled, unless there is a reason not to.

    A reason is a row that was cut at the length limit, a gap between the two log-probs that
    rejection looks at, or a row that ``loss_mask`` has and the mask has not, where nobody told
    whether rows are rejected. Without a ``loss_mask`` such rows are a ``warn``, or a ``fail`` where
    they have advantages that only trained tokens can have. Not covered: tokens that the engine was
    certain of, whose log-prob is 0.0.
    """
    if not stats["sampled_left_out"]:
        return
    block = Block(view, slice(None))
    rollout, left_out = view.numpy("rollout_log_probs"), _left_out(block)
    filling = filling_rows(view)
    if filling is not None:
        left_out[filling] = False
    if not left_out.any():
        return
    unknown = ctx.settings.rejection is None
    if unknown and "rollout_is_weights" in view.whole:
        ctx.unknown("importance weights are there: tell settings.rejection")
    cut: Any = ~block.mask.any(1)
    left_out &= ~(cut & ~_stopped(view, ctx, block))[:, None]
    if unknown and readable("loss_mask", view, ctx):
        left_out &= ~(cut[:, None] & (view.numpy("loss_mask") != 0))
    if not left_out.any():
        return
    gap = np.subtract(view.numpy("old_log_probs"), rollout, dtype=np.float64)
    gap[~np.isfinite(gap)] = np.inf
    kept = gap[block.mask & np.isfinite(gap)]
    if len(kept) < FEW:
        ctx.unknown(f"response_mask leaves {len(kept)} tokens: too few to compare the others with")
    usual = left_out & (gap >= kept.min()) & (gap <= kept.max())
    told = not unknown or left_out[~cut].any() or _has_advantages(view, ctx, left_out)
    if 2 * usual.sum() > left_out.sum():
        yield ctx.fail(
            "response_mask",
            stage="rollout",
            severity=None if told else "warn",
            cells=left_out,
            expected="1 on every token that the engine sampled",
            actual=f"0 on {int(left_out.sum())} tokens with a log-prob of the engine",
            evidence={"share that no rejection explains": float(usual.sum() / left_out.sum())},
            causes=("mask_hole", "shift", "mask_from_prompt"),
        )


def _has_advantages(view: BatchView, ctx: Context, cells: Any) -> bool:
    """True where ``cells [B,R]`` have advantages of an estimator that masks them: they were trained
    then, and no row was rejected. GAE and ReMax leave values off the mask; so may what is unknown
    beside values or baselines.
    """
    batch = view.whole
    advantages = batch.tensors.get("advantages")
    if advantages is None or advantages.shape != cells.shape:
        return False
    return not leaves_values(batch, ctx) and bool((batch.numpy("advantages")[cells] != 0).any())


def _stopped(view: BatchView, ctx: Context, block: Block) -> Any:
    """Rows whose last attended token is a stop id, or that end before the width; ``[B]``."""
    lengths, width = block.response_attention.sum(1), block.response_attention.shape[1]
    last = view.numpy("responses")[np.arange(len(lengths)), np.maximum(lengths - 1, 0)]
    return is_in(last, ctx.settings.stop_ids) | (lengths < width)


@probe(
    "DPA209",
    stages=("rollout",),
    needs=("responses", "response_mask", "settings.tool_ids"),
    applies=lambda ctx: (
        "no tools: one turn"
        if ctx.settings.multi_turn is False and not ctx.settings.tool_ids
        else ""
    ),
)
def tool_tokens_untrained(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The mask [B,R] is 0 on ids that only tools write."""
    bad = is_in(view.numpy("responses"), ctx.settings.tool_ids)
    bad &= view.numpy("response_mask") != 0
    if bad.any():
        yield ctx.fail(
            "response_mask",
            cells=bad,
            expected="0 on what a tool wrote",
            actual=f"1 on {int(bad.sum())} tool tokens in {int(bad.any(1).sum())} rows",
            causes=("mask_on_tool",),
        )


@probe("DPA210", stages=("rollout",), needs=("response_mask",))
def masks_agree(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """A second mask of the response says the same as ``response_mask``.

    Where rejection may have cut one of them, only tokens that the second mask leaves out count.
    """
    twins = [n for n in TWINS if n in view.tensors and n not in ctx.broken]
    twins = [n for n in twins if view.numpy(n).shape == view.numpy("response_mask").shape]
    if not twins:
        ctx.skip("one mask only")
    mask = view.numpy("response_mask") != 0
    for name in twins:
        other = view.numpy(name) != 0
        bad = mask != other
        if name == "loss_mask" and ctx.settings.rejection is not False:
            bad &= mask
        if bad.any():
            yield ctx.fail(
                "response_mask",
                cells=bad,
                expected=f"the same as {name}",
                actual=f"{int(bad.sum())} cells differ in {int(bad.any(1).sum())} rows",
                causes=_odd_one(view, ctx, mask, other),
            )


def _odd_one(view: BatchView, ctx: Context, mask: Any, other: Any) -> tuple[str, ...]:
    """Causes, by which of two masks ``[B,R]`` the engine's log-probs bear out."""
    if not mask.any():
        return ("empty_mask", "masks_disagree")
    if not view.has("rollout_log_probs") or "rollout_log_probs" in ctx.broken:
        return ("masks_disagree", "mask_hole")
    sampled = view.numpy("rollout_log_probs") != 0
    left_out, added = other & ~mask, mask & ~other
    if 2 * (left_out & sampled).sum() > (left_out | added).sum():
        return ("mask_hole", "masks_disagree")
    if 2 * (added & ~sampled).sum() > (left_out | added).sum():
        return ("mask_on_tool", "masks_disagree")
    return ("masks_disagree", "mask_hole")


@probe(
    "DPA205",
    stages=("rollout",),
    needs=("response_mask", *ATTENDED, "settings.pad_id"),
    stats=(RESPONSE_END,),
)
def pad_ids_untrained(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """A response [B,R] does not end on attended, trained pad ids.

    Where the pad id is a stop id too, one of them is the stop token. Not covered are pad ids that
    a model may have sampled: those inside the response, and those that follow no stop id where the
    engine says so (their log-prob, ``finish_reason`` ``length``) or where there is one only.
    """
    pad, stops = ctx.settings.pad_id, ctx.settings.stop_ids
    responses, last = view.numpy("responses"), np.maximum(stats[RESPONSE_END.name] - 1, 0)
    if not (responses[np.arange(len(last)), last] == pad).any():  # no row ends on one
        return
    block, padded = Block(view, slice(None)), responses == pad
    behind = ~block.response_attention
    tail = np.logical_and.accumulate((padded | behind)[:, ::-1], axis=1)[:, ::-1]
    bad = tail & padded & block.response_attention
    rows, first = np.arange(len(bad)), np.argmax(bad, axis=1)
    known = "rollout_log_probs" in view.tensors and "rollout_log_probs" not in ctx.broken
    told = is_in(responses[rows, np.maximum(first - 1, 0)], stops) & (first > 0)
    if stops is None or pad in stops:
        bad[rows, first] = False
        told[:] = stops is not None
    if known:
        bad &= told[:, None] | (view.numpy("rollout_log_probs") == 0)
    else:  # a model rarely samples two in a row
        bad &= (told | (bad.sum(1) > 1))[:, None]
    reasons = view.arrays.get("finish_reason")
    if reasons is not None and reasons.ndim == 1:
        bad &= (told | np.array([reason != "length" for reason in reasons]))[:, None]
    bad &= block.mask
    if bad.any():
        yield ctx.fail(
            "response_mask",
            cells=bad,
            expected=f"0 on trailing pad ids ({pad})",
            actual=f"1 on {int(bad.sum())} of them in {int(bad.any(1).sum())} rows",
            causes=("mask_on_padding", "wrong_stop_token"),
            hint="the attention mask counts them, too",
        )


def _whitened(view: BatchView, ctx: Context) -> str:
    """Whether something is whitened over the batch: ``yes``, ``perhaps``, or empty for no."""
    estimator = ctx.settings.adv_estimator
    if estimator in WHITENED or "values" in view.whole:
        return "yes"
    return "" if estimator else "perhaps"


def _several_attended(view: BatchView) -> bool:
    return bool(Block(view, slice(None)).response_attention.sum() > 1)


@probe(
    "DPA212",
    stages=("rollout", "update_actor"),
    needs=("response_mask", *ATTENDED),
    stats=(TRAINED_TOKENS,),
)
def something_to_train(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The batch has trained tokens, and so has every row where rows are their own micro-batch.

    One trained token is too few for estimators that whiten over the batch, and where a critic is
    trained beside; where nobody told the estimator that is a ``warn``.
    """
    tokens = stats[TRAINED_TOKENS.name]
    total = int(tokens.sum())
    if not total:
        attended = Block(view, slice(None)).response_attention
        if ctx.stage == "rollout" and not attended.any():
            ctx.skip("no response has a token")
        if view.has("rollout_log_probs") and "rollout_log_probs" not in ctx.broken:
            attended = attended & (view.numpy("rollout_log_probs") != 0)
        yield ctx.fail(
            "response_mask",
            cells=attended if ctx.stage == "rollout" else None,
            rows=range(view.rows),
            expected="at least one trained token",
            actual="none in the batch",
            causes=("empty_mask",),
            hint="a masked mean over it is 0/0",
        )
    elif ctx.stage == "rollout":
        return
    elif total == 1 and _whitened(view, ctx) and _several_attended(view):
        yield ctx.fail(
            "response_mask",
            stage="advantage",
            severity="warn" if _whitened(view, ctx) == "perhaps" else None,
            cells=view.numpy("response_mask") != 0,
            expected="more than one trained token in the batch",
            actual="one",
            causes=("empty_mask",),
            hint="a variance over one token is 0/0: whitening fails",
        )
    elif ctx.settings.micro_batch_size == 1 and not tokens.all():
        empty = tokens == 0
        yield ctx.fail(
            "response_mask",
            severity="warn",
            rows=np.flatnonzero(empty),
            cells=np.broadcast_to(empty[:, None], view.numpy("response_mask").shape),
            expected="a trained token in every micro-batch (micro_batch_size = 1)",
            actual=f"none in {int(empty.sum())} rows",
            causes=("empty_mask",),
            hint="a mean over each micro-batch would be 0/0; normalise over the mini-batch",
        )
