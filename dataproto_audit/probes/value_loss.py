"""The critic's update as the workers did it, against one unsplit recomputation (DPA505, DPA506).

Evidence comes from the workers: the values of each row just before its mini-batch's optimizer step,
and of each mini-batch the loss, its clip range, its aggregation and the count it was divided by.
Mini-batches whose rows were not recorded (later epochs) are left out.

Not covered: gradients, which ``compare-backends`` compares; a critic that is wrong in both passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.loss_terms import ABSOLUTE, RELATIVE, no_number, not_finite
from dataproto_audit.probes.noise import Noise, noise_between
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.repairs import ONE_COLUMN
from dataproto_audit.probes.return_causes import row_order
from dataproto_audit.probes.value_terms import (
    FIELDS,
    HOW,
    NUMBERS,
    arguments_of,
    how_of,
    terms_of,
    unreadable,
)
from dataproto_audit.reasons import NotRecorded
from dataproto_audit.reference.losses import AGGREGATION_MODES

UPDATE = ("update_values", "value_mini_batch", "values", "response_mask")
REPORTED = ("vf_loss", *HOW, "normaliser")


@probe("DPA505", stages=("update_critic",), needs=(*UPDATE, "settings.trainer_dtype"))
def first_values(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Rows of the first mini-batch: the critic's values [B,R] before its step are the stored ones.

    In full precision each within 1e-4, relative above 1. Half precision bounds the mean over tokens
    only, relative to the root mean square of the values: bf16 passes of verl's toy critics differed
    by 0.03 % of it, with dropout on by 35 %. Cells that are not finite are for the finite checks.
    """
    first = view.numpy("value_mini_batch") == 0
    if not first.any():
        ctx.unknown("no row of the first mini-batch was recorded")
    old, new = (view.numpy(name).astype(np.float64) for name in ("values", "update_values"))
    gap = np.abs(old - new)
    on = first[:, None] & (view.numpy("response_mask") != 0) & np.isfinite(gap)
    if not on.any():
        return
    bound, told = _bound(gap, new, on, noise_between(*[ctx.settings.trainer_dtype] * 2))
    bad = on & (gap > bound)
    if not bad.any():
        return
    causes, why = _explain(old, new, on, bad, bound)
    row, column = np.argwhere(bad)[0]
    yield ctx.fail(
        "values",
        cells=bad,
        expected=f"{new[row, column]:.6g} at row {row}, column {column}, as before the first step",
        actual=f"{old[row, column]:.6g}",
        evidence={"max error": float(gap[bad].max()), "mean error": float(gap[on].mean()),
                  **told, **why},
        causes=causes,
    )  # fmt: skip


def _bound(gap: Any, new: Any, on: Any, noise: Noise) -> tuple[Any, dict[str, Any]]:
    """What a gap may be in each cell, infinite where the mean is in order, and how that is told."""
    if noise.token is not None:
        bound = RELATIVE * np.maximum(1.0, np.abs(new))
        return bound, {"noise model": noise.name, "bound per token": RELATIVE}
    size = float(np.sqrt(np.square(new[on]).mean()))
    mean = size * noise.mean_of(int(on.sum()))
    wide = float(gap[on].mean()) <= mean
    return (
        np.full(gap.shape, np.inf if wide else size * noise.mean),
        {"noise model": noise.name, "bound on mean": mean},
    )


def _explain(
    old: Any, new: Any, on: Any, bad: Any, bound: Any
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Causes, the likely one first: stored values of another column, or of another row."""
    before = float(np.abs(old - new)[on].max())
    for shift in ONE_COLUMN:
        moved, seen = np.roll(new, shift, 1), on & np.roll(on, shift, 1)
        seen[:, 0 if shift > 0 else -1] = False  # what the roll brought from the other end
        left = np.abs(old - moved)[seen]
        if seen[bad].any() and (left <= bound[seen]).all():
            told = f"max error {before:.3g} -> {float(left.max()):.3g}"
            return ("shift",), {f"shift by {shift:+d}": told}
    order = row_order(old, new, on, bad)
    if order:
        return ("row_permutation",), {"rows matched anew": order}
    return ("dropout_on", "row_permutation", "shift", "precision"), {}


@probe(
    "DPA506",
    stages=("update_critic",),
    needs=(*UPDATE, "returns", "evidence.losses"),
)
def value_loss_recomputed(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Each mini-batch's value loss, and the count that it was divided by, are those of all its
    rows at once."""
    wrong: list[tuple[int, str, float, float, dict[str, Any]]] = []
    table = []
    for number, told, fields in _mini_batches(view, ctx):
        got, count = float(told["vf_loss"]), float(told["normaliser"])
        how = how_of(told)
        want, counted = terms_of(fields, how).values()
        table.append((number, "vf_loss", got, count, want))
        if counted and count != counted:
            wrong.append((number, "normaliser", count, counted, {}))
        elif not _close(got, want, fields):
            wrong.append((number, "vf_loss", got, want, {**fields, **how}))
    ctx.cache["value_loss_table"] = table
    if wrong and (odd := not_finite(view, FIELDS.values(), NUMBERS)):
        ctx.unknown(f"{odd} is not finite on trained tokens: see DPA420")
    if wrong:
        number, name, got, want, given = wrong[0]
        yield ctx.fail(
            "losses",
            expected=f"{name} {want:.6g} of mini-batch {number}, unsplit",
            actual=f"{got:.6g}",
            evidence={"factor": got / want if want else float("nan"), "bound, relative": RELATIVE,
                      "mini-batches wrong": len({entry[0] for entry in wrong})},
            causes=_causes(name, got, given),
        )  # fmt: skip


def _mini_batches(
    view: BatchView, ctx: Context
) -> Iterator[tuple[int, Mapping[str, Any], dict[str, Any]]]:
    """Number, report, and what the loss is computed from, of each mini-batch that was recorded."""
    numbers, seen = view.numpy(NUMBERS), False
    whole = {n: torch.from_numpy(np.ascontiguousarray(view.numpy(n))) for n in FIELDS.values()}
    for number, told in enumerate(ctx.evidence["losses"]):
        rows = np.flatnonzero(numbers == number)
        if not len(rows):
            continue
        lacking = [name for name in REPORTED if told.get(name) is None]
        reason = NotRecorded.of(*(f"losses.{name}" for name in lacking)) if lacking else ""
        if why := reason or no_number(told, "vf_loss", "normaliser") or unreadable(told):
            ctx.unknown(why)
        seen = True
        yield number, told, arguments_of(whole, torch.from_numpy(rows))
    if not seen:
        ctx.unknown("no row of the reported mini-batches was recorded")


def _close(got: float, want: float, fields: Mapping[str, Any]) -> bool:
    """Equal up to rounding, which grows with the largest term of the loss."""
    if got != got and want != want:
        return True
    on = fields["response_mask"] != 0
    off = (fields["values"].double() - fields["returns"].double())[on].square()
    scale = max(1.0, float(off.max())) if off.numel() else 1.0
    return abs(got - want) <= ABSOLUTE * scale + RELATIVE * abs(want)


def _causes(name: str, got: float, given: dict[str, Any]) -> tuple[str, ...]:
    if name == "normaliser":
        return ("wrong_normaliser", "loss_depends_on_split")
    fields = {k: v for k, v in given.items() if k not in ("clip", "loss_agg_mode")}
    clip, mode = given["clip"], given["loss_agg_mode"]
    for cause, how in (
        ("wrong_clip", {"clip": float("inf"), "loss_agg_mode": mode}),
        *(("wrong_normaliser", {"clip": clip, "loss_agg_mode": m}) for m in AGGREGATION_MODES),
    ):
        if _close(got, terms_of(fields, how)["vf_loss"], fields):
            return (cause, "loss_depends_on_split")
    return ("loss_depends_on_split", "wrong_normaliser", "wrong_clip")
