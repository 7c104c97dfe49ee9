"""Log-probs against their range, the rollout's and the reference's (DPA301 to DPA305, DPA108).

Convention: column ``t`` of every log-prob field ``[B,R]`` scores ``responses[:, t]``. Values off
the response mask are never judged: some healthy paths leave zeros there, others garbage. What
shared prefixes tell is in :mod:`.prefixes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.diagnose import explain_gap
from dataproto_audit.probes.noise import Noise, noise_between
from dataproto_audit.probes.registry import Run, probe
from dataproto_audit.probes.scan import Gap, any_of, masked_gap, masked_range

PRODUCERS = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
}
FEW_LOWER = 2
"""Tokens with a lower log-prob in the rollout from which a sampling filter explains nothing."""
HALF_TENSORS = (torch.bfloat16, torch.float16)


def named(run: Run, name: str, doc: str) -> Run:
    """``run`` under a name and docstring of its own: one function makes the probes of a family."""
    run.__name__, run.__doc__ = name, doc
    return run


def precision_of(view: BatchView, ctx: Context, field: str) -> str | None:
    """The precision that ``field`` was computed in: stored in half, or as configured."""
    tensor = view.tensors.get(field)
    if tensor is not None and tensor.dtype in HALF_TENSORS:
        return str(tensor.dtype)
    rollout = field == "rollout_log_probs"
    return ctx.settings.rollout_dtype if rollout else ctx.settings.trainer_dtype


def noise_of(view: BatchView, ctx: Context, left: str, right: str) -> Noise:
    """The noise model for the difference of two fields."""
    noise = noise_between(precision_of(view, ctx, left), precision_of(view, ctx, right))
    token, mean = ctx.settings.log_prob_token, ctx.settings.log_prob_mean
    if token is None and mean is None:
        return noise
    return replace(
        noise,
        name="configured",
        token=noise.token if token is None else token,
        mean=noise.mean if mean is None else mean,
    )


def _range_probes(field: str, stage: str) -> None:
    """Register the finite and the sign check of one log-prob field."""
    needs = (field, "response_mask")

    def finite(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        if not np.isfinite(stats[f"range:{field}"]).all():
            values = view.numpy(field)
            bad = ~np.isfinite(values) & (view.numpy("response_mask") != 0)
            row, column = np.argwhere(bad)[0]
            yield ctx.fail(
                field,
                cells=bad,
                expected="finite log-probs on trained tokens",
                actual=f"{values[row, column]} first at row {row}, column {column}",
                causes=("non_finite", "precision"),
            )
        elif stats[f"odd:{field}"]:
            values = view.numpy(field)
            bad = ~np.isfinite(values)
            if not bad.any():  # the sum of finite values was too large for their precision
                return
            row, column = np.argwhere(bad)[0]
            yield ctx.fail(
                field,
                severity="warn",
                cells=bad,
                expected="finite values also off the response mask",
                actual=f"{values[row, column]} first at row {row}, column {column}",
                causes=("non_finite",),
                hint="0 times NaN is NaN: multiplying by the mask does not remove it",
            )

    def nonpositive(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        highest = float(stats[f"range:{field}"][1])
        bound = noise_of(view, ctx, field, field).above_zero
        if not highest <= bound:
            bad = (view.numpy(field) > bound) & (view.numpy("response_mask") != 0)
            if bad.any():
                yield ctx.fail(
                    field,
                    cells=bad,
                    expected=f"at most {bound:g}",
                    actual=f"up to {view.numpy(field)[bad].max():.4g}",
                    causes=("positive_log_prob",),
                )

    stats = (masked_range(field),)
    odd = any_of(f"odd:{field}", (field,), lambda block: not np.isfinite(block[field].sum()))
    probe("DPA301", stages=(stage,), needs=needs, stats=(*stats, odd), basic=True)(
        named(finite, f"{field}_finite", f"{field} is finite; off the response mask, too.")
    )
    probe("DPA302", stages=(stage,), needs=needs, stats=stats)(
        named(nonpositive, f"{field}_nonpositive", f"{field} is at most 0 under the mask.")
    )


for _field, _stage in PRODUCERS.items():
    _range_probes(_field, _stage)


def incomparable(ctx: Context) -> str:
    """Why rollout and old log-probs may differ in good health; '' where nothing is known to."""
    settings = ctx.settings
    if settings.filtered:
        return "top-p or top-k renormalises the rollout's log-probs"
    if settings.on_policy is False:
        return "rollouts may come from older weights"
    return ""


@probe(
    "DPA303",
    stages=("old_log_prob",),
    needs=("old_log_probs", "rollout_log_probs", "response_mask"),
    stats=(masked_gap("old_log_probs", "rollout_log_probs"),),
    applies=incomparable,
)
def rollout_old_gap(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """|old - rollout| within the noise of the two engines.

    Same weights, temperature and filters on both sides is assumed; sampling filters and stale
    rollouts make the check not applicable. A half-precision side bounds the mean only. A gap that
    no repair explains is ``info`` where a setting that could explain it is unknown.
    """
    gap: Gap = stats["gap:old_log_probs:rollout_log_probs"]
    ctx.measure("training/rollout_log_probs_diff_max", gap.largest)
    ctx.measure("training/rollout_log_probs_diff_mean", gap.mean(gap.absolute))
    ctx.measure("rollout_corr/kl", -gap.mean(gap.signed))
    ctx.measure("rollout_corr/k3_kl", gap.mean(gap.k3))
    noise = noise_of(view, ctx, "old_log_probs", "rollout_log_probs")
    bad = _beyond(view, gap, noise, "old_log_probs", "rollout_log_probs")
    if bad is not None:
        unknown = [
            name
            for name in ("top_p", "top_k", "on_policy")
            if getattr(ctx.settings, name) is None and not _excluded(name, view, bad)
        ]
        yield from explain_gap(
            view, ctx, bad, suspect="old_log_probs", witness="rollout_log_probs",
            noise=noise, unknown=unknown,
        )  # fmt: skip


@probe(
    "DPA305",
    stages=("ref_log_prob",),
    needs=("old_log_probs", "ref_log_prob", "response_mask", "settings.ref_from_actor"),
    stats=(masked_gap("old_log_probs", "ref_log_prob"),),
    applies=lambda ctx: (
        "only at the first step" if ctx.step != 1 or ctx.settings.ref_from_actor is False else ""
    ),
)
def old_ref_first(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Step 1: actor and reference hold the same weights, so their log-probs are equal."""
    noise = noise_of(view, ctx, "old_log_probs", "ref_log_prob")
    gap: Gap = stats["gap:old_log_probs:ref_log_prob"]
    bad = _beyond(view, gap, noise, "old_log_probs", "ref_log_prob")
    if bad is not None:
        yield from explain_gap(
            view, ctx, bad, suspect="ref_log_prob", witness="old_log_probs", noise=noise
        )


def _excluded(setting: str, view: BatchView, bad: Any) -> bool:
    """True where the batch shows that a setting nobody told does not explain the gap.

    A filter renormalises, so it only raises the rollout's log-probs. While old and reference are
    equal bit for bit the policy has not moved, so there are no older weights.
    """
    old, mask = view.numpy("old_log_probs"), view.numpy("response_mask") != 0
    if setting == "on_policy":
        reference = view.whole.tensors.get("ref_log_prob")
        if reference is None or reference.shape != view.tensors["old_log_probs"].shape:
            return False
        return bool((view.whole.numpy("ref_log_prob") == old)[mask].all())
    lower = view.numpy("rollout_log_probs") < old
    return bool(2 * (lower & bad).sum() > bad.sum()) or bool((lower & bad).sum() > FEW_LOWER)


def _beyond(view: BatchView, gap: Gap, noise: Noise, left: str, right: str) -> Any:
    """Cells that the noise does not explain, or None; looks at cells only when the sums are off."""
    if noise.token is not None and gap.largest <= noise.token:
        return None
    if noise.token is None and gap.mean(gap.absolute) <= noise.mean_of(gap.tokens):
        return None
    values = view.numpy(left)
    size = np.abs(np.subtract(values, view.numpy(right), dtype=np.float64))
    return noise.exceeded(size, values, view.numpy("response_mask") != 0)


@probe(
    "DPA108",
    stages=("old_log_prob", "ref_log_prob"),
    needs=("old_log_probs",),
    severity="info",
)
def precision(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Old, reference and rollout log-probs have one dtype, or the config explains why not.

    Nothing is lost in float64, which numpy makes of any list: beside float32 it is ``info``.
    """
    other = "ref_log_prob" if ctx.stage == "ref_log_prob" else "rollout_log_probs"
    dtypes = {n: view.tensors[n].dtype for n in ("old_log_probs", other) if n in view.tensors}
    if len(dtypes) < 2:
        ctx.unknown(f"field not in the batch: {other}")
    if len(set(dtypes.values())) > 1:
        listed = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        sides = (ctx.settings.trainer_dtype, ctx.settings.rollout_dtype)
        wide = {*dtypes.values()} == {torch.float32, torch.float64}
        expected = wide or noise_between(*sides).token is None
        yield ctx.fail(
            "old_log_probs",
            severity="info" if expected else "warn",
            expected="one dtype",
            actual=", ".join(f"{k} {v}" for k, v in listed.items()),
            causes=("precision",),
        )
