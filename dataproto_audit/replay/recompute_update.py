"""The loss of each mini-batch, unsplit, from the recorded log-probs, advantages and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.probes.loss_terms import Undecided, bound_of, unreadable
from dataproto_audit.reference.losses import AGGREGATION_MODES
from dataproto_audit.replay.update_terms import fields_used, loss_terms, rows_of, unusable

Row = tuple[str, NDArray[Any], NDArray[Any], NDArray[Any], str]


def losses(view: BatchView, evidence: Mapping[str, Any], settings: Settings) -> Iterator[Row]:
    """(term, recorded, expected, bound, what is missing), a value each mini-batch.

    Each as its path computes it: :mod:`dataproto_audit.probes.loss_terms`. A mini-batch that the
    record does not decide is named as missing, and the others are compared.
    """
    told = evidence.get("losses")
    if not isinstance(told, (list, tuple)) or not all(isinstance(t, Mapping) for t in told):
        yield _missing("record `losses`, the terms of each mini-batch")
        return
    if settings.loss_agg_mode not in AGGREGATION_MODES:
        yield _missing("the aggregation is unknown")
        return
    used = [name for name in fields_used(view.__contains__, settings) if name in view.tensors]
    fields = {n: torch.from_numpy(np.ascontiguousarray(view.numpy(n))) for n in used}
    reason = unusable(fields, settings) or next(filter(None, map(unreadable, told)), "")
    if reason:
        yield _missing(reason)
        return
    compared: dict[str, list[tuple[float, float, float]]] = {t: [] for t in _compared(settings)}
    undecided: dict[str, list[int]] = {}
    for number, reported in enumerate(told):
        try:
            terms = loss_terms(
                fields, number, settings, told=reported, ranks=evidence.get("ranks") or ()
            )
        except Undecided as error:
            undecided.setdefault(str(error), []).append(number)
            continue
        rows = rows_of(fields, number)
        own = [fields[name][rows].numpy() for name in ("advantages", "response_mask")]
        for term in compared:
            value = reported.get(term)
            if term not in terms or not isinstance(value, (int, float)):
                continue
            # A count is exact, whatever the precision of the loss is.
            eps = 0.0 if term == "normaliser" else float(reported.get("eps") or 0.0)
            bound = bound_of(terms[term], own[0], own[1] != 0, terms["normaliser"], eps=eps)
            compared[term].append((float(value), terms[term], bound))
    for why, numbers in undecided.items():
        yield _missing(f"{why} (mini-batch {', '.join(map(str, numbers))})")
    for term, rows_told in compared.items():
        if rows_told:
            recorded, expected, bounds = np.array(rows_told).T
            yield term, recorded, expected, bounds, ""


def _compared(s: Settings) -> tuple[str, ...]:
    """Terms that the settings make part of the loss, and what it was divided by."""
    kl = ("kl_loss",) if s.use_kl_loss else ()
    entropy = ("entropy_loss",) if s.entropy_coeff else ()
    return ("pg_loss", *kl, *entropy, "total", "normaliser")


def _missing(why: str) -> Row:
    return "loss", _EMPTY, _EMPTY, _EMPTY, f"loss: {why}"


_EMPTY: NDArray[Any] = np.zeros(0)
