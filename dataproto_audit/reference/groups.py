"""Groups of samples of one prompt: codes, statistics, and what rounding can explain.

Convention for a group of one row: mean 0 and std 1, so that its advantage is its raw score (verl's
GRPO).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dataproto_audit.reference.shapes import ExactRows, GroupIds, IndexRows, checked


@checked
def group_codes(uid: GroupIds) -> IndexRows:
    """Integer codes 0..G-1 of the labels, in order of first appearance; codes pass unchanged.

    Raises:
        ValueError: a negative code, or labels that are not one a row.
    """
    if isinstance(uid, Tensor):
        if bool((uid < 0).any()):
            raise ValueError("group codes start at 0; a negative one was given")
        return uid
    if isinstance(uid, np.ndarray) and uid.ndim != 1:
        raise ValueError(f"group labels have shape {uid.shape}, expected one label a row")
    labels = uid.tolist() if isinstance(uid, np.ndarray) else list(uid)
    code = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor(list(map(code.__getitem__, labels)), dtype=torch.int64)


@dataclass(frozen=True)
class GroupStats:
    """Statistics of the row's group, one float64 entry a row (not a group), all [rows]."""

    scores: Tensor
    codes: Tensor
    """int64 code of the row's group."""
    size: Tensor
    mean: Tensor
    deviation: Tensor
    """Score minus group mean; exactly 0 where all scores of the group are equal."""
    squares: Tensor
    """Sum of the squared deviations of the group."""
    lengths: Tensor
    """Trained tokens of the row."""
    num_groups: int

    @property
    def single(self) -> Tensor:
        """Rows that are alone in their group."""
        return self.size == 1

    def std(self, *, unbiased: bool = True) -> Tensor:
        """Standard deviation of the row's group, 1 for a group of one row."""
        divisor = (self.size - 1).clamp(min=1) if unbiased else self.size
        return torch.where(self.single, 1.0, (self.squares / divisor).sqrt())

    def total(self, values: Tensor) -> Tensor:
        """Sum of ``values`` over the row's group."""
        return _group_sum(values, self.codes, self.num_groups)


@checked
def group_stats(
    scores: Float[Tensor, " rows"],
    uid: GroupIds,
    *,
    lengths: Float64[Tensor, " rows"] | None = None,
) -> GroupStats:
    """Statistics of each row's group; ``lengths`` (trained tokens a row) default to 1.

    Raises:
        ValueError: not one label a row, or a negative code.
    """
    return stats_of_codes(scores.double(), group_codes(uid), lengths)


def stats_of_codes(exact: Tensor, codes: Tensor, lengths: Tensor | None = None) -> GroupStats:
    """:func:`group_stats` of float64 scores and int64 codes, without the check of the signature."""
    if codes.shape != exact.shape:
        raise ValueError(f"{codes.numel()} group labels for {exact.numel()} rows")
    codes = codes.to(exact.device)
    num_groups = int(codes.max()) + 1 if codes.numel() else 0
    size = torch.bincount(codes, minlength=num_groups).double()[codes]
    # Deviations are taken from the group's smallest score first: a group of equal scores then
    # deviates by exactly 0, where score - mean would leave a rounding error to be divided by eps.
    least = exact.new_full((num_groups,), torch.inf)
    least = least.scatter_reduce(0, codes, exact, reduce="amin")[codes]
    above = exact - least
    mean_above = _group_sum(above, codes, num_groups) / size
    single = size == 1
    deviation = torch.where(single, exact, above - mean_above)
    return GroupStats(
        scores=exact,
        codes=codes,
        size=size,
        mean=torch.where(single, 0.0, least + mean_above),
        deviation=deviation,
        squares=_group_sum(deviation.square(), codes, num_groups),
        lengths=torch.ones_like(exact) if lengths is None else lengths,
        num_groups=num_groups,
    )


def _group_sum(values: Tensor, codes: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, codes, values)[codes]


@checked
def rounding_bound(
    stats: GroupStats,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    magnitude: Float64[Tensor, " rows"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> ExactRows:
    """Largest error that computing GRPO's advantage in ``dtype`` can explain, one entry a row.

    Scores, mean and std carry a few units of rounding of the group's largest score, and the
    division by std + eps magnifies them: a group whose scores differ in the last digit only can be
    off by far more than a fixed tolerance. ``magnitude`` is the sum of a row's absolute
    token-level rewards (default: its absolute score), larger when a KL penalty is inside.
    """
    unit = 4 * torch.finfo(dtype).eps
    size = stats.scores.abs() if magnitude is None else magnitude
    largest = stats.scores.new_zeros(stats.num_groups)
    largest = largest.scatter_reduce(0, stats.codes, size, reduce="amax")[stats.codes]
    scale = stats.std() + eps if norm_by_std else torch.ones_like(size)
    advantage = (stats.deviation / scale).abs()
    slope = 1 + advantage if norm_by_std else torch.ones_like(size)
    return unit * (largest * slope / scale + advantage)
