"""What an estimator with a recursion over tokens should have given, and how exactly.

Numbers only: the probe that judges by them is in :mod:`.returns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.narrow import row_sum
from dataproto_audit.probes.context import Context, group_codes
from dataproto_audit.reference.groups import stats_of_codes
from dataproto_audit.reference.recursions import discounted, gae_terms, mean_and_std

GAE, PLUS, PLUS_BASELINE, REMAX = (
    "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
)  # fmt: skip
NEEDS: dict[str, tuple[str, ...]] = {
    GAE: ("values",), PLUS: (), PLUS_BASELINE: ("uid",), REMAX: ("reward_baselines",),
}  # fmt: skip
"""Fields beyond rewards and mask, by verl's name of the estimator."""
WHITENED = (GAE, PLUS, PLUS_BASELINE)
USUAL = (1.0, 0.99, 0.95, 0.9, 0.999, 0.995, 0.98, 0.97, 0.8)
"""Discounts that are in use."""
ROUNDINGS = 16
"""Roundings of the largest terms that a sum over a row may be off by."""
RELATIVE = 1e-5


@dataclass
class Estimate:
    """Inputs and outputs of one estimator, float64 ``[rows, response]``; ``on`` is the mask."""

    name: str
    rewards: Any
    on: Any
    values: Any
    """The critic's values; zeros where there is no critic."""
    baselines: Any
    """ReMax: the greedy response's score ``[rows, 1]``."""
    advantages: Any
    returns: Any
    """None where the batch has none."""
    gamma: float | None
    lam: float | None
    unit: float
    """Relative rounding of one operation, in the precision of the inputs and of the results."""
    codes: Any = None

    @classmethod
    def of(cls, view: BatchView, ctx: Context, name: str) -> Estimate:
        """Read the fields. Leaves the probe where one is missing, or is not finite."""
        lacking = [f for f in NEEDS[name] if f not in view or f in ctx.broken]
        if lacking:
            ctx.unknown(f"field not in the batch, or not as declared: {', '.join(lacking)}")
        on = view.numpy("response_mask") != 0
        rewards = view.numpy("token_level_rewards").astype(np.float64)
        values = view.numpy("values").astype(np.float64) if name == GAE else np.zeros(on.shape)
        inputs = ["token_level_rewards", *(["values"] if name == GAE else [])]
        if not np.isfinite(rewards.sum() + values.sum()) and not (
            np.isfinite(rewards[on]).all() and np.isfinite(values[on]).all()
        ):
            ctx.unknown("rewards or values are not finite")
        if name in WHITENED and np.count_nonzero(on) < 2:
            ctx.skip("fewer than two trained tokens: nothing can be whitened")
        has = "returns" in view.tensors and "returns" not in ctx.broken
        results = ["advantages", *(["returns"] if has else [])]
        kinds = [view.tensors[f].dtype for f in inputs]
        computed = kinds[0] if len(kinds) == 1 else torch.promote_types(*kinds)
        units = [torch.finfo(d).eps for d in (computed, *(view.tensors[f].dtype for f in results))]
        baselines = np.zeros((view.rows, 1))
        if name == REMAX:
            baselines = view.numpy("reward_baselines").astype(np.float64).reshape(view.rows, -1)
        return cls(
            name, rewards, on, values, baselines[:, :1], view.numpy("advantages"),
            view.numpy("returns") if has else None, ctx.settings.gamma, ctx.settings.lam,
            max(units), group_codes(view, ctx)[0] if name == PLUS_BASELINE else None,
        )  # fmt: skip

    def of_rows(self, rows: Any) -> Estimate:
        """The same of some rows, for estimators whose rows do not depend on each other."""
        return Estimate(
            self.name, self.rewards[rows], self.on[rows], self.values[rows], self.baselines[rows],
            self.advantages[rows], None if self.returns is None else self.returns[rows],
            self.gamma, self.lam, self.unit,
        )  # fmt: skip

    @cached_property
    def settled(self) -> bool:
        """True where every discount that the formula needs is known."""
        unknown = (self.name in (GAE, PLUS) and self.gamma is None) or (
            self.name == GAE and self.lam is None
        )
        return not unknown

    @cached_property
    def raw(self) -> Any:
        """Advantages before the whitening; 0 off the mask. Needs the discounts."""
        if self.name == GAE:
            return gae_terms(self.rewards, self.values, self.on, gamma=self.gamma or 0.0,
                             lam=self.lam or 0.0)  # fmt: skip
        if self.name == PLUS_BASELINE:
            scores = torch.from_numpy(row_sum(self.rewards, np.float64))
            deviation = stats_of_codes(scores, torch.from_numpy(self.codes)).deviation.numpy()
            return np.where(self.on, deviation[:, None], 0.0)
        gamma = 1.0 if self.name == REMAX else self.gamma or 0.0
        found = discounted(self.rewards, self.on, gamma)
        return np.where(self.on, found - self.baselines, 0.0) if self.name == REMAX else found

    @cached_property
    def want_returns(self) -> Any:
        """What the returns should be; of a baseline estimator, the advantages."""
        if self.name == PLUS_BASELINE:
            return self.finished(self.raw)
        return np.where(self.on, self.raw + self.values + self.baselines, 0.0)

    @cached_property
    def raw_of_returns(self) -> Any:
        """Advantages before the whitening as the batch's own returns tell them."""
        return np.where(self.on, self.returns - self.values - self.baselines, 0.0)

    def finished(self, raw: Any) -> Any:
        """``raw`` as the estimator hands it on: whitened over all trained tokens, or as it is."""
        if self.name not in WHITENED:
            return raw
        mean, std = mean_and_std(raw, self.on)
        return np.where(self.on, (raw - mean) / std, 0.0)

    def apart(self, found: Any, want: Any, *, scaled: bool) -> Any:
        """Trained cells at which ``found`` is not ``want`` within rounding; None for no cell.

        ``scaled`` results went through the whitening, which magnifies rounding.
        """
        error = np.abs(found - want)
        slack = RELATIVE * np.maximum(1.0, np.abs(want))
        close = error <= slack
        np.logical_or(close, ~self.on, out=close)
        if close.all():
            return None
        bad = ~(error <= slack + self._rounding(want, scaled=scaled)) & self.on
        return bad if bad.any() else None

    def _rounding(self, want: Any, *, scaled: bool) -> Any:
        terms = np.abs(self.rewards) + 2 * np.abs(self.values) + np.abs(self.raw)
        terms += np.abs(self.baselines)
        terms = np.where(self.on, terms, 0.0)
        step = ROUNDINGS * self.unit
        own = step * np.sqrt((terms**2).sum(1, keepdims=True))
        if not scaled or self.name not in WHITENED:
            return own + step * np.abs(want)
        _, std = mean_and_std(self.raw, self.on)
        count = np.count_nonzero(self.on)
        mean = float((own * self.on).sum()) / count
        moved = mean + step * float(np.abs(self.raw).sum()) / count
        return (own + moved) / std + np.abs(want) * (step + mean / std)

    def guesses(self, usual: Iterable[float] = USUAL) -> Iterator[tuple[float, float]]:
        """Pairs (gamma, lambda) to try: the known ones stay, the others are usual values."""
        gammas = [self.gamma] if self.gamma is not None else list(usual)
        lams = [self.lam] if self.lam is not None or self.name != GAE else list(usual)
        for gamma, lam in product(gammas, lams):
            yield gamma or 0.0, lam or 0.0

    def inferred(self) -> bool:
        """Set the unknown discounts to a usual pair that explains the returns; False for none."""
        if self.returns is None:
            return False
        counts = self.on.sum(1)
        several = np.flatnonzero(counts > 1)
        few = self.of_rows(several[np.argsort(counts[several], kind="stable")][:8])
        for gamma, lam in self.guesses():
            tried = few.of_rows(slice(None))
            tried.gamma, tried.lam = gamma, lam
            if tried.apart(tried.returns, tried.want_returns, scaled=False) is not None:
                continue
            whole = self.of_rows(slice(None))
            whole.gamma, whole.lam = gamma, lam
            if whole.apart(whole.returns, whole.want_returns, scaled=False) is None:
                self.gamma, self.lam = gamma, lam
                return True
        return False
