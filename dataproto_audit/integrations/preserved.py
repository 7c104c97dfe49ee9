"""What an audit must leave as it found it: the states of the random generators.

Tensors are never written; the tests compare their identities and version counters. Random states
of accelerators are not looked at: nothing here computes on one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Python's, numpy's and torch's global generators are afterwards where they were."""
    own, legacy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(legacy)
        torch.set_rng_state(torch_state)
