"""Checked signatures of the reference functions.

Axes: ``rows`` (samples of the batch), ``response`` (padded response width), ``total`` (prompt and
response width). Set ``JAXTYPING_DISABLE=1`` before the import to remove the checks and their cost
(about 40 us a call). Masks are integers or bools: a float mask is refused, because the usual float
in that place is another field passed by mistake.
"""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import Bool, Float, Float64, Int64, Integer, Shaped, jaxtyped
from torch import Tensor

# Checks every call; `is_pep484_tower` lets a YAML `1` stand for the float 1.0.
checked = jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))

Tokens: TypeAlias = Float[Tensor, "rows response"]
Exact: TypeAlias = Float64[Tensor, "rows response"]
Mask: TypeAlias = Integer[Tensor, "rows response"] | Bool[Tensor, "rows response"]
WideMask: TypeAlias = Integer[Tensor, "rows total"] | Bool[Tensor, "rows total"]
ExactRows: TypeAlias = Float64[Tensor, " rows"]
BoolRows: TypeAlias = Bool[Tensor, " rows"]
IndexRows: TypeAlias = Int64[Tensor, " rows"]
Scalar: TypeAlias = Float64[Tensor, ""]
# Labels of the groups (any hashables), or the int64 codes 0..G-1 that `group_codes` makes of them.
GroupIds: TypeAlias = Int64[Tensor, " rows"] | Shaped[np.ndarray, " rows"] | Sequence[Hashable]


def as_bool(mask: Tensor) -> Tensor:
    """The mask as bools: anything but 0 counts as attended."""
    return mask if mask.dtype == torch.bool else mask != 0
