"""Whether there is anything to learn from (DPA411, DPA412, DPA416)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dataproto_audit
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each, own, own_array, where

SCORES, REWARDS = "token_level_scores", "token_level_rewards"
TURNS = Options(critic=True, multi_turn=True, response_width=8)
DISCOUNTED = {"gamma": 0.9, "lam": 0.9}


def one_score(b: Boundary) -> Truth:
    """The mean of the batch, spread over all rows."""
    ends = b.batch.batch["attention_mask"][:, Options().prompt_width :].sum(1) - 1
    scores = own(b, SCORES)
    scores[:] = 0
    scores[torch.arange(len(scores)), ends] = 0.5
    own_array(b, "score")[:] = [0.5] * len(scores)
    return Truth(SCORES, tuple(range(len(scores))))


def all_zero(b: Boundary) -> Truth:
    own(b, "advantages")[:] = 0.0
    return Truth("advantages", tuple(range(len(b.batch))))


def reset_at_gap(b: Boundary) -> Truth:
    """Returns in front of the last gap of each row that has one are lost."""
    mask = b.batch.batch["response_mask"].numpy() != 0
    returns = own(b, "returns")
    bad = np.zeros(mask.shape, bool)
    for row in range(len(mask)):
        trained = np.flatnonzero(mask[row])
        gaps = np.flatnonzero(np.diff(trained) > 1)
        if len(gaps):
            bad[row, trained[: gaps[-1] + 1]] = True
            returns[row, trained[gaps[-1] + 1]] = 0.5
    returns[torch.from_numpy(bad)] = 0.0
    assert bad.any()
    return where("returns", bad)


CASES = [
    Case("scores_differ", "DPA411", "reward", one_score, "broadcast_reward",
         "actual    0.5 in every row", severity="info"),
    Case("advantages_alive", "DPA412", "advantage", all_zero, "zero_advantage",
         "0 on every trained token, while rewards differ", severity="warn", also=("DPA408",)),
    Case("returns_cross_gaps", "DPA416", "advantage", reset_at_gap, "returns_reset_at_gap",
         "carry the running return over tokens", options=TURNS, also=("DPA408",)),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("scores", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.5], [0.7]])
def test_scores_that_say_nothing_of_a_broadcast(scores: list[float]) -> None:
    """All 0 is a task that nobody solves; a single row equals itself."""
    batch = {SCORES: torch.tensor(scores)[:, None]}
    report = dataproto_audit.check({"batch": batch}, stage="reward")
    assert not [f for f in report if f.code == "DPA411"]


def test_groups_with_equal_rewards_have_no_advantage() -> None:
    assert not audit(Options(equal_groups=True), until="advantage").bad()


@given(
    seed=st.integers(0, 10_000),
    n=st.sampled_from([2, 3, 4]),
    estimator=st.sampled_from(["grpo", "rloo", "opo", "gpg"]),
)
def test_random_groups_are_quiet(seed: int, n: int, estimator: str) -> None:
    ran = audit(Options(seed=seed, n=n, estimator=estimator), until="advantage")
    assert ran.outcome("advantages_alive", "advantage").kind == "passed"


def _alone(rewards: list[float], *, uids: str = "", estimator: str | None = "grpo") -> Any:
    fields = {
        REWARDS: torch.tensor(rewards)[:, None],
        "advantages": torch.zeros(len(rewards), 1),
        "response_mask": torch.ones(len(rewards), 1, dtype=torch.int64),
    }
    uid = np.array(list(uids or "abcdefgh"[: len(rewards)]), object)
    return dataproto_audit.check({"batch": fields, "non_tensor_batch": {"uid": uid}},
                                 stage="advantage",
                                 config={"adv_estimator": estimator})  # fmt: skip


def test_a_group_of_one_keeps_its_reward() -> None:
    [finding] = [f for f in _alone([1.0, 0.0]) if f.code == "DPA412"]
    assert (finding.severity, finding.rows) == ("warn", (0, 1))
    assert not [f for f in _alone([1.0, 1.0]) if f.code == "DPA412"]


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "opo", None])
def test_best_ones_that_tie_leave_nothing_for_the_best_only(estimator: str | None) -> None:
    report = _alone([1.0, 1.0, 0.0, 1.0, 1.0], uids="aaabb", estimator=estimator)
    found = [f for f in report if f.code == "DPA412"]
    assert bool(found) == (estimator in ("grpo", "opo"))
    [outcome] = [o for o in report.outcomes if o.check == "advantages_alive"]
    if estimator is None:
        assert (outcome.kind, outcome.reason) == (
            "not_checkable", "setting unknown: adv_estimator; grpo_passk leaves nothing here",
        )  # fmt: skip


@pytest.mark.parametrize(("estimator", "quiet"), [("opo", True), (None, True), ("rloo", False)])
def test_a_baseline_of_the_only_row_that_is_trained(estimator: str | None, quiet: bool) -> None:
    """Lengths 1 and 0 weight the baseline: it is the reward of the row with a token."""
    fields = {REWARDS: torch.tensor([[1.0], [0.0], [0.0]]), "advantages": torch.zeros(3, 1),
              "response_mask": torch.tensor([[1], [0], [0]])}  # fmt: skip
    uid = np.array(["a", "a", "a"], object)
    report = dataproto_audit.check({"batch": fields, "non_tensor_batch": {"uid": uid}},
                                   stage="advantage",
                                 config={"adv_estimator": estimator})  # fmt: skip
    assert bool([f for f in report if f.code == "DPA412"]) != quiet


@pytest.mark.parametrize("options", [TURNS, Options(multi_turn=True, response_width=8)])
def test_healthy_returns_cross_gaps(options: Options) -> None:
    ran = audit(options, until="advantage", settings=DISCOUNTED if options.critic else None)
    assert ran.outcome("returns_cross_gaps", "advantage").kind == "passed"


def test_returns_that_are_0_behind_the_gap_too_say_nothing() -> None:
    def zero(b: Boundary) -> Truth:
        own(b, "returns")[:] = 0.0
        return Truth("")

    ran = audit(TURNS, {"advantage": zero}, until="advantage")
    assert ran.outcome("returns_cross_gaps", "advantage").kind == "passed"


def test_a_single_0_in_front_of_a_gap_may_be_a_coincidence() -> None:
    """All returns in front of it have to be 0: a reward on the way may cancel one."""

    def one(b: Boundary) -> Truth:
        mask = b.batch.batch["response_mask"].numpy() != 0
        returns = own(b, "returns")
        returns[:] = 1.0
        for row in range(len(mask)):
            trained = np.flatnonzero(mask[row])
            gaps = np.flatnonzero(np.diff(trained) > 1)
            if len(gaps) and gaps[0] > 0:
                returns[row, trained[gaps[0]]] = 0.0
                return Truth("")
        returns[:] = 1.0
        return Truth("")

    ran = audit(TURNS, {"advantage": one}, until="advantage")
    assert ran.outcome("returns_cross_gaps", "advantage").kind == "passed"


def test_without_a_gap_there_is_nothing_to_cross() -> None:
    def whole(b: Boundary) -> Truth:
        own(b, "response_mask")[:] = 1
        return Truth("")

    ran = audit(change={"rollout": whole}, until="advantage")
    outcome = ran.outcome("returns_cross_gaps", "advantage")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no gap in the mask")


@pytest.mark.parametrize(("behind", "found"), [(0.5, True), (1e-9, False), (0.0, False)])
def test_a_return_that_vanishes_in_rounding_says_nothing(behind: float, found: bool) -> None:
    """Behind the gap; in front of it there are zeros."""

    def change(b: Boundary) -> Truth:
        mask = b.batch.batch["response_mask"].numpy() != 0
        returns = own(b, "returns")
        for row in range(len(mask)):
            trained = np.flatnonzero(mask[row])
            gaps = np.flatnonzero(np.diff(trained) > 1)
            if len(gaps):
                returns[row, trained[: gaps[0] + 1]] = 0.0
                returns[row, trained[gaps[0] + 1 :]] = behind
        return Truth("")

    ran = audit(TURNS, {"advantage": change}, until="advantage")
    assert bool(ran.findings("returns_cross_gaps", "advantage")) is found


def test_a_return_that_begins_inside_a_turn_is_no_reset() -> None:
    """Zeros in front of a trained token that is no first one of its turn."""

    def change(b: Boundary) -> Truth:
        mask = b.batch.batch["response_mask"].numpy() != 0
        returns = own(b, "returns")
        for row in range(len(mask)):
            trained = np.flatnonzero(mask[row])
            gaps = np.flatnonzero(np.diff(trained) > 1)
            if len(gaps) and len(trained) > gaps[0] + 2:
                returns[row, trained[: gaps[0] + 2]] = 0.0
        return Truth("")

    ran = audit(TURNS, {"advantage": change}, until="advantage")
    assert not ran.findings("returns_cross_gaps", "advantage")
