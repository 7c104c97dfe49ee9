"""The KL that was taken off the rewards (DPA417)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataproto_audit import check
from dataproto_audit.reference.kl import kl_estimate, rewards_with_kl
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of, where

PROBE, AFTER, FIELD = "kl_in_reward", "kl_reward", "token_level_rewards"
FAR = Options(kl_in_reward=True, step=30, response_width=8)
TOOLS = replace(FAR, multi_turn=True)
PARTS = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
BETA = 0.01
VISIBLE, CLOSE = 1e-2, 1e-4


def distance(b: Boundary) -> Tensor:
    tensors = b.batch.batch
    return tensors["old_log_probs"].double() - tensors["ref_log_prob"].double()


def trained(b: Boundary) -> Tensor:
    return b.batch.batch["response_mask"] != 0


def forgotten(b: Boundary) -> Truth:
    b.batch.batch[FIELD] = b.batch.batch["token_level_scores"].clone()
    return where(FIELD, trained(b) & (distance(b).abs() > VISIBLE))


def other_sign(b: Boundary) -> Truth:
    scores, rewards = b.batch.batch["token_level_scores"], b.batch.batch[FIELD]
    b.batch.batch[FIELD] = 2 * scores - rewards
    return where(FIELD, trained(b) & (2 * BETA * distance(b).abs() > CLOSE))


def swapped_k3(b: Boundary) -> Truth:
    """k3 of the reference to the policy, taken off."""
    tensors = b.batch.batch
    kl = kl_estimate(tensors["ref_log_prob"], tensors["old_log_probs"], "k3")
    right = kl_estimate(tensors["old_log_probs"], tensors["ref_log_prob"], "k3")
    beta = 0.5
    tensors[FIELD] = (tensors["token_level_scores"] - beta * kl * trained(b)).float()
    del right
    return Truth(FIELD)


def on_masked_tokens(b: Boundary) -> Truth:
    penalty = BETA * distance(b)
    tensors, before = b.batch.batch, b.batch.batch[FIELD]
    tensors[FIELD] = torch.where(trained(b), before.double(),
                                 tensors["token_level_scores"] - penalty).float()  # fmt: skip
    return where(FIELD, ~trained(b) & (penalty.abs() > CLOSE))


def on_padding(b: Boundary) -> Truth:
    row = row_of(b, 1)
    own(b, FIELD)[row, 5] -= 0.01
    return at(FIELD, (row, 5))


def one_token(b: Boundary) -> Truth:
    row = row_of(b, 8)
    own(b, FIELD)[row, 2] -= 0.05
    return at(FIELD, (row, 2))


def rows_rolled(b: Boundary) -> Truth:
    scores = b.batch.batch["token_level_scores"]
    b.batch.batch[FIELD] = scores.roll(1, 0)
    return where(FIELD, b.batch.batch[FIELD] != scores)


def shaped(b: Boundary) -> Truth:
    scores = b.batch.batch["token_level_scores"]
    b.batch.batch[FIELD] = scores - 0.25 * trained(b)
    return where(FIELD, trained(b))


def rewards_lost(b: Boundary) -> Truth:
    scores = b.batch.batch["token_level_scores"]
    b.batch.batch[FIELD] = torch.zeros_like(scores)
    return where(FIELD, scores != 0)


SAME = "rewards_are_scores"
CASES = [
    Case(SAME, "DPA417", "advantage", rows_rolled, "row_permutation", "no KL is taken off",
         also=("DPA408",)),
    Case(SAME, "DPA417", "advantage", rewards_lost, "reward_lost", "no KL is taken off",
         also=("DPA408",)),
    Case(SAME, "DPA417", "advantage", shaped, "field_overwritten", "no KL is taken off",
         severity="warn", also=("DPA408",)),
    Case(PROBE, "DPA417", AFTER, forgotten, "field_forgotten", "the scores themselves",
         options=FAR),
    Case(PROBE, "DPA417", AFTER, other_sign, "wrong_kl_estimator",
         "distance to the reference is rewarded", options=FAR),
    Case(PROBE, "DPA417", AFTER, on_masked_tokens, "mask_on_tool", "the score, off the response",
         options=TOOLS),
    Case(PROBE, "DPA417", AFTER, on_padding, "mask_on_padding", "less at row", options=FAR),
    Case(PROBE, "DPA417", AFTER, one_token, "wrong_kl_estimator", "a penalty of", options=FAR),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("kind", ["kl", "low_var_kl", "mse", "abs"])
@pytest.mark.parametrize("beta", [1e-4, 0.05, 2.0])
def test_any_estimator_and_any_coefficient_will_do(kind: str, beta: float) -> None:
    def other(b: Boundary) -> Truth:
        parts = (b.batch.batch[name] for name in PARTS)
        b.batch.batch[FIELD] = rewards_with_kl(*parts, coefficient=beta, kind=kind).float()
        return Truth("")

    ran = audit(FAR, {AFTER: other}, until=AFTER)
    assert ran.outcome(PROBE, AFTER).kind == "passed"


def test_swapped_arguments_of_k3() -> None:
    ran = audit(FAR, {AFTER: swapped_k3}, until=AFTER)
    [finding] = ran.findings(PROBE, AFTER)
    assert finding.causes[0] == "wrong_kl_estimator"
    assert finding.evidence["estimator"] == "swapped k3"


def test_half_precision_log_probs_are_no_fault() -> None:
    def halved(b: Boundary) -> Truth:
        tensors = b.batch.batch
        for name in PARTS[1:3]:
            tensors[name] = tensors[name].bfloat16()
        gap = tensors["old_log_probs"] - tensors["ref_log_prob"]
        penalty = BETA * gap * tensors["response_mask"]
        tensors[FIELD] = tensors["token_level_scores"] - penalty
        return Truth("")

    ran = audit(FAR, {AFTER: halved}, until=AFTER)
    assert ran.outcome(PROBE, AFTER).kind == "passed"


def test_where_policy_and_reference_agree_there_is_nothing_to_take_off() -> None:
    ran = audit(replace(FAR, step=1), {AFTER: forgotten}, until=AFTER)
    assert ran.outcome(PROBE, AFTER).kind == "passed"


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"use_kl_in_reward": False}, "not_applicable", "no KL in the reward"),
        ({"use_kl_in_reward": None}, "not_checkable", "setting unknown: use_kl_in_reward"),
    ],
)
def test_without_a_penalty_there_is_no_verdict(
    settings: dict[str, Any], kind: str, reason: str
) -> None:
    outcome = audit(FAR, until=AFTER, settings=settings).outcome(PROBE, AFTER)
    assert (outcome.kind, outcome.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"use_kl_in_reward": True}, "not_applicable", "KL in the reward"),
        ({"use_kl_in_reward": None}, "not_checkable", "setting unknown: use_kl_in_reward"),
        ({}, "passed", ""),
    ],
)
def test_rewards_are_scores_only_where_that_is_told(
    settings: dict[str, Any], kind: str, reason: str
) -> None:
    outcome = audit(until="advantage", settings=settings).outcome(SAME, "advantage")
    assert (outcome.kind, outcome.reason) == (kind, reason)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_far_from_the_reference_is_steep(sign: float) -> None:
    """Its slope is exp(-distance): the rounding of a log-prob shows a hundred times larger."""
    fields = finished(1.5, 32, 16, 5)
    old, ref = fields["old_log_probs"], fields["ref_log_prob"]
    kl = kl_estimate(old.float(), ref.float(), "k3").float()
    fields[FIELD] = (fields["token_level_scores"] - sign * 0.05 * kl).float()
    report = check({"batch": fields}, config={"use_kl_in_reward": True})
    told = {outcome.kind for outcome in report.outcomes if outcome.check == PROBE}
    assert told == ({"passed"} if sign > 0 else {"failed", "not_applicable"})  # said once
    found = [f for f in report.findings if f.code == "DPA417"]
    assert [f.causes for f in found] == ([] if sign > 0 else [("wrong_kl_estimator", "wrong_sign")])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_in_another_kind_of_number_are_still_the_scores(dtype: torch.dtype) -> None:
    def cast(b: Boundary) -> Truth:
        tensors = b.batch.batch
        tensors["token_level_scores"] = tensors["token_level_scores"] * 0.7
        tensors[FIELD] = tensors["token_level_scores"].to(dtype)
        return Truth("")

    ran = audit(change={"advantage": cast}, until="advantage")
    assert ran.outcome(SAME, "advantage").kind == "passed"


def test_the_penalty_of_another_row_is_told() -> None:
    def of_other_rows(b: Boundary) -> Truth:
        tensors = b.batch.batch
        penalty = BETA * distance(b).roll(1, 0) * trained(b)
        tensors[FIELD] = (tensors["token_level_scores"] - penalty).float()
        return Truth(FIELD)

    ran = audit(replace(FAR, one_token=0), {AFTER: of_other_rows}, until=AFTER)
    [finding] = ran.findings(PROBE, AFTER)
    assert finding.causes[0] == "row_permutation"
    assert finding.evidence["beta"] == pytest.approx(BETA, rel=1e-2)
    assert len(finding.rows) == ran.auditor.settings.n * FAR.prompts


def test_a_penalty_of_ones_own_is_not_judged() -> None:
    def own_penalty(b: Boundary) -> Truth:
        tensors = b.batch.batch
        noise = torch.rand(tensors[FIELD].shape, generator=torch.Generator().manual_seed(3))
        tensors[FIELD] = tensors["token_level_scores"] - noise * trained(b)
        return Truth("")

    outcome = audit(FAR, {AFTER: own_penalty}, until=AFTER).outcome(PROBE, AFTER)
    assert outcome.kind == "not_checkable"
    assert outcome.reason == "no known KL estimator explains the penalty"


def test_it_is_said_once_a_step() -> None:
    ran = audit(FAR, {AFTER: forgotten}, until="advantage")
    assert not ran.findings(PROBE, "advantage")
    outcome = ran.outcome(PROBE, "advantage")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "reported at the stage kl_reward")


def test_tokens_rejected_since_are_not_judged() -> None:
    options = replace(FAR, correction=True)
    assert not audit(options, until="advantage").bad()


def test_the_first_of_several_wrong_tokens_is_told() -> None:
    def two(b: Boundary) -> Truth:
        row = row_of(b, 8)
        own(b, FIELD)[row, 2] -= 0.05
        own(b, FIELD)[row, 5] -= 0.07
        return at(FIELD, (row, 2), (row, 5))

    ran = audit(FAR, {AFTER: two}, until=AFTER)
    [finding], [truth] = ran.findings(PROBE, AFTER), ran.truths
    assert finding.columns == truth.columns
    assert finding.expected.endswith(f"at row {truth.rows[0]}, column 2")
    assert finding.evidence["beta"] == pytest.approx(BETA, rel=1e-3)
    assert 0.9 < finding.evidence["tokens explained"] < 1.0


def test_a_penalty_between_equal_policies_has_no_explanation() -> None:
    def without_distance(b: Boundary) -> Truth:
        tensors = b.batch.batch
        tensors["ref_log_prob"] = tensors["old_log_probs"].clone()
        return Truth("")

    ran = audit(FAR, {AFTER: without_distance}, until=AFTER)
    outcome = ran.outcome(PROBE, AFTER)
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "no known KL estimator explains the penalty",
    )  # fmt: skip


@pytest.mark.parametrize(("by", "cells"), [(2e-4, 1), (5e-5, 2)])
def test_what_is_hardly_off_is_listed_where_nothing_is_off_by_more(by: float, cells: int) -> None:
    def padded(b: Boundary) -> Truth:
        row = row_of(b, 1)
        own(b, FIELD)[row, 4] -= by
        own(b, FIELD)[row, 5] -= 2e-5
        return Truth("")

    [finding] = audit(FAR, {AFTER: padded}, until=AFTER).findings(PROBE, AFTER)
    assert finding.cells == cells
    assert finding.actual.startswith(f"{by:.4g} less at row")


@pytest.mark.parametrize(("share", "kind"), [(0.15, "failed"), (0.3, "not_checkable")])
def test_one_coefficient_has_to_explain_four_of_five_tokens(share: float, kind: str) -> None:
    def some(b: Boundary) -> Truth:
        rewards, cells = own(b, FIELD), trained(b).nonzero().tolist()
        for at_, (row, column) in enumerate(cells):
            if at_ < share * len(cells):
                rewards[row, column] -= 0.05 + 0.01 * (at_ % 5)
        return Truth("")

    assert audit(FAR, {AFTER: some}, until=AFTER).outcome(PROBE, AFTER).kind == kind


def test_the_coefficient_is_measured() -> None:
    ran = audit(FAR, until=AFTER)
    ran.auditor.end_step()
    assert ran.auditor.history["audit/kl_in_reward_beta"][0] == pytest.approx(BETA, rel=1e-3)


def finished(
    moved: float = 0.4, rows: int = 4, columns: int = 6, seed: int = 0
) -> dict[str, Tensor]:
    """A batch with advantages, and k3 taken off its rewards."""
    random = torch.Generator().manual_seed(seed)
    old = -0.5 - 3 * torch.rand(rows, columns, generator=random)
    ref = old + moved * torch.randn(rows, columns, generator=random)
    scores = torch.zeros(rows, columns)
    scores[::2, -1] = 1.0
    one = torch.ones(rows, columns, dtype=torch.long)
    return {
        "responses": one, "response_mask": one.clone(), "token_level_scores": scores,
        "old_log_probs": old, "ref_log_prob": ref, "advantages": torch.zeros(rows, columns),
        FIELD: scores - 0.02 * kl_estimate(old, ref, "k3"),
    }  # fmt: skip


def test_in_a_saved_batch_the_mask_may_be_of_a_later_rejection() -> None:
    fields = finished()
    fields["response_mask"][0, 1:3] = 0
    told = {"use_kl_in_reward": True}
    assert "DPA417" not in {f.code for f in check({"batch": fields}, config=told).findings}
    del fields["advantages"]  # nothing is rejected before
    [finding] = [f for f in check({"batch": fields}, config=told).findings if f.code == "DPA417"]
    assert finding.columns == {0: (2,)}  # the penalty of column 1 is below 1e-4


@pytest.mark.parametrize("moved", [1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize(("beta", "seed"), [(1e-6, 0), (1e-3, 1), (0.05, 2), (0.5, 3), (0.5, 4)])
def test_a_penalty_near_rounding_is_not_judged_wrong(moved: float, beta: float, seed: int) -> None:
    fields = finished(moved, 32, 4, seed)
    for kind in ("k1", "k3", "k2", "abs"):
        kl = kl_estimate(fields["old_log_probs"], fields["ref_log_prob"], kind)
        fields[FIELD] = fields["token_level_scores"] - beta * kl
        report = check({"batch": fields}, config={"use_kl_in_reward": True})
        assert not {"DPA417", "DPA901"} & {f.code for f in report.findings}, report


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_penalty_that_rounding_takes_is_not_missed(kind: str) -> None:
    """One-token responses, beside scores of 1: float32 has no room for a small square."""
    old = torch.full((4, 1), -1.0)
    ref = old + torch.tensor([[0.02], [-0.02], [0.015], [0.0]])
    scores, one = torch.ones(4, 1), torch.ones(4, 1, dtype=torch.long)
    fields = {"responses": one, "response_mask": one, "token_level_scores": scores,
              "old_log_probs": old, "ref_log_prob": ref,
              FIELD: scores - 1e-3 * kl_estimate(old, ref, kind).float()}  # fmt: skip
    report = check({"batch": fields}, config={"use_kl_in_reward": True})
    assert not [f for f in report.findings if f.code == "DPA417"]


def test_a_penalty_that_is_missing_beside_scores_of_one_is_found() -> None:
    fields = finished()
    fields[FIELD] = fields["token_level_scores"].clone()
    report = check({"batch": fields}, config={"use_kl_in_reward": True})
    assert [f.causes[0] for f in report.findings if f.code == "DPA417"] == ["field_forgotten"]
