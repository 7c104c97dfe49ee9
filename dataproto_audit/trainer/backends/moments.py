"""Weights and optimizer state of each parameter, out of a rank's file of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dataproto_audit.codes import UsageError

STATELESS = "none"
"""Key of an empty tensor that says: this parameter had no state, as it never had a gradient."""
REMEDY = "Resume from a whole checkpoint; with some of its state, other steps would follow."


def weight_of(
    state: Mapping[str, Tensor], key: str, name: str, piece: Tensor, *, wrote: str
) -> Tensor:
    """``state[key]``, which must be like ``piece``, the weight ``name`` of the model.

    ``wrote`` says what else must be as it was when the checkpoint was written. Raises DPA804.
    """
    given = state.get(key)
    if given is None or given.shape != piece.shape or given.dtype != piece.dtype:
        raise UsageError(
            "DPA804",
            f"the checkpoint does not fit the model: {name} is "
            f"{'missing' if given is None else tuple(given.shape)}, "
            f"the model has {tuple(piece.shape)}.",
            f"Resume with the model, ranks and {wrote} it was written with.",
        )
    return given


def moments_of(state: Mapping[str, Tensor], parameters: Iterable[str]) -> list[dict[str, Tensor]]:
    """Copies of each parameter's state by key, in the order of ``parameters``.

    Names in ``state`` are ``optim/PARAMETER/KEY``. A checkpoint that was written before the first
    step holds no state at all, which is no fault. Raises DPA804 if one parameter lacks what others
    have.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.startswith("optim/"):
            parameter, _, key = name.removeprefix("optim/").rpartition("/")
            by_name.setdefault(parameter, {})[key] = value
    wanted = {key for found in by_name.values() for key in found} - {STATELESS}
    out = []
    for parameter in parameters:
        found = by_name.get(parameter, {})
        lacks = sorted(wanted - found.keys())
        if lacks and STATELESS not in found:
            raise lost(parameter, lacks)
        out.append({key: value.clone() for key, value in found.items() if key != STATELESS})
    return out


def lost(parameter: str, keys: Iterable[str]) -> UsageError:
    """DPA804 for a parameter whose state ``keys`` are gone, though others have theirs."""
    return UsageError(
        "DPA804",
        f"the checkpoint lacks the optimizer's {', '.join(keys)} of parameter {parameter} and "
        "holds that of others.",
        REMEDY,
    )


def set_rates(groups: Iterable[dict[str, Any]], lr: float, weight_decay: float | None) -> None:
    """Write learning rate and, if given, weight decay into an optimizer's groups."""
    for group in groups:
        group["lr"] = lr
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
