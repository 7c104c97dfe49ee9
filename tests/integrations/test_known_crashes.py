"""Errors of verl that are recognised, and others that are not."""

from typing import Any

import pytest

from dataproto_audit.doctor.defects import DEFECTS
from dataproto_audit.integrations.known_crashes import CRASHES, known_crash

PLUS = {"algorithm": {"use_kl_in_reward": True, "kl_penalty": "k3+"}}
UNUSED = {"algorithm": {"use_kl_in_reward": False, "kl_penalty": "k3+"}}
REMAX = {"algorithm": {"adv_estimator": "remax"}}
SAME = "`score` in tensor_dict1 and tensor_dict2 are not the same object."


class RayTaskError(Exception):
    """In the place of Ray's, which derives a class from the worker's error."""


class OfWorker(RayTaskError, AttributeError):
    pass


@pytest.mark.parametrize(
    ("number", "version", "stage", "error", "config"),
    [
        ("D6", "0.7.1", "kl_reward", NotImplementedError(), PLUS),
        ("D7", "0.7.1", "advantage", TypeError(
            "compute_optimal_token_baseline_advantage() got an unexpected keyword argument 'config'"
        ), {}),
        ("D15", "0.7.1", "union", AssertionError(SAME), REMAX),
        ("D16", "0.7.1", "rollout", OfWorker("in a worker\n'list' object has no attribute 'dim'"),
         {}),
        ("D16", "0.9.1", "rollout", TypeError(
            "expected Tensor as element 1 in argument 0, but got NoneType"), {}),
    ],
)  # fmt: skip
def test_it_is_named_with_its_remedy(
    number: str, version: str, stage: str, error: Exception, config: dict[str, Any]
) -> None:
    told = known_crash(version, stage, error, config)
    assert told.startswith(f"known defect {number} of verl {version}: ")
    assert any(told.endswith(crash.remedy) for crash in CRASHES if crash.number == number)


@pytest.mark.parametrize(
    ("version", "stage", "error", "config"),
    [
        ("0.7.1", "kl_reward", NotImplementedError(), {"algorithm": {"kl_penalty": "k3"}}),
        ("0.7.1", "update_actor", NotImplementedError(), UNUSED),
        ("0.9.1", "kl_reward", NotImplementedError(), PLUS),
        ("0.7.1", "balance", NotImplementedError(), PLUS),
        ("0.7.1", "union", AssertionError(SAME), {}),
        ("0.7.1", "advantage", TypeError("another one"), {}),
        ("0.7.1", "rollout", AttributeError("'dict' object has no attribute 'dim'"), {}),
    ],
)
def test_others_are_not(version: str, stage: str, error: Exception, config: dict[str, Any]) -> None:
    assert known_crash(version, stage, error, config) == ""


def test_doctor_knows_the_same_defects() -> None:
    known = {(defect.number, version) for defect in DEFECTS for version in defect.versions}
    assert {(crash.number, v) for crash in CRASHES for v in crash.versions} <= known
