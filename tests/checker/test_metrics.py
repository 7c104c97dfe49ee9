"""Names of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.checker.metrics import ALIASES, as_metrics, canonical
from dataproto_audit.probes import history


def test_no_name_means_two_things() -> None:
    aliases = [alias for names in ALIASES.values() for alias in names]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(ALIASES)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("step", "training/global_step"),
        ("train/grad_norm", "actor/grad_norm"),
        ("approx_kl", "actor/ppo_kl"),
        ("clip_ratio/region_mean", "actor/pg_clipfrac"),
        ("num_iterations", "actor/ppo_epochs"),
        ("frac_reward_zero_std", "groups/dead_share"),
        ("actor/entropy", "actor/entropy"),
        ("my/own", "my/own"),
    ],
)
def test_names_of_peers(name: str, known: str) -> None:
    assert canonical(name) == known
    assert as_metrics({name: 1.5}) == {known: 1.5}


def test_what_several_steps_are_asked_for_has_a_canonical_name() -> None:
    assert history.GAP in ALIASES


def test_numbers_of_every_kind() -> None:
    step = {"a": 1, "b": 0.5, "c": np.float32(0.5), "d": torch.tensor(2), "e": np.array(3.0),
            "f": True, "g": None}  # fmt: skip
    assert as_metrics(step) == {"a": 1, "b": 0.5, "c": 0.5, "d": 2, "e": 3.0, "f": True}


def test_texts_are_only_compared() -> None:
    one, again, other = (as_metrics({"greedy_hash": text}) for text in ("ab", "ab", "ac"))
    assert one == again != other
    assert isinstance(one["rollout/greedy_hash"], float)  # type: ignore[index]


@pytest.mark.parametrize(
    "step",
    [3, None, [1], {"batch": {}}, {"non_tensor_batch": {}}, {"loss": [1, 2]},
     {"responses": torch.ones(2, 3)}, {"responses": np.ones(2)}],
)  # fmt: skip
def test_a_batch_is_no_step_of_metrics(step: Any) -> None:
    assert as_metrics(step) is None


def test_an_empty_step_has_no_metrics() -> None:
    assert as_metrics({}) == {}


def test_numbers_beyond_a_float_are_infinite() -> None:
    found = as_metrics({"grad_norm": 10**400, "loss": -(10**400), "lr": 3})
    assert found == {"actor/grad_norm": np.inf, "actor/pg_loss": -np.inf, "actor/lr": 3}
