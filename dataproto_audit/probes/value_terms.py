"""The critic's loss of one mini-batch from the fields that its update works on.

One rule for the checks, for replay and for shrink, as :mod:`.loss_terms` is of the policy's. An
entry of ``losses`` says how it was made: ``cliprange_value`` and ``loss_agg_mode``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dataproto_audit.probes.loss_terms import no_number
from dataproto_audit.reasons import NotRecorded
from dataproto_audit.reference.losses import AGGREGATION_MODES, count_normaliser
from dataproto_audit.reference.values import value_loss

FIELDS = {
    "values": "update_values",
    "old_values": "values",
    "returns": "returns",
    "response_mask": "response_mask",
}
"""Name of the field that each argument of ``value_loss`` is."""
NUMBERS = "value_mini_batch"
"""Which mini-batch each row was in ``[rows]``."""
HOW = ("cliprange_value", "loss_agg_mode")


def how_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments, of an entry that :func:`unreadable` has nothing to say of."""
    clip, mode = (told[name] for name in HOW)
    return {"clip": float(clip), "loss_agg_mode": str(mode)}


def unreadable(told: Mapping[str, Any]) -> str:
    """Why the loss of an entry of ``losses`` is not computed as it tells; empty where it is."""
    lacking = [name for name in HOW if told.get(name) is None]
    if lacking:
        return NotRecorded.of(*(f"losses.{name}" for name in lacking))
    clip, mode = (told[name] for name in HOW)
    if not isinstance(mode, str) or mode not in AGGREGATION_MODES:
        return f"unknown aggregation {mode}"
    if why := no_number(told, "cliprange_value"):
        return why
    clipped = 0 <= float(clip) < math.inf and not isinstance(clip, bool)
    return "" if clipped else f"cliprange_value is {clip!r}"


def arguments_of(fields: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """The rows of each argument of ``value_loss``, ``[rows, response]``, by its name."""
    return {argument: fields[name].index_select(0, rows) for argument, name in FIELDS.items()}


def terms_of(arguments: Mapping[str, Tensor], how: Mapping[str, Any]) -> dict[str, float]:
    """``vf_loss`` and the count that it is divided by, of all rows at once, float64."""
    mask, mode = arguments["response_mask"], str(how["loss_agg_mode"])
    given: dict[str, Any] = {**arguments, **how}
    return {
        "vf_loss": float(value_loss(**given)),
        "normaliser": float(count_normaliser(mask, mode)),
    }
