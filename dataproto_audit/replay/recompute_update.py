"""The loss of each mini-batch, unsplit, from the recorded log-probs, advantages and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.reference.losses import AGGREGATION_MODES
from dataproto_audit.replay.update_terms import fields_used, loss_terms, unreadable, unusable

COMPARED = ("pg_loss", "kl_loss", "total", "normaliser")
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
    if settings.loss_agg_mode not in AGGREGATION_MODES:
        yield "loss", _EMPTY, _EMPTY, _EMPTY, "loss: the aggregation is unknown"
        return
    if any(t.get("split") or t.get("old") or t.get("eps") for t in told):
        return
    used = [name for name in fields_used(view.__contains__, settings) if name in view.tensors]
    fields = {n: torch.from_numpy(np.ascontiguousarray(view.numpy(n))) for n in used}
    reason = unusable(fields, settings) or next(filter(None, map(unreadable, told)), "")
    if reason:
        yield "loss", _EMPTY, _EMPTY, _EMPTY, f"loss: {reason}"
        return
    recorded: dict[str, list[float]] = {term: [] for term in COMPARED}
    expected: dict[str, list[float]] = {term: [] for term in COMPARED}
    for number, reported in enumerate(told):
        terms = loss_terms(fields, number, settings, told=reported)
        for term in COMPARED:
            value = reported.get(term)
            if term in terms and isinstance(value, (int, float)):
                recorded[term].append(float(value))
                expected[term].append(terms[term])
    for term in COMPARED:
        own, want = np.array(recorded[term]), np.array(expected[term])
        if len(own):
            yield term, own, want, ABSOLUTE + RELATIVE * np.abs(want), ""


_EMPTY: NDArray[Any] = np.zeros(0)
