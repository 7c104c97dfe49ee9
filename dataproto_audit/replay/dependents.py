"""Fields that follow from others, computed anew after a cut.

A cell that agreed with its recomputation before the cut gets the value recomputed after it; a cell
that did not, keeps what it held, or its distance. So a cut batch stays consistent, except for what
was wrong with it. Formulas: ``reference/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.probes import Settings
from dataproto_audit.reference import advantages as estimators

Array = NDArray[Any]
Index = NDArray[np.int64]
Fields = Mapping[str, Any]
SCORES = ("token_level_scores", "rm_scores")
MADE = ("advantages", "returns")
TOLERANCE = 1e-5
"""Rounding of a value of order 1 that went through float32."""
_PLAIN: dict[str, Callable[..., Any]] = {
    "grpo": estimators.grpo, "rloo": estimators.rloo, "opo": estimators.opo,
    "gpg": estimators.gpg, "grpo_passk": estimators.grpo_passk,
    "reinforce_plus_plus_baseline": estimators.reinforce_plus_plus_baseline,
}  # fmt: skip
_ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


@dataclass(frozen=True)
class Rule:
    """How advantages were made. ``gamma`` and ``lam`` are 1 where nobody says otherwise."""

    estimator: str
    by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0

    def made(self, tensors: Fields, uid: Any) -> dict[str, Tensor] | None:
        """Advantages and returns of a batch, float64; None where they cannot be computed."""
        name = _ALIASES.get(self.estimator, self.estimator)
        rewards, mask = tensors.get("token_level_rewards"), tensors.get("response_mask")
        if rewards is None or mask is None or rewards.shape != mask.shape:
            return None
        try:
            if name == "gae":
                pair = estimators.gae(
                    rewards.float(), tensors["values"].float(), mask, gamma=self.gamma, lam=self.lam
                )
            elif name == "remax":
                pair = estimators.remax(rewards, mask, tensors["reward_baselines"])
            elif name == "reinforce_plus_plus":
                pair = estimators.reinforce_plus_plus(rewards, mask, gamma=self.gamma)
            elif name not in _PLAIN or uid is None or len(uid) != len(mask):
                return None
            else:
                how = {"norm_by_std": self.by_std} if name.startswith("grpo") else {}
                pair = _PLAIN[name](rewards, mask, [str(one) for one in uid], **how)
        except Exception:  # noqa: BLE001 - broken fields are what this is about; they stay as they are
            return None
        return dict(zip(MADE, pair, strict=True))


def rule_of(settings: Settings, tensors: Fields, uid: Any) -> Rule | None:
    """The configured estimator, else the one that explains most of the advantages; or None."""
    gamma, lam = settings.gamma or 1.0, settings.lam or 1.0
    by_std = settings.norm_adv_by_std is not False
    if settings.adv_estimator is not None:
        return Rule(settings.adv_estimator, by_std, gamma, lam)
    if "advantages" not in tensors:
        return None
    shares = {}
    tried = [Rule("grpo"), Rule("grpo", by_std=False), *map(Rule, ("rloo", "gae", "remax", "opo",
             "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"))]  # fmt: skip
    for rule in tried:
        made = rule.made(tensors, uid)
        if made is not None:
            on = tensors["response_mask"] != 0
            agreed = alike(tensors["advantages"], made["advantages"])[on]
            shares[rule] = float(agreed.double().mean()) if len(agreed) else 0.0
    best = max(shares, key=shares.__getitem__, default=None)
    return best if best is not None and shares[best] > 0.5 else None


def alike(found: Tensor, want: Tensor) -> Tensor:
    """Where two tensors agree within rounding, of half precision where one is in it."""
    if found.shape != want.shape:
        return torch.zeros(found.shape, dtype=torch.bool)
    eps = max(TOLERANCE, 2 * torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0)
    error = (found.double() - want.double()).abs()
    return error <= eps * want.double().abs().clamp(min=1.0)


def last_attended(attention: Array, prompt: int) -> Index:
    """The last attended column of each response; -1 where none is."""
    on = attention[:, prompt:] != 0
    width = on.shape[1]
    last = np.where(on.any(1), width - 1 - np.argmax(on[:, ::-1], axis=1), -1)
    return last.astype(np.int64)


def with_scores_moved(
    old: Tensor, new: Tensor, before: Index, after: Index, rows: Index, kept: Index
) -> Tensor:
    """``new``, a cut of ``old``, with the score of each row on its last attended column again.

    ``before`` and ``after`` are those columns before and after the cut, ``rows`` and ``kept`` the
    rows and columns of ``old`` that ``new`` has. Where the column stayed, nothing is moved.
    """
    if old.dim() != 2 or not old.is_floating_point() or len(new) != len(rows):
        return new
    out = new.clone()
    stayed = set(kept.tolist())
    for place, row in enumerate(rows.tolist()):
        at, to = int(before[row]), int(after[place])
        if at < 0 or to < 0 or at in stayed or at >= old.shape[1] or to >= out.shape[1]:
            continue
        if float(out[place, to]) == 0.0:
            out[place, to] = old[row, at]
    return out


def text_positions(attention: Tensor) -> Tensor:
    """clip(cumsum(attention) - 1, 0): positions that count the attended tokens."""
    return ((attention != 0).long().cumsum(1) - 1).clamp(min=0)


def with_positions(new: Tensor, text_before: Tensor, text_after: Tensor) -> Tensor:
    """``new``, a cut of position ids, moved by as much as the text positions of its cells moved."""
    moved = text_after - text_before
    if new.dim() not in (2, 3) or moved.shape != (new.shape[0], new.shape[-1]):
        return new
    return new + (moved if new.dim() == 2 else moved[:, None]).to(new.dtype)
