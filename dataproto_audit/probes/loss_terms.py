"""The loss of one mini-batch from the fields that an update works on, as its path splits it.

One rule for the checks, for replay and for shrink. An entry of ``losses`` may say how its path
differs: ``loss_mode`` and ``gate_temperatures``, which policy loss it is; ``split`` = ``rows``, the
mean over ranks and micro-batches of their own losses, weighted by rows; ``old`` = ``new``, new
log-probs stood in for the old ones; ``eps``, the precision of what it was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Settings
from dataproto_audit.probes.registry import unchecked
from dataproto_audit.reasons import NotRecorded
from dataproto_audit.reference.losses import LOSS_MODES, TOKEN_MEAN, LossTerms, policy_loss

TERMS = ("pg_loss", "kl_loss", "entropy_loss", "total")
TOLD = (*TERMS, "normaliser")
"""Numbers of an entry of ``losses``."""
RELATIVE = 1e-4
ABSOLUTE = 1e-5
"""Float32 sums over a mini-batch in another order, for per-token terms of order 1."""
REF, ENTROPY, WEIGHTS = "ref_log_prob", "update_entropys", "rollout_is_weights"
Parts = tuple[tuple[NDArray[np.int64], ...], ...]


class Undecided(ValueError):
    """The record does not say what the loss was computed from; ``reason`` says what to record."""

    def __init__(self, lacking: str) -> None:
        self.reason = NotRecorded.of(lacking)
        super().__init__(self.reason)


def arguments_of(
    has: Callable[[str], bool], s: Settings, told: Mapping[str, Any]
) -> dict[str, str]:
    """Name of the field that each argument of ``policy_loss`` is; ``has`` says which there are.

    A KL coefficient counts only with ``use_kl_loss``: without it the KL is in the reward, or off.
    """
    out = {
        "log_probs": "update_log_probs",
        "old_log_probs": "update_log_probs" if told.get("old") == "new" else "old_log_probs",
        "advantages": "advantages",
        "response_mask": "response_mask",
    }
    if s.use_kl_loss and (s.kl_loss_coef or has(REF)):
        out["ref_log_prob"] = REF
    if s.entropy_coeff:
        out["entropy"] = ENTROPY
    if has(WEIGHTS):
        out["rollout_is_weights"] = WEIGHTS
    return out


def how_of(s: Settings, told: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments: the configured loss, and which one it is where it is not PPO's."""
    other: dict[str, Any] = {}
    if "loss_mode" in told:
        other["loss_mode"] = told["loss_mode"]
    if told.get("gate_temperatures") is not None:
        other["gate_temperatures"] = tuple(map(float, told["gate_temperatures"]))
    return {
        **other,
        "clip_ratio_low": s.clip_ratio_low,
        "clip_ratio_high": s.clip_ratio_high,
        "clip_ratio_c": s.clip_ratio_c,
        "loss_agg_mode": s.loss_agg_mode or TOKEN_MEAN,
        "kl_loss_coef": (s.kl_loss_coef or 0.0) if s.use_kl_loss else 0.0,
        "kl_loss_type": s.kl_loss_type or "low_var_kl",
        "entropy_coeff": s.entropy_coeff or 0.0,
    }


def picked(
    field: Callable[[str], Tensor], names: Mapping[str, str], rows: Tensor
) -> dict[str, Any]:
    """The rows of each argument, ``[rows, response]``; ``field`` gives a whole field by name."""
    return {argument: field(name).index_select(0, rows) for argument, name in names.items()}


def unreadable(told: Mapping[str, Any]) -> str:
    """Why the loss of an entry of ``losses`` is not computed as it tells; empty where it is."""
    if why := no_number(told, *TOLD):
        return why
    mode, gates = told.get("loss_mode", "vanilla"), told.get("gate_temperatures")
    if not isinstance(mode, str) or mode not in LOSS_MODES:
        return f"no recomputation of the loss {mode}"
    if told.get("split") not in (None, "rows"):
        return f"no loss is split by {told['split']}"
    if not isinstance(told.get("eps") or 0.0, (int, float)):
        return "eps is no number"
    if gates is None or _pair(gates):
        return ""
    return "gate_temperatures are no two positive numbers"


def no_number(told: Mapping[str, Any], *names: str) -> str:
    """Which of these terms of an entry of ``losses`` is there and no number; empty for none."""
    for name in names:
        value = told.get(name)
        if value is None:
            continue
        if isinstance(value, (str, bytes)):
            return f"losses.{name} is no number"
        try:
            float(value.detach() if isinstance(value, Tensor) else value)
        except (
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
        ):  # a list, a tensor without data
            return f"losses.{name} is no number"
    return ""


def not_finite(view: BatchView, fields: Iterable[str], numbers: str) -> str:
    """The first of the loss's fields with NaN or infinity on a trained token of a row that
    ``numbers`` puts in a mini-batch; empty for none."""
    on = (view.numpy("response_mask") != 0) & (view.numpy(numbers) >= 0)[:, None]
    there = (n for n in fields if n in view.tensors and view.numpy(n).shape == on.shape)
    return next((n for n in there if not np.isfinite(view.numpy(n)[on]).all()), "")


def _pair(gates: object) -> bool:
    return (
        isinstance(gates, (list, tuple))
        and len(gates) == 2
        and all(isinstance(g, (int, float)) and 0 < g < float("inf") for g in gates)
    )


@torch.inference_mode()  # nothing is differentiated, and autograd's bookkeeping costs as much
def terms_of(
    field: Callable[[str], Tensor],
    has: Callable[[str], bool],
    rows: NDArray[np.int64],
    s: Settings,
    told: Mapping[str, Any],
    *,
    parts: Parts = (),
) -> LossTerms:
    """The loss of the mini-batch ``rows``, float64, from the recorded log-probs.

    Unsplit; where the path averages over micro-batches, the average of theirs, as it should have
    been. ``parts`` are those, as :func:`parts_of` has them. Raises :class:`Undecided` where they
    are needed and do not make up the mini-batch.
    """
    names, how, index = arguments_of(has, s, told), how_of(s, told), torch.from_numpy(rows)
    whole: LossTerms = unchecked(policy_loss)(**picked(field, names, index), **how)
    if told.get("split") != "rows":
        return whole
    held = [micro for rank in parts for micro in rank]
    if not held or sorted(np.concatenate(held).tolist()) != list(range(len(rows))):
        raise Undecided("micro-batches that make up each mini-batch")
    total: dict[str, Any] = dict.fromkeys(TERMS, 0.0)
    for rank in parts:
        own = sum(len(micro) for micro in rank)
        for micro in rank:
            fields = picked(field, names, index[torch.from_numpy(micro)])
            part: Mapping[str, Any] = unchecked(policy_loss)(**fields, **how)
            for name in TERMS:
                total[name] = total[name] + part[name] * (len(micro) / own / len(parts))
    return {**whole, **total}  # type: ignore[typeddict-item]  # the terms of LossTerms


def parts_of(ranks: Any, rows: NDArray[np.int64], number: int) -> Parts:
    """The micro-batches of mini-batch ``number`` by rank, as positions in ``rows``, those of it; ()
    where the notes of ``ranks`` do not say."""
    if not isinstance(ranks, Sequence) or not all(map(_tells, ranks)):
        return ()
    place = {row: at for at, row in enumerate(rows.tolist())}
    start, out = 0, []
    for rank in ranks:
        numbers = rank.get("mini_batches") or [number] * len(rank["indices"])
        micros = [[place[start + at] for at in micro if at >= 0 and start + at in place]
                  for micro, mini in zip(rank["indices"], numbers, strict=False)
                  if mini == number]  # fmt: skip
        out.append(tuple(np.asarray(micro, np.int64) for micro in micros if micro))
        start += int(rank["rows"])
    return tuple(out)


def _tells(rank: Any) -> bool:
    """Whether a rank's note says which of how many rows each of its micro-batches had."""
    if not isinstance(rank, Mapping) or not isinstance(rank.get("rows"), (int, np.integer)):
        return False
    indices = rank.get("indices")
    return (
        isinstance(indices, Sequence)
        and len(indices) > 0
        and all(
            isinstance(micro, (Sequence, np.ndarray))
            and all(isinstance(at, (int, np.integer)) for at in micro)
            for micro in indices
        )
    )


def bound_of(
    exact: float, advantages: Any, mask: Any, normaliser: float, *, eps: float = 0.0
) -> float:
    """How far a reported term may lie from ``exact``: rounding, which grows with the sums behind
    the loss, so with tokens per normaliser and with the largest advantage.

    ``advantages`` and ``mask`` (bool) are ``[rows, response]`` of the mini-batch; ``eps`` is the
    precision of the numbers it was computed from.
    """
    largest = float(np.abs(advantages)[mask].max(initial=1.0))
    scale = max(1.0, largest) * max(1.0, float(np.count_nonzero(mask)) / max(normaliser, 1.0))
    return max(ABSOLUTE, eps) * scale + max(RELATIVE, eps) * abs(exact)
