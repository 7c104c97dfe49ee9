"""The loss of a mini-batch from the fields that an update works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.probes import Settings
from dataproto_audit.reference.kl import KL_KINDS
from dataproto_audit.reference.losses import AGGREGATION_MODES, LOSS_MODES, policy_loss

NEEDS = ("update_log_probs", "mini_batch", "old_log_probs", "advantages", "response_mask")
TERMS = ("pg_loss", "kl_loss", "entropy_loss", "total", "normaliser")
REF, ENTROPY, WEIGHTS = "ref_log_prob", "update_entropys", "rollout_is_weights"


def fields_used(has: Callable[[str], bool], s: Settings) -> list[str]:
    """Names that the loss is computed from; ``has`` says which fields there are.

    A KL coefficient counts only with ``use_kl_loss``: without it the KL is in the reward, or off.
    """
    used = [*NEEDS]
    if s.use_kl_loss and (s.kl_loss_coef or has(REF)):
        used.append(REF)
    if s.entropy_coeff:
        used.append(ENTROPY)
    if has(WEIGHTS):
        used.append(WEIGHTS)
    return used


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


def unreadable(told: Mapping[str, Any]) -> str:
    """Why the policy loss that an entry of ``losses`` names is not computed; empty where it is."""
    mode, gates = told.get("loss_mode", "vanilla"), told.get("gate_temperatures")
    if mode not in LOSS_MODES:
        return f"no policy loss is called {mode}"
    if gates is None or _pair(gates):
        return ""
    return "gate_temperatures are no two positive numbers"


def _pair(gates: object) -> bool:
    return (
        isinstance(gates, (list, tuple))
        and len(gates) == 2
        and all(isinstance(g, (int, float)) and 0 < g < float("inf") for g in gates)
    )


def loss_terms(
    fields: Mapping[str, Tensor], number: int, s: Settings, *, told: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Terms of mini-batch ``number``, by name; {} where no row is in it.

    Fields are ``[rows, response]``, ``mini_batch`` is ``[rows]``. ``told`` is the mini-batch's
    entry of ``losses``: which policy loss it is (``loss_mode``, ``gate_temperatures``; PPO's where
    it does not say), and whether new log-probs stood in for old ones (``old``). Only where
    :func:`unusable` and :func:`unreadable` have nothing to say. Not covered: ``split``, the mean
    over micro-batches.
    """
    told = told or {}
    rows = torch.nonzero(fields["mini_batch"] == number).reshape(-1)
    if not len(rows):
        return {}
    used = fields_used(fields.__contains__, s)
    part = {name: fields[name][rows] for name in used}
    part = {name: t if name == "response_mask" else t.float() for name, t in part.items()}
    if told.get("old") == "new":
        part["old_log_probs"] = part["update_log_probs"]
    other: dict[str, Any] = {"loss_mode": told.get("loss_mode", "vanilla")}
    if told.get("gate_temperatures") is not None:
        other["gate_temperatures"] = tuple(map(float, told["gate_temperatures"]))
    with torch.inference_mode():
        made = policy_loss(
            part["update_log_probs"], part["old_log_probs"], part["advantages"],
            part["response_mask"],
            ref_log_prob=part.get(REF), entropy=part.get(ENTROPY),
            rollout_is_weights=part.get(WEIGHTS),
            clip_ratio_low=s.clip_ratio_low, clip_ratio_high=s.clip_ratio_high,
            clip_ratio_c=s.clip_ratio_c, loss_agg_mode=s.loss_agg_mode or "token-mean",
            kl_loss_coef=s.kl_loss_coef or 0.0 if REF in used else 0.0,
            kl_loss_type=s.kl_loss_type or "low_var_kl", entropy_coeff=s.entropy_coeff or 0.0,
            **other,
        )  # fmt: skip
    return {name: float(made[name]) for name in TERMS}  # type: ignore[literal-required]  # the names are LossTerms' keys
