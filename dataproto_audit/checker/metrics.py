"""Names of metrics: ours, verl's, and those of peers, in one table.

Histories come from trackers and log files of several projects. Where two names mean the same
quantity in the same unit they share one name here; quantities that only look alike do not.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any
from zlib import crc32

ALIASES: dict[str, tuple[str, ...]] = {
    "training/global_step": ("step", "global_step", "train/global_step", "_step"),
    "actor/grad_norm": ("grad_norm", "train/grad_norm", "policy/grad_norm"),
    "actor/pg_loss": ("loss", "policy_loss", "train/policy_loss", "pg_loss", "train/loss"),
    "actor/ppo_kl": ("ppo_kl", "approx_kl", "policy/approxkl_avg", "train/ppo_kl", "train/kl"),
    "actor/pg_clipfrac": ("clipfrac", "policy/clipfrac_avg", "clip_ratio/region_mean",
                          "train/pg_clipfrac", "clip_fraction"),
    "actor/kl_loss": ("kl_loss", "train/kl_loss", "kl"),
    "actor/entropy": ("entropy", "policy/entropy_avg", "train/entropy_loss", "mean_entropy"),
    "actor/lr": ("lr", "learning_rate", "train/learning_rate"),
    "actor/ppo_epochs": ("ppo_epochs", "num_ppo_epochs", "num_iterations"),
    "rollout_corr/abs_log_prob_gap": (
        "lp_gap", "training/rollout_log_probs_abs_diff_mean",
        "sampling/sampling_logp_difference/mean",
        "train/train_rollout_logprob_abs_diff",
    ),
    "response_mask/masked_share": ("masked_out_frac",),
    "response_mask/tokens": ("trained_tokens", "total_num_tokens", "tokens/trained"),
    "groups/dead_share": ("dead_groups", "frac_reward_zero_std", "zero_std_frac"),
    "critic/rewards/mean": ("reward", "rewards/mean", "train/reward", "objective/scores"),
    "rollout/greedy_hash": ("greedy_hash",),
}  # fmt: skip
"""Canonical name -> other names of the same quantity."""

_CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


def canonical(name: str) -> str:
    """The name that probes use for a metric; an unknown one stays as it is."""
    return _CANONICAL.get(name, name)


def as_metrics(step: Any) -> dict[str, Any] | None:
    """The metrics of a step under canonical names; None when ``step`` is a batch instead."""
    if not isinstance(step, Mapping) or any(k in step for k in ("batch", "non_tensor_batch")):
        return None
    found: dict[str, Any] = {}
    for name, value in step.items():
        if value is None:  # not measured in this step
            continue
        if isinstance(value, str):  # equal texts, equal numbers: all that a history is asked
            found[canonical(str(name))] = float(crc32(value.encode()))
        elif isinstance(value, numbers.Real):
            found[canonical(str(name))] = _within(value)
        elif isinstance(value, numbers.Number):
            found[canonical(str(name))] = value
        elif getattr(value, "ndim", None) == 0:
            found[canonical(str(name))] = value.item()
        else:
            return None
    return found


def _within(value: Any) -> Any:
    """``value``, or infinity for a number beyond what a float holds: no metric is that large."""
    try:
        float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf
    return value
