"""Metrics over steps, and the weights that reached the rollout engine (DPA6xx).

Spikes are judged against the run's own recent history: median and median absolute deviation of
the last steps, after a warm-up. Nothing is judged against fixed numbers, except finiteness and the
bounds of entropy.
"""

from __future__ import annotations

import math
import numbers
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.logprobs import noise_of
from dataproto_audit.probes.noise import noise_between
from dataproto_audit.probes.registry import AT_END, probe
from dataproto_audit.probes.scan import masked_range, sum_of
from dataproto_audit.reasons import NotRecorded

WEIGHTS = "audit/weights_hash"
"""One number for the trainer's weights of a step."""
WARM_UP = 20
WINDOW = 50
SPIKE_MADS = 25.0
SPIKE_FACTOR = 10.0
"""A spike is both this many robust deviations from the median and this many times the median."""
RECENT = 5
RISE = 3.0
"""It also is this many times the largest of the last steps: a steady rise is no spike."""


def spike(
    value: float, history: Sequence[float], *, floor: float = 0.0
) -> tuple[float, float] | None:
    """Median and deviation that ``value`` breaks, or None. Needs ``WARM_UP`` earlier steps.

    The deviation is 1.4826 x the median absolute deviation, which for normal noise estimates the
    standard deviation and is not moved by earlier spikes. Steps at which the metric was exactly 0
    do not count: there was nothing to learn from, as with rewards that are all alike. Values up to
    ``floor`` are never spikes.
    """
    recent = _informative(history)
    if len(recent) < WARM_UP or not math.isfinite(value):
        return None
    median = statistics.median(recent.tolist())
    deviation = 1.4826 * statistics.median(np.abs(recent - median).tolist())
    bound = max(SPIKE_FACTOR * abs(median), RISE * float(np.abs(recent[-RECENT:]).max()), floor)
    if abs(value) > bound and abs(value - median) > SPIKE_MADS * deviation:
        return median, deviation
    return None


def _informative(history: Sequence[float]) -> NDArray[np.float64]:
    recent = np.asarray(history[-WINDOW:], np.float64)
    kept: NDArray[np.float64] = recent[np.isfinite(recent) & (recent != 0)]
    return kept


WHEN = ("update_actor", AT_END)
"""Metrics are judged where they arrive: with the update, or with the end of the step."""
LEARNING = ("actor/", "critic/")
"""Names of metrics that an update reports begin like this."""


def not_recorded(ctx: Context, metric: str) -> NoReturn:
    """Leave the probe: the step did not tell ``metric``. A step 0 without any update has none."""
    told = ctx.evidence.get("metrics") or {}
    if ctx.step == 0 and not any(str(name).startswith(LEARNING) for name in told):
        ctx.skip("step 0 updates nothing")
    ctx.unknown(NotRecorded.of(f"metrics{metric}"))


def _metrics(ctx: Context) -> Mapping[str, Any]:
    """What the step reported; judged once a step by each probe."""
    mark = ("metrics judged", ctx.check)
    if ctx.stage == AT_END and mark in ctx.cache:
        ctx.skip("judged with the update")
    ctx.cache[mark] = True
    metrics: Mapping[str, Any] = ctx.evidence["metrics"]
    return metrics


@probe("DPA601", stages=WHEN, needs=("evidence.metrics",))
def metrics_finite(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Loss, KL, entropy and gradient norm of the step are finite."""
    told = _metrics(ctx)
    if ctx.stage == AT_END:  # a step tells many other numbers, too
        told = {name: value for name, value in told.items() if name.startswith(LEARNING)}
        if not told:
            not_recorded(ctx, " of the update")
    wrong = {n: float(v) for n, v in told.items() if _number(v) and not math.isfinite(v)}
    if wrong:
        yield ctx.fail(
            next(iter(wrong)),
            stage="update_actor",
            expected="finite metrics",
            actual=", ".join(f"{name} = {value}" for name, value in wrong.items()),
            causes=("non_finite", "bad_row"),
        )


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _spikes(code: str, name: str, metric: str, floor: float, causes: tuple[str, ...]) -> None:
    def run(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        told = _metrics(ctx).get(metric)
        if not _number(told):
            not_recorded(ctx, f".{metric}")
        value = float(told or 0.0)
        history = ctx.history.get(metric, ())
        if len(history) < WARM_UP or len(_informative(history)) < WARM_UP:
            ctx.unknown(f"fewer than {WARM_UP} earlier steps of {metric}")
        broken = spike(value, history, floor=floor)
        if broken:
            median, deviation = broken
            yield ctx.fail(
                metric,
                stage="update_actor",
                severity="warn",
                expected=f"near its median {median:.4g} of the last steps",
                actual=f"{value:.4g}",
                evidence={"robust deviation": deviation, "steps before": len(history)},
                causes=causes,
            )

    run.__name__ = name
    run.__doc__ = f"{metric} does not jump out of its own recent history."
    probe(code, stages=WHEN, needs=("evidence.metrics",), severity="warn")(run)


# Floors in nats, or in units of the gradient norm: below them a jump harms nobody.
_spikes("DPA602", "kl_spike", "actor/ppo_kl", 1e-2, ("learning_rate_too_high", "bad_row"))
_spikes("DPA602", "ref_kl_spike", "actor/kl_loss", 1e-2, ("learning_rate_too_high", "bad_row"))
_spikes("DPA603", "grad_norm_spike", "actor/grad_norm", 1e-2, ("bad_row", "learning_rate_too_high"))


def _entropy_sum(block: Block) -> Any:
    values = block["entropys"][block.mask]
    return np.array([values.sum(dtype=np.float64), values.size])


@probe(
    "DPA604",
    stages=("old_log_prob",),
    needs=("entropys", "response_mask", "settings.vocab_size"),
    stats=(
        masked_range("entropys"),
        sum_of("entropy", ("entropys", "response_mask"), _entropy_sum),
    ),
)
def entropy_bounds(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """0 <= entropy <= log(vocabulary) on trained tokens, with slack for rounding."""
    limit = math.log(ctx.settings.vocab_size or 1)
    slack = noise_of(view, ctx, "entropys", "entropys").above_zero
    total, tokens = stats["entropy"]
    ctx.measure("actor/entropy", total / max(tokens, 1.0))
    low, high = stats["range:entropys"]
    if low >= -slack and high <= limit + 10 * slack:
        return
    entropy, mask = view.numpy("entropys"), view.numpy("response_mask") != 0
    bad = mask & ~((entropy >= -slack) & (entropy <= limit + 10 * slack))
    if bad.any():
        negated = bool((entropy[mask] <= slack).all() and (entropy[mask] >= -limit - slack).all())
        yield ctx.fail(
            "entropys",
            cells=bad,
            expected=f"between 0 and log(vocabulary) = {limit:.4g}",
            actual=f"{entropy[mask].min():.4g} to {entropy[mask].max():.4g}",
            causes=(
                ("wrong_sign", "non_finite") if negated else ("temperature_mismatch", "non_finite")
            ),
        )


@probe(
    "DPA605",
    stages=("sync_weights",),
    needs=("evidence.trainer_checksum", "evidence.engine_checksum"),
)
def weights_arrived(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """Every tensor that engine and trainer both report has the same checksum.

    Checksums are integers over bit patterns and positions, so they are compared exactly.
    ``engine_stale`` names tensors whose copy in the engine is not what arrived there, such as an
    output layer tied to the embedding. Tensors that the engine cannot show are covered by the
    log-prob probe only.
    """
    trainer, engine = ctx.evidence["trainer_checksum"], ctx.evidence["engine_checksum"]
    both = [name for name in trainer if name in engine]
    if not both:
        ctx.unknown("trainer and engine name no tensor alike")
    wrong = [name for name in both if trainer[name] != engine[name]]
    wrong += [name for name in ctx.evidence.get("engine_stale", ()) if name not in wrong]
    ctx.measure("audit/weights_compared", len(both))
    ctx.measure("audit/weights_unread", len(ctx.evidence.get("engine_unreadable", ())))
    ctx.measure(WEIGHTS, zlib.crc32(repr([trainer[name] for name in both]).encode()))
    if wrong:
        head = len(both) > len(wrong) and all("lm_head" in name for name in wrong)
        yield ctx.fail(
            "weights",
            expected=f"{wrong[0]} with checksum {trainer.get(wrong[0], 'of what was sent')}",
            actual=f"{engine.get(wrong[0])}",
            evidence={"tensors wrong": len(wrong), "tensors compared": len(both)},
            causes=("tied_head_not_updated",) if head else ("stale_rollout_weights",),
            hint="the rollout of the next step would come from other weights",
        )


@probe("DPA606", stages=("sync_weights",), needs=("evidence.engine_prefix_cache_reset",))
def prefix_cache_dropped(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """The engine dropped its prefix cache with the weights it was computed from.

    An engine refuses the reset while requests are under way (vLLM's ``reset_prefix_cache`` says
    False then); a prompt that comes again is continued from keys and values of the old weights.
    """
    if not ctx.evidence["engine_prefix_cache_reset"]:
        yield ctx.fail(
            "weights",
            expected="the prefix cache is reset with every weight sync",
            actual="the engine kept it",
            causes=("stale_prefix_cache",),
            hint="send weights only when no request is under way, or switch the prefix cache off",
        )


@probe(
    "DPA606",
    stages=("sync_weights",),
    needs=("evidence.sync_probe",),
    applies=lambda ctx: str(ctx.evidence.get("sync_probe_skipped", "")),
)
def engine_scores_alike(
    view: BatchView, stats: Mapping[str, Any], ctx: Context
) -> Iterable[Finding]:
    """Engine and trainer give a few fixed tokens the same log-probs after the sync.

    ``evidence["sync_probe"]`` holds ``trainer`` and ``engine``, arrays of one shape; at steps where
    nothing was scored ``sync_probe_skipped`` says why. This sees what no checksum can: layers of
    the engine that cannot be read back. A stale prefix cache is not seen: scoring bypasses it.
    """
    sample = ctx.evidence["sync_probe"]
    trainer, engine = (np.asarray(sample[side], np.float64) for side in ("trainer", "engine"))
    if trainer.shape != engine.shape or not trainer.size:
        ctx.unknown(f"samples of {trainer.size} and {engine.size} tokens cannot be compared")
    gap = np.nan_to_num(np.abs(trainer - engine), nan=np.inf).clip(max=1e9)
    noise = noise_between(ctx.settings.trainer_dtype, ctx.settings.rollout_dtype)
    ctx.measure("audit/sync_probe_gap_max", float(gap.max()))
    bad = noise.exceeded(gap, trainer, np.ones(gap.shape, bool))
    if bad is not None:
        yield ctx.fail(
            "weights",
            expected=f"log-probs within {noise.token or noise.mean:g} ({noise.name})",
            actual=f"up to {gap.max():.4g} apart",
            evidence={"tokens": int(gap.size), "tokens wrong": int(bad.sum()),
                      "mean": float(gap.mean())},
            causes=("tied_head_not_updated", "stale_prefix_cache", "stale_rollout_weights"),
        )  # fmt: skip
