"""The loss of a mini-batch from the fields that an update works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.probes import Settings
from dataproto_audit.probes import value_terms as critic
from dataproto_audit.probes.loss_terms import (
    ENTROPY,
    REF,
    WEIGHTS,
    arguments_of,
    parts_of,
    terms_of,
)
from dataproto_audit.reference.kl import KL_KINDS
from dataproto_audit.reference.losses import AGGREGATION_MODES

NEEDS = ("update_log_probs", "mini_batch", "old_log_probs", "advantages", "response_mask")
TERMS = ("pg_loss", "kl_loss", "entropy_loss", "total", "normaliser")


def fields_used(has: Callable[[str], bool], s: Settings) -> list[str]:
    """Names that the loss is computed from; ``has`` says which fields there are."""
    own = arguments_of(has, s, {}).values()
    return [*NEEDS, *(name for name in (REF, ENTROPY, WEIGHTS) if name in own)]


def unusable(fields: Mapping[str, Tensor], s: Settings) -> str:
    """Why the loss cannot be computed; empty where it can."""
    used = fields_used(fields.__contains__, s)
    missing = [name for name in used if name not in fields]
    if missing:
        return f"record {', '.join(missing)}"
    if s.loss_agg_mode is not None and s.loss_agg_mode not in AGGREGATION_MODES:
        return f"no aggregation is called {s.loss_agg_mode}"
    if s.use_kl_loss and s.kl_loss_type is not None and s.kl_loss_type not in KL_KINDS:
        return f"no KL estimator is called {s.kl_loss_type}"
    if s.clip_ratio_c is not None and s.clip_ratio_c <= 1:
        return f"clip_ratio_c is {s.clip_ratio_c}"
    shape = fields["response_mask"].shape
    for name in used:
        wanted = shape[:1] if name == "mini_batch" else shape
        if len(shape) != 2 or fields[name].shape != wanted:
            return f"{name} has the shape {list(fields[name].shape)}"
        # Only the mask's signature is strict: loss_terms makes floats of the others.
        kind = fields[name].dtype
        bad = kind.is_floating_point if name == "response_mask" else kind == torch.bool
        if kind.is_complex or (bad and name != "mini_batch"):
            return f"{name} is {str(kind).removeprefix('torch.')}"
    return ""


def rows_of(fields: Mapping[str, Tensor], number: int) -> NDArray[np.int64]:
    """Rows of mini-batch ``number``."""
    rows: NDArray[np.int64] = torch.nonzero(fields["mini_batch"] == number).reshape(-1).numpy()
    return rows


def loss_terms(
    fields: Mapping[str, Tensor], number: int, s: Settings, *,
    told: Mapping[str, Any] | None = None, ranks: Any = (),
) -> dict[str, float]:  # fmt: skip
    """Terms of mini-batch ``number``, by name; {} where no row is in it.

    Fields are ``[rows, response]``, ``mini_batch`` is ``[rows]``. ``told`` is the mini-batch's
    entry of ``losses`` and ``ranks`` the notes of the ranks, see :mod:`..probes.loss_terms`. Only
    where :func:`unusable` and :func:`..probes.loss_terms.unreadable` have nothing to say. Raises
    :class:`..probes.loss_terms.Undecided` where micro-batches count and were not recorded.
    """
    told, rows = told or {}, rows_of(fields, number)
    if not len(rows):
        return {}
    made = terms_of(
        fields.__getitem__, fields.__contains__, rows, s, told,
        parts=parts_of(ranks, rows, number) if told.get("split") else (),
    )  # fmt: skip
    return {name: float(made[name]) for name in TERMS}  # type: ignore[literal-required]  # the names are LossTerms' keys


def value_terms(
    fields: Mapping[str, Tensor], number: int, told: Mapping[str, Any]
) -> dict[str, float]:
    """``vf_loss`` and ``normaliser`` of the critic's mini-batch ``number``, as ``told`` says how;
    {} where no row is in it, or a field or setting is missing or of another kind."""
    numbers = fields.get(critic.NUMBERS)
    held = [fields[name] for name in critic.FIELDS.values() if name in fields]
    if numbers is None or critic.unreadable(told) or len(held) < len(critic.FIELDS):
        return {}
    rows = torch.nonzero(numbers == number).reshape(-1)
    *floats, mask = held
    if not len(rows) or len({t.shape for t in held}) > 1:
        return {}
    if mask.is_floating_point() or not all(t.is_floating_point() for t in floats):
        return {}
    return critic.terms_of(critic.arguments_of(fields, rows), critic.how_of(told))
