"""Faults to seed on purpose, each the smallest form of an error that people really make.

A fault knows nothing of probes or contracts. It changes what a stage hands on, what is sampled
with, which weights are sent, or the simulated step itself, and says what it changed, so that a
detector can be scored. The stages behind it go on from what it left.
"""

from __future__ import annotations

from dataproto_audit.testing.faults import (
    advantages,
    backends,
    dynamics,
    groups,
    ids,
    live,
    logprobs,
    loss,
    masks,
    ranks,
    returns,
    rewards,
    structure,
)
from dataproto_audit.testing.faults.registry import (
    CATALOGUE,
    FAULTS,
    Fault,
    Truth,
    fault,
    parse_injection,
    seeded,
)

FAMILIES = (
    live, structure, masks, ids, logprobs, backends, groups, rewards, advantages, returns, loss,
    ranks, dynamics,
)  # fmt: skip
"""The modules that register faults."""

__all__ = [
    "CATALOGUE",
    "FAMILIES",
    "FAULTS",
    "Fault",
    "Truth",
    "fault",
    "parse_injection",
    "seeded",
]
