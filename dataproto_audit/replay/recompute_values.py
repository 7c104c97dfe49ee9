"""KL in the reward, and advantages and returns, from the recorded inputs of their stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.files import UNTOLD
from dataproto_audit.probes import Settings
from dataproto_audit.reference import advantages as estimators
from dataproto_audit.reference.groups import group_codes, stats_of_codes
from dataproto_audit.reference.kl import kl_of_difference

UNTOLD_FACTORS = (
    "not recomputed, as nothing says gamma or lam: give them, as in --config 'gamma=1 lam=0.95'"
)
"""Said of advantages and returns that are discounted by factors which nobody told."""
ROUNDINGS = 64
"""Roundings of the largest input that a result may be off by."""


@dataclass(frozen=True)
class Estimated:
    """Expected values and bounds, each ``[rows, response]``, by field; ``looked`` is the mask."""

    name: str
    looked: NDArray[np.bool_]
    values: dict[str, tuple[NDArray[Any], NDArray[Any]]]


def kl_reward(view: BatchView) -> tuple[Any, Any, Any, dict[str, Any]] | None:
    """Expected rewards, where they count, their bound, and the coefficient that was fitted.

    The coefficient is not looked up: for each estimator the one that explains most tokens is
    fitted, and the estimator that explains the rewards best is taken. None where a field is
    missing or there is no distance between policy and reference to fit with.
    """
    names = ("token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_prob")
    if not all(name in view.tensors for name in (*names, "response_mask")):
        return None
    scores, rewards, old, ref = (view.numpy(name).astype(np.float64) for name in names)
    mask = view.numpy("response_mask") != 0
    if not scores.shape == rewards.shape == old.shape == ref.shape == mask.shape:
        return None
    penalty, distance = scores - rewards, np.where(mask, old - ref, 0.0)
    use = mask & np.isfinite(penalty) & np.isfinite(distance)
    if not (use & (np.abs(distance) > 1e-3)).any():
        return None
    best = None
    unit = torch.finfo(view.tensors["token_level_rewards"].dtype).eps
    slack = ROUNDINGS * unit * (np.abs(scores) + np.abs(rewards) + 1e-3)
    for kind in ("k1", "k3", "k2", "abs"):
        kl = kl_of_difference(torch.from_numpy(distance), kind).numpy()
        told = use & (np.abs(kl) > 1e-6)
        if not told.any():
            continue
        beta = float(np.median(penalty[told] / kl[told]))
        allowed = slack + abs(beta) * _rounded(view, kl)
        fits = float((np.abs(penalty - beta * kl) <= allowed)[use].mean())
        if best is None or fits > best[0] + 1e-9:
            best = (fits, kind, beta, kl)
    if best is None or best[2] <= 0:  # nothing taken off, or distance rewarded: the checks say so
        return None
    _, kind, beta, kl = best
    expected = scores - beta * kl * mask
    everywhere = np.isfinite(expected) & np.isfinite(rewards)
    size = np.abs(distance) + (1.0 if kind in ("k2", "k3") else 0.0)  # the terms that make it up
    bound = slack + abs(beta) * (1e-4 * (1.0 + np.abs(distance)) + _rounded(view, size))
    return expected, everywhere, bound, {"estimator": kind, "coefficient": beta}


def _rounded(view: BatchView, size: NDArray[Any]) -> NDArray[Any]:
    """What numbers of that size are rounded by in the precision of the log-probs, in which verl
    computes their KL."""
    dtypes = [view.tensors[name].dtype for name in ("old_log_probs", "ref_log_prob")]
    unit = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)
    rounded: NDArray[Any] = unit * np.abs(size)
    return rounded


def advantages(view: BatchView, settings: Settings) -> Estimated | str:
    """What the configured estimator gives for the recorded rewards and masks, or what is missing.

    The mask is that after the stage: rejection belongs to it.
    """
    name = settings.adv_estimator
    if name is None:
        return f"advantages: {UNTOLD}"
    if name not in estimators.ESTIMATOR_NEEDS:
        return f"advantages: the reference has no estimator {name!r}"
    lacking = [f for f in estimators.ESTIMATOR_NEEDS[name] if f not in view]
    if lacking:
        return f"advantages: not recorded: {', '.join(lacking)}"
    fields: dict[str, Any] = {
        n: torch.from_numpy(np.ascontiguousarray(view.numpy(n)))
        for n in ("token_level_rewards", "response_mask", "values", "reward_baselines")
        if n in view.tensors
    }
    rewards, mask = fields["token_level_rewards"], fields["response_mask"]
    if rewards.dim() != 2 or rewards.shape != mask.shape:
        return "advantages: rewards and mask have no common shape"
    if not rewards.is_floating_point():
        return "advantages: the rewards are no floats"
    try:
        made = _estimated(name, fields, view, settings)
    except (ValueError, TypeError) as error:  # one row alone, nothing trained: the checks say so
        return f"advantages: {error}"
    if made is None:
        return f"advantages: {UNTOLD_FACTORS}"
    looked = mask.numpy() != 0
    slack = _slack(name, rewards, view)
    out = {}
    for field_name, expected in zip(("advantages", "returns"), made, strict=True):
        values = expected.numpy()
        dtype = view.tensors[field_name].dtype if field_name in view.tensors else torch.float32
        unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        bound = ROUNDINGS * unit * (1.0 + np.abs(values)) + slack
        out[field_name] = (values, np.where(np.isfinite(bound), bound, np.inf))
    return Estimated(name, looked, out)


def _estimated(
    name: str, fields: dict[str, Any], view: BatchView, settings: Settings
) -> tuple[Any, Any] | None:
    rewards, mask = fields["token_level_rewards"], fields["response_mask"]
    uid = [str(u) for u in view.arrays["uid"].tolist()] if "uid" in view.arrays else []
    if name == "gae":
        if settings.gamma is None or settings.lam is None:
            return None
        gamma, lam = settings.gamma, settings.lam
        made: tuple[Any, Any] = estimators.gae(
            rewards, fields["values"], mask, gamma=gamma, lam=lam
        )
        return made
    if name == "remax":
        baselines = fields["reward_baselines"]
        made = estimators.remax(rewards, mask, baselines)
        return made
    if name == "reinforce_plus_plus":
        if settings.gamma is None:
            return None
        made = estimators.reinforce_plus_plus(rewards, mask, gamma=settings.gamma)
        return made
    options = {}
    if name.startswith("grpo"):
        options["norm_by_std"] = settings.norm_adv_by_std is not False
    made = getattr(estimators, name)(rewards, mask, uid, **options)
    return made


def _slack(name: str, rewards: torch.Tensor, view: BatchView) -> NDArray[Any]:
    """What rounding of the rewards alone may do, ``[rows, 1]``: much where a group is all equal."""
    unit = torch.finfo(rewards.dtype).eps
    scores = rewards.double().sum(1)
    size = ROUNDINGS * unit * scores.abs()
    if "uid" not in view.arrays or not name.startswith("grpo"):
        total = float(size[torch.isfinite(size)].max()) if len(size) else 0.0
        return np.full((len(scores), 1), 10 * total + 1e-4)
    stats = stats_of_codes(scores, group_codes([str(u) for u in view.arrays["uid"].tolist()]))
    slack: NDArray[Any] = (size / (stats.std() + 1e-6)).numpy()[:, None]
    return slack
