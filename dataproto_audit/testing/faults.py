"""Faults to seed on purpose, each the smallest form of an error that people really make.

A fault knows nothing of probes or contracts. It changes what a stage hands on, what is sampled
with, or which weights are sent, and says what it changed, so that a detector can be scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dc_field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto

Where = Literal["after_stage", "sampling", "before_sync"]
Apply = TypeVar("Apply", bound=Callable[..., Any])


@dataclass
class Truth:
    """What a fault changed: rows and, for token fields, columns of each row."""

    field: str
    rows: tuple[int, ...] = ()
    columns: dict[int, tuple[int, ...]] = dc_field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """``apply`` changes a batch in place (``after_stage``) or returns the changed settings or
    weights; ``stage`` is where the error is made.
    """

    name: str
    stage: str
    where: Where
    field: str
    meaning: str
    apply: Callable[..., Any]


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, stage: str, field: str, *, where: Where = "after_stage"
) -> Callable[[Apply], Apply]:
    """Register the decorated function; its docstring is the meaning of the fault."""

    def register(apply: Apply) -> Apply:
        meaning = (apply.__doc__ or "").strip().splitlines()[0]
        FAULTS[name] = Fault(name, stage, where, field, meaning, apply)
        return apply

    return register


def parse_injection(text: str) -> tuple[Fault, int]:
    """``FAULT@STEP`` as a fault and a step; raises :class:`UsageError` with the list of faults."""
    name, at, step = text.partition("@")
    if name not in FAULTS or not at or not step.isdigit() or int(step) < 1:
        listed = ", ".join(FAULTS)
        raise UsageError(
            "DPA851", f"audit.inject={text} is no FAULT@STEP.", f"Faults: {listed}; steps from 1."
        )
    return FAULTS[name], int(step)


def _cells(field: str, changed: torch.Tensor) -> Truth:
    columns: dict[int, tuple[int, ...]] = {}
    for row, column in torch.nonzero(changed).tolist():
        columns[row] = (*columns.get(row, ()), column)
    return Truth(field, tuple(columns), columns)


@fault("log_prob_shift", "old_log_prob", "old_log_probs")
def log_prob_shift(batch: DataProto) -> Truth:
    """Old log-probs one column late: column t holds the log-prob of token t - 1."""
    old = batch.batch["old_log_probs"]
    moved = torch.roll(old, 1, dims=1)
    moved[:, 0] = 0.0
    batch.batch["old_log_probs"] = moved
    return _cells("old_log_probs", (moved != old) & (batch.batch["response_mask"] != 0))


@fault("mask_on_pad", "rollout", "response_mask")
def mask_on_pad(batch: DataProto) -> Truth:
    """The response mask covers the first padding slot of every third shorter row."""
    mask = batch.batch["response_mask"].clone()
    width = mask.shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(1)
    rows = torch.nonzero(lengths < width).squeeze(1)[::3]
    mask[rows, lengths[rows]] = 1
    changed = mask != batch.batch["response_mask"]
    batch.batch["response_mask"] = mask
    return _cells("response_mask", changed)


@fault("tiled_groups", "union", "uid")
def tiled_groups(batch: DataProto) -> Truth:
    """The prompt side was repeated p0,p1,..,p0,p1,.. and the responses p0,p0,..,p1,p1,..."""
    uids = batch.non_tensor_batch["uid"]
    prompts = len(dict.fromkeys(uids.tolist()))
    n = len(uids) // max(1, prompts)
    index = np.arange(len(uids)).reshape(prompts, n).T.reshape(-1)
    for name in ("uid", "raw_prompt", "prompt_ids", "reward_model", "extra_info", "index"):
        if name in batch.non_tensor_batch:
            batch.non_tensor_batch[name] = batch.non_tensor_batch[name][index]
    wrong = np.flatnonzero(batch.non_tensor_batch["uid"] != uids)
    return Truth("uid", tuple(wrong.tolist()))


@fault("reward_on_pad", "reward", "token_level_scores")
def reward_on_pad(batch: DataProto) -> Truth:
    """Scores of shorter rows sit on the last column, a padding slot that the mask removes."""
    scores = batch.batch["token_level_scores"]
    moved = scores.clone()
    width = scores.shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(1)
    rows = torch.nonzero((lengths < width) & (scores.sum(1) != 0)).squeeze(1)
    moved[rows] = 0.0
    moved[rows, width - 1] = scores[rows].sum(1)
    batch.batch["token_level_scores"] = moved
    return _cells("token_level_scores", (moved != 0) & (scores == 0))


@fault("stale_rollout_weights", "sync_weights", "weights", where="before_sync")
def stale_rollout_weights(weights: Any, previous: Any) -> Any:
    """The engine gets the weights of the sync before."""
    return previous


@fault("other_temperature", "rollout", "sampling.temperature", where="sampling")
def other_temperature(sampling: dict[str, Any]) -> dict[str, Any]:
    """The engine samples at 0.7 of the configured temperature."""
    return {**sampling, "temperature": 0.7 * float(sampling["temperature"])}
