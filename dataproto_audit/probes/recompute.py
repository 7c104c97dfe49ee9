"""Log-probs against a forward pass of the model itself (DPA308), where one is given.

The pass is transformers' own, in one process and in float32. How far a healthy trainer may lie from
it is measured on the same tokens: by a second pass in bfloat16, unless the trainer is known to run
in float32. Not covered: models with several position axes, and a policy that the given model is
not (after an update, old log-probs belong to other weights than the checkpoint before it).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.check import Violation
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.logprobs import named, noise_of
from dataproto_audit.probes.registry import probe
from dataproto_audit.reference.logprobs import load_model, token_log_probs

NEEDS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
FLOOR_FACTOR = 2.0
"""Gaps count from this many times the largest one between the two precisions."""
ROWS = 16
"""Rows of one forward pass."""


@lru_cache(maxsize=2)
def _loaded(folder: str) -> Any:
    try:
        return load_model(folder)
    except ImportError as error:
        raise UsageError(
            "DPA858",
            "recomputing log-probs needs transformers.",
            "Install dataproto-audit[trainer].",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            "DPA852", f"{folder}: no model ({error}).", "Give a folder that transformers can load."
        ) from error


def model_of(given: Any) -> Any:
    """The model that ``check(model=...)`` was given. Raises :class:`UsageError`."""
    return given if isinstance(given, torch.nn.Module) else _loaded(str(given))


def vocabulary_of(model: Any) -> int | None:
    """Ids that the model has an embedding for; None where it does not say."""
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a module of one's own
        return None
    size = getattr(embeddings, "num_embeddings", None)
    return int(size) if isinstance(size, int) else None


def beyond(model: Any, view: BatchView) -> list[Violation]:
    """A violation (DPA852) where ``input_ids`` holds ids that the model has no embedding for."""
    size = vocabulary_of(model)
    if size is None or "input_ids" not in view.tensors:
        return []
    ids = view.numpy("input_ids")
    if ids.dtype.kind not in "iu" or not ids.size or int(ids.max()) < size:
        return []
    told = {"tokens beyond": int((ids >= size).sum()), "of": int(ids.size)}
    return [
        Violation(
            "DPA852", "input_ids", f"ids below {size}, of which the model has an embedding",
            f"ids up to {int(ids.max())}, model has {size}", told,
        )
    ]  # fmt: skip


def _scored(view: BatchView, ctx: Context, *, half: bool) -> NDArray[np.float64]:
    """Log-probs ``[B,R]`` of the given model, in float32 or bfloat16."""
    mark = ("recomputed", half, *(id(view.whole.tensors.get(name)) for name in NEEDS))
    if mark not in ctx.cache:
        model = model_of(ctx.model)
        if half:
            model = copy.deepcopy(model).to(torch.bfloat16)
        ids, attention, positions = (
            torch.from_numpy(np.ascontiguousarray(view.numpy(name))).long() for name in NEEDS[:3]
        )
        log_probs, _ = token_log_probs(
            model, ids, attention, positions, view.response or 0,
            temperature=ctx.settings.temperature or 1.0, rows_per_forward=ROWS,
        )  # fmt: skip
        ctx.cache[mark] = log_probs.numpy()
    found: NDArray[np.float64] = ctx.cache[mark]
    return found


def _recomputed(field: str, stage: str) -> None:
    def run(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        if ctx.model is False:
            ctx.skip("a run does not recompute: check(..., model=) does")
        if ctx.model is None:
            ctx.unknown("no model to recompute with: pass model=")
        if view.numpy("position_ids").ndim != 2:
            ctx.skip("positions on several axes")
        if field == "ref_log_prob" and not _unmoved(view):
            ctx.skip("the policy has moved: the given model is not the reference")
        own, mask = view.numpy(field), view.numpy("response_mask") != 0
        if beyond(model_of(ctx.model), view) or view.numpy("input_ids").min(initial=0) < 0:
            ctx.unknown("input_ids holds ids that the given model has no embedding for")
        try:
            want = _scored(view, ctx, half=False)
        except IndexError:  # an embedding table that is too short: of positions, as ids do fit
            ctx.unknown("position_ids go beyond the positions of the given model")
        gap = np.where(mask & np.isfinite(own), np.abs(own - want), 0.0)
        noise = noise_of(view, ctx, field, field)
        if noise.token is not None:
            bound, name = noise.token, noise.name
        else:
            half = np.abs(_scored(view, ctx, half=True) - want)[mask]
            bound, name = FLOOR_FACTOR * float(half.max(initial=0.0)) + 1e-3, "bfloat16, measured"
        bad = gap > bound
        if bad.any():
            row, column = np.argwhere(bad)[0]
            other = "rollout_log_probs" if field != "rollout_log_probs" else "old_log_probs"
            evidence = {"bound": bound, "bound from": name, "mean gap": float(gap[mask].mean())}
            if other in view.tensors:
                off = np.abs(view.numpy(other) - want)[mask]
                evidence[f"mean gap of {other}"] = float(off[np.isfinite(off)].mean())
            yield ctx.fail(
                field,
                cells=bad,
                expected=f"{want[row, column]:.5g} at row {row}, column {column} (recomputed)",
                actual=f"{own[row, column]:.5g}; {int(bad.sum())} tokens beyond {bound:.3g} nats",
                evidence=evidence,
                causes=("wrong_attention_mask", "wrong_position_ids", "temperature_mismatch",
                        "shift", "stale_rollout_weights"),
            )  # fmt: skip

    probe("DPA308", stages=(stage,), needs=(field, *NEEDS), later=False)(
        named(run, f"{field}_recomputed", f"{field} is what the given model says.")
    )


def _unmoved(view: BatchView) -> bool:
    """True where old and reference log-probs are equal bit for bit on trained tokens."""
    if "old_log_probs" not in view.tensors:
        return False
    mask = view.numpy("response_mask") != 0
    return bool((view.numpy("old_log_probs") == view.numpy("ref_log_prob"))[mask].all())


_recomputed("rollout_log_probs", "rollout")
_recomputed("old_log_probs", "old_log_prob")
_recomputed("ref_log_prob", "ref_log_prob")
