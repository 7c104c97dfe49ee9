"""Where the reward sits and what it sums to (DPA405 to DPA407)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataproto_audit import check
from dataproto_audit.testing import faults
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import (
    Case,
    Truth,
    at,
    audit,
    check_case,
    each,
    lengths,
    own,
    own_array,
    row_of,
    where,
)

SCORES = "token_level_scores"
ALL_SCORED = Options(equal_groups=True)
ABORTED = Options(aborted=1, balanced=False)


def one_token_early(b: Boundary) -> Truth:
    row = row_of(b, 3)
    scores = own(b, SCORES)
    scores[row] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    return at(SCORES, (row, 1))


def on_padding(b: Boundary) -> Truth:
    truth = faults.FAULTS["reward_on_pad"].apply(b.batch)
    return Truth(truth.field, truth.rows, truth.columns)


def wrapped_around(b: Boundary) -> Truth:
    """A row without a response token: the column before the first is the last one."""
    row = row_of(b, 0)
    own(b, SCORES)[row, -1] = 1.0
    own_array(b, "score")[row] = 1.0
    return at(SCORES, (row, 3))


def model_score_lost(b: Boundary) -> Truth:
    own(b, "rm_scores")[2, 1] = float("nan")
    return at("rm_scores", (2, 1))


def doubled(b: Boundary) -> Truth:
    row = row_of(b, 3)
    own(b, SCORES)[row, 2] *= 2
    return Truth(SCORES, (row,))


def lost(b: Boundary) -> Truth:
    row = row_of(b, 4, 2)
    own(b, SCORES)[row] = 0
    return Truth(SCORES, (row,))


def rows_moved(b: Boundary) -> Truth:
    scalar = own_array(b, "score")
    ends, scores = lengths(b), own(b, SCORES)
    scalar[0], scalar[1] = 0.25, 0.5
    scores[0, ends[0] - 1], scores[1, ends[1] - 1] = 0.5, 0.25
    return Truth(SCORES, (0, 1))


def not_a_number(b: Boundary) -> Truth:
    row = row_of(b, 4)
    own(b, SCORES)[row, 3] = float("nan")
    own_array(b, "score")[row] = float("nan")
    return at(SCORES, (row, 3))


def infinite(b: Boundary) -> Truth:
    row = row_of(b, 2)
    own(b, SCORES)[row, 1] = float("inf")
    return at(SCORES, (row, 1))


def no_scalar_score(b: Boundary) -> Truth:
    scores = np.empty(len(b.batch), object)
    scores[:] = b.batch.non_tensor_batch["score"]
    scores[2] = float("nan")
    b.batch.non_tensor_batch["score"] = scores
    return Truth("score", (2,))


def _case(probe: str, code: str, change, cause: str, says: str, *also: str) -> Case:  # type: ignore[no-untyped-def]
    return Case(probe, code, "reward", change, cause, says, also=also, options=ALL_SCORED)


CASES = [
    _case("reward_placement", "DPA405", one_token_early, "reward_shifted", "offset: -1", "DPA411"),
    _case("reward_placement", "DPA405", on_padding, "reward_on_padding", "at column 3", "DPA411"),
    Case("reward_placement", "DPA405", "reward", wrapped_around, "reward_on_padding",
         "no score in row 15, which has no response token", options=ABORTED),
    _case("reward_sum", "DPA406", doubled, "reward_lost", "sums to 1"),
    _case("reward_sum", "DPA406", lost, "reward_lost", "actual    0"),
    _case("reward_sum", "DPA406", rows_moved, "reward_rows_shifted", "row 0 sums to 0.25"),
    _case("reward_finite", "DPA407", not_a_number, "non_finite", "NaN or infinity"),
    _case("reward_finite", "DPA407", infinite, "non_finite", "finite scores"),
    _case("reward_finite", "DPA407", no_scalar_score, "non_finite", "finite scores",
          "DPA411"),
    Case("model_scores_finite", "DPA407", "reward", model_score_lost, "non_finite",
         "NaN or infinity in 1 rows", options=Options(recorded=True, micro_rows=4)),
    Case("reward_finite", "DPA407", "validation", not_a_number, "non_finite", "after validation",
         options=ALL_SCORED),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_a_nan_in_both_scores_is_said_of_one() -> None:
    scores = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    given = {"responses": torch.ones(2, 2, dtype=torch.long), "rm_scores": scores}
    assert [f.field for f in check(given).findings if f.code == "DPA407"] == ["rm_scores"]
    both = check(given | {SCORES: scores.clone()})
    assert [f.field for f in both.findings if f.code == "DPA407"] == [SCORES]
    assert not [f for f in check(given | {"rm_scores": torch.zeros(2, 2)}) if f.code == "DPA407"]


def test_a_process_reward_that_was_announced_is_not_judged() -> None:
    def announced(b: Boundary) -> Truth:
        b.evidence["process_reward"] = True  # type: ignore[index]
        return one_token_early(b)

    outcome = audit(change={"reward": announced}, until="reward").outcome(
        "reward_placement", "reward"
    )
    assert (outcome.kind, outcome.reason) == ("not_applicable", "process reward")


def test_a_process_reward_shows_itself() -> None:
    def everywhere(b: Boundary) -> Truth:
        own(b, SCORES)[:] = 0.5 * (b.batch.batch["response_mask"] != 0)
        own_array(b, "score")[:] = [0.5 * length for length in lengths(b)]
        return Truth(SCORES)

    ran = audit(change={"reward": everywhere}, until="reward")
    outcome = ran.outcome("reward_placement", "reward")
    assert outcome.kind == "not_applicable"
    assert outcome.reason == "process reward: most rows have scores on several tokens"
    assert not ran.bad()


def test_scores_that_are_no_numbers() -> None:
    def words(b: Boundary) -> Truth:
        own_array(b, "score")[1] = "good"
        return Truth("score")

    outcome = audit(change={"reward": words}, until="reward").outcome("reward_sum", "reward")
    assert outcome.kind == "not_checkable"
    assert outcome.reason == "score holds other things than numbers"


def test_without_scalar_scores_there_is_no_sum_to_compare() -> None:
    def dropped(b: Boundary) -> Truth:
        del b.batch.non_tensor_batch["score"]
        return Truth("score")

    ran = audit(change={"reward": dropped}, until="reward")
    outcome = ran.outcome("reward_sum", "reward")
    assert (outcome.kind, outcome.reason) == ("not_checkable", "field not in the batch: score")
    assert not ran.bad()


def test_rounding_to_float32_is_fine() -> None:
    def odd(b: Boundary) -> Truth:
        own_array(b, "score")[0] = 0.1
        own(b, SCORES)[0, lengths(b)[0] - 1] = 0.1
        return Truth(SCORES)

    assert not audit(change={"reward": odd}, until="reward").bad()


def on_every_token(b: Boundary) -> Truth:
    """The row's score on each of its tokens, in rows with a score."""
    scores, mask = own(b, SCORES), b.batch.batch["response_mask"] != 0
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    scored = scores.sum(1, keepdim=True)
    scores[:] = torch.where(mask, scored, 0.0)
    bad = (scores != 0) & (torch.arange(mask.shape[1]) != last[:, None])
    return where(SCORES, bad)


def test_the_score_on_every_token_is_no_process_reward() -> None:
    ran = audit(ALL_SCORED, {"reward": on_every_token}, until="reward")
    [finding] = ran.findings("reward_placement", "reward")
    assert finding.causes[0] == "reward_on_every_token"
    assert finding.columns == ran.truths[0].columns


@pytest.mark.parametrize("column", [0, 1, 3])
def test_a_score_that_is_no_number_is_named_as_that_and_nothing_else(column: int) -> None:
    """Wherever it stands: on the last token, inside the response, on padding."""

    def change(b: Boundary) -> Truth:
        own(b, SCORES)[row_of(b, 2), column] = float("nan")
        return Truth(SCORES)

    found = audit(ALL_SCORED, {"reward": change}, until="reward").report("reward").findings
    assert [finding.code for finding in found] == ["DPA407"]


@pytest.mark.parametrize(("off", "repeated"), [(0.9e-5, True), (1.2e-5, False)])
@pytest.mark.parametrize("score", [0.5, 1.0, 40.0])
def test_scores_on_every_token_are_the_row_s_own_within_rounding(
    off: float, repeated: bool, score: float
) -> None:
    """Two tokens a row are enough; the tolerance is relative above 1."""

    def change(b: Boundary) -> Truth:
        scores, scalar = own(b, SCORES).double(), own_array(b, "score")
        b.batch.batch[SCORES] = scores
        scores[:] = 0.0
        for row, length in enumerate(lengths(b)):
            scalar[row] = score
            scores[row, max(length - 2, 0) : length] = score + off * max(1.0, score)
        return Truth("")

    ran = audit(ALL_SCORED, {"reward": change}, until="reward")
    outcome = ran.outcome("reward_placement", "reward")
    assert outcome.kind == ("failed" if repeated else "not_applicable")


@pytest.mark.parametrize(("error", "found"), [(0.9e-6, False), (1.2e-6, True)])
@pytest.mark.parametrize("score", [0.25, 8.0])
def test_a_sum_is_the_score_within_a_millionth(error: float, found: bool, score: float) -> None:
    def change(b: Boundary) -> Truth:
        scores, scalar = own(b, SCORES).double(), own_array(b, "score")
        b.batch.batch[SCORES] = scores
        row = row_of(b, 3)
        scores[row] = 0.0
        scores[row, 2] = score + error * max(1.0, score)
        scalar[row] = score
        return Truth("")

    ran = audit(ALL_SCORED, {"reward": change}, until="reward")
    assert bool(ran.findings("reward_sum", "reward")) is found


def test_half_of_the_rows_with_several_scores_are_no_process_reward() -> None:
    """More than half of them are."""
    kinds = []
    for rows in (5, 6):

        def change(b: Boundary, rows: int = rows) -> Truth:
            scores = own(b, SCORES)
            long = [row for row, length in enumerate(lengths(b)) if length >= 2]
            scores[:] = 0.0
            scores[long[:10], 0] = 0.5
            scores[long[:rows], 1] = 0.25
            return Truth("")

        ran = audit(ALL_SCORED, {"reward": change}, until="reward")
        kinds.append(ran.outcome("reward_placement", "reward").kind)
    assert kinds == ["failed", "not_applicable"]
