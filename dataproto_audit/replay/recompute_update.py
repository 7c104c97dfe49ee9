"""The loss of each mini-batch, unsplit, from the recorded log-probs, advantages and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.reference.losses import AGGREGATION_MODES, policy_loss

NEEDS = ("update_log_probs", "mini_batch", "old_log_probs", "advantages", "response_mask")
TERMS = ("pg_loss", "kl_loss", "total", "normaliser")
RELATIVE, ABSOLUTE = 1e-4, 1e-5
Row = tuple[str, NDArray[Any], NDArray[Any], NDArray[Any], str]


def losses(view: BatchView, evidence: Mapping[str, Any], settings: Settings) -> Iterator[Row]:
    """(term, recorded, expected, bound, what is missing), a value each mini-batch.

    Mini-batches that the producer computed in another way on purpose are left to the checks:
    weighted by rows, with new log-probs for old ones, or of lower precision.
    """
    told = evidence.get("losses")
    if not isinstance(told, (list, tuple)) or not all(isinstance(t, Mapping) for t in told):
        yield "loss", _EMPTY, _EMPTY, _EMPTY, "loss: record `losses`, the terms of each mini-batch"
        return
    lacking = [name for name in NEEDS if name not in view.tensors]
    if lacking or settings.loss_agg_mode not in AGGREGATION_MODES:
        what = f"record {', '.join(lacking)}" if lacking else "the aggregation is unknown"
        yield "loss", _EMPTY, _EMPTY, _EMPTY, f"loss: {what}"
        return
    if any(t.get("split") or t.get("old") or t.get("eps") for t in told):
        return
    fields = {n: torch.from_numpy(np.ascontiguousarray(view.numpy(n))) for n in NEEDS}
    recorded: dict[str, list[float]] = {term: [] for term in TERMS}
    expected: dict[str, list[float]] = {term: [] for term in TERMS}
    for number, reported in enumerate(told):
        rows = torch.nonzero(fields["mini_batch"] == number).squeeze(1)
        try:
            terms: Mapping[str, Any] = _terms(view, fields, rows, settings) if len(rows) else {}
        except (ValueError, KeyError, TypeError) as error:
            yield "loss", _EMPTY, _EMPTY, _EMPTY, f"loss: {error}"
            return
        for term in TERMS:
            value = reported.get(term)
            if term in terms and isinstance(value, (int, float)):
                recorded[term].append(float(value))
                expected[term].append(float(terms[term]))
    for term in TERMS:
        own, want = np.array(recorded[term]), np.array(expected[term])
        if len(own):
            yield term, own, want, ABSOLUTE + RELATIVE * np.abs(want), ""


_EMPTY: NDArray[Any] = np.zeros(0)


def _terms(view: BatchView, fields: Any, rows: Any, settings: Settings) -> Mapping[str, Any]:
    def part(name: str) -> Any:
        if name not in fields:
            fields[name] = torch.from_numpy(np.ascontiguousarray(view.numpy(name)))
        return fields[name][rows]

    with torch.inference_mode():
        made: Mapping[str, Any] = policy_loss(
            part("update_log_probs"), part("old_log_probs"), part("advantages"),
            part("response_mask"),
            ref_log_prob=part("ref_log_prob") if settings.use_kl_loss else None,
            entropy=part("update_entropys") if settings.entropy_coeff else None,
            rollout_is_weights=part("rollout_is_weights") if "rollout_is_weights" in view else None,
            clip_ratio_low=settings.clip_ratio_low,
            clip_ratio_high=settings.clip_ratio_high,
            clip_ratio_c=settings.clip_ratio_c,
            loss_agg_mode=settings.loss_agg_mode or "token-mean",
            kl_loss_coef=(settings.kl_loss_coef or 0.0) if settings.use_kl_loss else 0.0,
            kl_loss_type=settings.kl_loss_type or "low_var_kl",
            entropy_coeff=settings.entropy_coeff or 0.0,
        )  # fmt: skip
    return made
