"""Advantages against their recomputation (DPA408, DPA409)."""

from __future__ import annotations

import pytest
import torch

from dataproto_audit.reference import advantages as estimators
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of, where

FIELD = "advantages"


def one_cell(b: Boundary) -> Truth:
    row = row_of(b, 4)
    own(b, FIELD)[row, 2] += 0.1
    return at(FIELD, (row, 2))


def not_a_number(b: Boundary) -> Truth:
    row = row_of(b, 3)
    own(b, FIELD)[row, 0] = float("nan")
    return at(FIELD, (row, 0))


def without_std(b: Boundary) -> Truth:
    tensors = b.batch.batch
    wrong = estimators.grpo(
        tensors["token_level_rewards"], tensors["response_mask"],
        b.batch.non_tensor_batch["uid"], norm_by_std=False,
    )[0].float()  # fmt: skip
    changed = ((wrong - tensors[FIELD]).abs() > 1e-3) & (tensors["response_mask"] != 0)
    tensors[FIELD] = wrong
    return where(FIELD, changed)


def off_mask(b: Boundary) -> Truth:
    row = row_of(b, 2)
    own(b, FIELD)[row, 3] = 0.5
    return at(FIELD, (row, 3))


def spread_over_the_row(b: Boundary) -> Truth:
    values, mask = own(b, FIELD), b.batch.batch["response_mask"] != 0
    values[:] = values[:, :1]
    return where(FIELD, (values != 0) & ~mask)


CASES = [
    Case("advantage_recomputed", "DPA408", "advantage", one_cell, "row_permutation",
         "estimator: grpo"),
    Case("advantage_recomputed", "DPA408", "advantage", not_a_number, "row_permutation",
         "actual    nan"),
    Case("advantage_recomputed", "DPA408", "advantage", without_std,
         "wrong_group_normalisation", "rule that fits"),
    Case("advantage_off_mask", "DPA409", "advantage", off_mask, "advantage_off_mask",
         "1 values in 1 rows"),
    Case("advantage_off_mask", "DPA409", "advantage", spread_over_the_row, "advantage_off_mask",
         "0 off the response mask"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "rloo", "gpg", "opo"])
def test_every_group_relative_estimator_is_recomputed(estimator: str) -> None:
    options = Options(estimator=estimator)
    healthy = audit(options, until="advantage")
    assert healthy.outcome("advantage_recomputed", "advantage").kind == "passed"
    ran = audit(options, {"advantage": one_cell}, until="advantage")
    [finding] = ran.findings("advantage_recomputed", "advantage")
    assert finding.columns == ran.truths[0].columns
    assert finding.evidence["estimator"] == estimator


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_either_form_will_do_where_it_is_not_known(norm_by_std: bool) -> None:
    options = Options(norm_by_std=norm_by_std)
    ran = audit(options, until="advantage", settings={"norm_adv_by_std": None})
    assert ran.outcome("advantage_recomputed", "advantage").kind == "passed"
    ran = audit(options, {"advantage": one_cell}, until="advantage",
                settings={"norm_adv_by_std": None})  # fmt: skip
    assert ran.findings("advantage_recomputed", "advantage")[0].cells == 1


def test_swapped_rows_of_two_groups() -> None:
    def swapped(b: Boundary) -> Truth:
        values = own(b, FIELD)
        before = values.clone()
        first = torch.nonzero((b.batch.batch["response_mask"] != 0).all(1)).squeeze(1)
        high = next(r for r in first.tolist() if values[r, 0] > 0)
        low = next(r for r in first.tolist() if values[r, 0] < 0)
        values[[high, low]] = values[[low, high]]
        return where(FIELD, values != before)

    ran = audit(change={"advantage": swapped}, until="advantage")
    [finding] = ran.findings("advantage_recomputed", "advantage")
    assert finding.columns == ran.truths[0].columns
    assert finding.causes[0] in ("row_permutation", "wrong_group_normalisation")


@pytest.mark.parametrize("probe", ["advantage_recomputed", "advantage_off_mask"])
def test_gae_is_not_group_relative(probe: str) -> None:
    ran = audit(Options(critic=True), until="advantage")
    outcome = ran.outcome(probe, "advantage")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "gae is not group-relative")


def test_groups_with_equal_rewards_have_no_advantage() -> None:
    ran = audit(Options(equal_groups=True), until="advantage")
    assert ran.outcome("advantage_recomputed", "advantage").kind == "passed"


def test_a_group_with_a_broken_reward_is_left_to_the_finite_check() -> None:
    def broken(b: Boundary) -> Truth:
        row = row_of(b, 4)
        own(b, "token_level_scores")[row, 3] = float("nan")
        return Truth("")

    ran = audit(change={"reward": broken}, until="advantage")
    assert ran.findings("reward_finite", "reward")
    assert ran.outcome("advantage_recomputed", "advantage").kind == "passed"
