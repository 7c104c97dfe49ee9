"""The update as the workers did it, against one unsplit float64 recomputation (DPA5xx).

Evidence per mini-batch comes from the workers: the log-probs of each row just before its
mini-batch's optimizer step, the loss terms summed over ranks, and the normaliser they used. With
several epochs the rows tell about one of them; mini-batches of the others are left out. Gradients
themselves are not seen here; ``compare-backends`` compares those.

An entry of ``losses`` may say how its path differs (verl's legacy workers): see :mod:`.loss_terms`.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.narrow import row_max
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.diagnose import explain_gap
from dataproto_audit.probes.logprobs import noise_of
from dataproto_audit.probes.loss_causes import MiniBatch, explain_loss
from dataproto_audit.probes.loss_terms import (
    ABSOLUTE,
    RELATIVE,
    TOLD,
    Undecided,
    arguments_of,
    bound_of,
    how_of,
    no_number,
    not_finite,
    parts_of,
    picked,
    terms_of,
    unreadable,
)
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import per_row
from dataproto_audit.reasons import NotRecorded, SettingUnknown
from dataproto_audit.reference.losses import (
    AGGREGATION_MODES,
    TOKEN_MEAN,
    TOKEN_SUM,
    LossTerms,
)

INPUTS = ("update_log_probs", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob",
          "update_entropys")  # fmt: skip
"""What the terms of the loss are made of."""
UPDATE = ("update_log_probs", "mini_batch", "old_log_probs", "response_mask")


def _first_gap(block: Block) -> Any:
    gap = np.abs(block["update_log_probs"] - block["old_log_probs"])
    gap[~(block.mask & np.isfinite(gap)) | (block["mini_batch"] != 0)[:, None]] = 0.0
    return row_max(gap)


@probe(
    "DPA501", stages=("update_actor",), needs=UPDATE, stats=(per_row("first", UPDATE, _first_gap),)
)
def first_ratio(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows of the first mini-batch: new log-probs [B,R] equal the old ones, so the ratio is 1.

    Vacuous where a path replaces old log-probs by the new ones; the workers here never do.
    """
    first = view.numpy("mini_batch") == 0
    if not first.any():
        ctx.unknown("no row of the first mini-batch was recorded")
    noise = noise_of(view, ctx, "update_log_probs", "old_log_probs")
    worst = float(stats["first"].max())
    ctx.measure("audit/first_ratio_gap_max", worst)
    if worst <= (noise.mean if noise.token is None else noise.token):
        return
    new, old = view.numpy("update_log_probs"), view.numpy("old_log_probs")
    mask = first[:, None] & (view.numpy("response_mask") != 0)
    bad = noise.exceeded(np.abs(np.subtract(new, old, dtype=np.float64)), old, mask)
    if bad is not None:
        yield from explain_gap(
            view, ctx, bad, suspect="old_log_probs", witness="update_log_probs", noise=noise
        )


def _known(ctx: Context) -> str:
    mode = ctx.settings.loss_agg_mode
    return "" if mode is None or mode in AGGREGATION_MODES else f"unknown aggregation {mode}"


def _terms(
    view: BatchView, ctx: Context, rows: Any, number: int, reported: Mapping[str, Any]
) -> LossTerms:
    """The loss of the mini-batch ``rows`` from the recorded log-probs, as its path splits it."""
    if why := unreadable(reported):
        ctx.unknown(why)
    try:
        return terms_of(
            partial(_field, view), view.__contains__, rows, ctx.settings, reported,
            parts=parts_of(ctx.evidence.get("ranks") or (), rows, number),
        )  # fmt: skip
    except Undecided as error:
        ctx.unknown(error.reason)


def _field(view: BatchView, name: str) -> torch.Tensor:
    return torch.from_numpy(view.numpy(name))


def _mini_batches(view: BatchView, ctx: Context) -> Iterator[tuple[int, Mapping[str, Any], Any]]:
    """Number, report and rows of each mini-batch whose rows were recorded."""
    numbers = view.numpy("mini_batch")
    seen = False
    for number, reported in enumerate(ctx.evidence["losses"]):
        rows = np.flatnonzero(numbers == number)
        if len(rows):
            if why := no_number(reported, *TOLD):
                ctx.unknown(why)
            seen = True
            yield number, reported, rows
    if not seen:
        ctx.unknown("no row of the reported mini-batches was recorded")


@probe(
    "DPA502",
    stages=("update_actor",),
    needs=(
        *UPDATE, "advantages", "evidence.losses", "settings.loss_agg_mode",
        "settings.clip_ratio_low", "settings.clip_ratio_high", "settings.use_kl_loss",
    ),
    applies=_known,
)  # fmt: skip
def loss_recomputed(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Each loss term of each mini-batch equals its recomputation over all rows at once."""
    s = ctx.settings
    kl = ("kl_loss_coef", "kl_loss_type") if s.use_kl_loss else ()
    open_ = [name for name in ("entropy_coeff", *kl) if getattr(s, name) is None]
    if open_:
        ctx.unknown(SettingUnknown.of(*open_))
    for name, used in (
        ("ref_log_prob", s.use_kl_loss),
        ("update_entropys", s.entropy_coeff),
        ("rollout_is_weights", "rollout_is_weights" in view),
    ):
        if used and (name not in view.tensors or name in ctx.broken):
            ctx.unknown(f"field missing, or not as declared: {name}")
    wrong: dict[int, dict[str, tuple[float, float]]] = {}
    table = []
    for number, reported, rows in _mini_batches(view, ctx):
        terms = _terms(view, ctx, rows, number, reported)
        for name, want in (
            ("pg_loss", terms["pg_loss"]),
            ("kl_loss", terms["kl_loss"] if s.use_kl_loss else None),
            ("entropy_loss", terms["entropy_loss"] if s.entropy_coeff else None),
            ("total", terms["total"]),
        ):
            got = reported.get(name)
            if got is None or want is None:
                continue
            exact = float(want)
            table.append((number, name, float(got), reported.get("normaliser"), exact))
            eps = float(reported.get("eps", 0.0))
            if not _close(float(got), exact, view, rows, float(terms["normaliser"]), eps):
                wrong.setdefault(number, {})[name] = (float(got), exact)
    ctx.cache["loss_table"] = table
    if wrong:
        if odd := not_finite(view, INPUTS, "mini_batch"):
            ctx.unknown(f"{odd} is not finite on trained tokens: see DPA301 and DPA420")
        yield _loss_finding(view, ctx, wrong)


def _close(
    got: float, exact: float, view: BatchView, rows: Any, normaliser: float, eps: float
) -> bool:
    """Equal up to rounding."""
    error = abs(got - exact)
    near = max(ABSOLUTE, eps) + max(RELATIVE, eps) * abs(exact)
    if error <= near or (got != got and exact != exact):
        return True
    mask = view.numpy("response_mask")[rows] != 0
    advantages = view.numpy("advantages")[rows]
    return bool(error <= bound_of(exact, advantages, mask, normaliser, eps=eps))


@torch.inference_mode()
def _loss_finding(
    view: BatchView, ctx: Context, wrong: Mapping[int, Mapping[str, tuple[float, float]]]
) -> Finding:
    number, names = next(iter(wrong.items()))
    name, (got, exact) = next(iter(names.items()))
    rows = np.flatnonzero(view.numpy("mini_batch") == number)
    index, reported = torch.from_numpy(rows), ctx.evidence["losses"][number]
    arguments = arguments_of(view.__contains__, ctx.settings, reported)
    mini = MiniBatch(
        fields=picked(partial(_field, view), arguments, index),
        how=how_of(ctx.settings, reported),
        reported=reported,
        wrong=names,
        terms=_terms(view, ctx, rows, number, reported),
        settings=ctx.settings,
        parts=parts_of(ctx.evidence.get("ranks") or (), rows, number),
    )
    causes, told = explain_loss(mini)
    return ctx.fail(
        "losses",
        expected=f"{name} {exact:.6g} of mini-batch {number}, unsplit",
        actual=f"{got:.6g}",
        evidence={"factor": got / exact if exact else float("nan"),
                  "mini-batches wrong": len(wrong), "terms wrong": ", ".join(names), **told},
        causes=causes,
    )  # fmt: skip


@probe(
    "DPA503",
    stages=("update_actor",),
    needs=("mini_batch", "response_mask", "evidence.losses", "settings.loss_agg_mode"),
    applies=_known,
)
def loss_normaliser(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """The count each mini-batch was divided by is its global token or sequence count."""
    mode = ctx.settings.loss_agg_mode or "token-mean"
    wrong = []
    for number, reported, rows in _mini_batches(view, ctx):
        got = reported.get("normaliser")
        if got is None:
            ctx.unknown(NotRecorded.of("losses.normaliser"))
        want = _count(view.numpy("response_mask")[rows] != 0, mode)
        if want and got != want:
            wrong.append((number, want, float(got)))
    if wrong:
        number, want, got = wrong[0]
        yield ctx.fail(
            "losses",
            expected=f"{want:g} ({mode}) for mini-batch {number}",
            actual=f"{got:g}",
            evidence={"factor": got / want, "mini-batches wrong": len(wrong)},
            causes=("wrong_normaliser", "loss_depends_on_split"),
        )


def _count(trained: Any, mode: str) -> float:
    """Tokens of ``trained [rows, R]``, rows with any, or 1: what ``mode`` divides by."""
    if mode == TOKEN_SUM:
        return 1.0
    return float(np.count_nonzero(trained if mode == TOKEN_MEAN else trained.any(1)))


NEVER_NEGATIVE = ("k2", "k3", "mse", "abs", "low_var_kl")


@probe(
    "DPA504",
    stages=("update_actor",),
    needs=("evidence.metrics", "settings.use_kl_loss"),
    applies=lambda ctx: "no KL in the loss" if ctx.settings.use_kl_loss is False else "",
)
def logged_kl(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """metric actor/kl_loss is a mean of the mini-batches' kl_loss, and of its kind.

    The mean may be weighted, so it only has to lie between the smallest and the largest. Without
    the terms, an estimator that cannot be negative is not.
    """
    value = ctx.evidence["metrics"].get("actor/kl_loss")
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
        ctx.unknown(NotRecorded.of("metrics.actor/kl_loss"))
    told = [loss for loss in ctx.given("losses") or () if loss.get("kl_loss") is not None]
    terms = [float(loss["kl_loss"]) for loss in told if not no_number(loss, "kl_loss")]
    kind = (ctx.settings.kl_loss_type or "").removesuffix("+")
    if not terms and kind not in NEVER_NEGATIVE:
        ctx.unknown(NotRecorded.of("losses.kl_loss"))
    low, high = (min(terms), max(terms)) if terms else (0.0, float("inf"))
    slack = ABSOLUTE + 1e-3 * max(map(abs, terms), default=0.0)
    if not low - slack <= float(value) <= high + slack:
        yield ctx.fail(
            "actor/kl_loss",
            expected=f"between {low:.6g} and {high:.6g}" if terms else "0 or more",
            actual=f"{float(value):.6g}",
            evidence={"estimator": ctx.settings.kl_loss_type, "mini-batches": len(terms)},
            causes=("wrong_kl_estimator", "wrong_sign"),
            hint="the value that is logged is not the one that is trained on",
        )
