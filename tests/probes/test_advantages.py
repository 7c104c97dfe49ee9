"""Advantages against their recomputation (DPA408, DPA409)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataproto_audit import check
from dataproto_audit.reference import advantages as estimators
from dataproto_audit.testing.healthy import Boundary, Options, boundaries

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of, where

FIELD = "advantages"


def one_cell(b: Boundary) -> Truth:
    row = row_of(b, 4)
    own(b, FIELD)[row, 2] += 0.1
    return at(FIELD, (row, 2))


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
    Case("advantage_recomputed", "DPA408", "advantage", one_cell,
         "wrong_group_normalisation", "estimator: grpo"),
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


@pytest.mark.parametrize(
    ("probe", "reason"),
    [("advantage_recomputed", "gae is not group-relative"),
     ("advantage_off_mask", "gae may leave values off the mask")],
)  # fmt: skip
def test_gae_is_not_group_relative(probe: str, reason: str) -> None:
    ran = audit(Options(critic=True), until="advantage")
    outcome = ran.outcome(probe, "advantage")
    assert (outcome.kind, outcome.reason) == ("not_applicable", reason)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_estimators_that_mask_are_zero_off_it(estimator: str) -> None:
    options = Options(estimator=estimator)
    assert audit(options, until="advantage").outcome("advantage_off_mask", "advantage").kind == (
        "passed"
    )
    ran = audit(options, {"advantage": off_mask}, until="advantage")
    [finding] = ran.findings("advantage_off_mask", "advantage")
    assert finding.columns == ran.truths[0].columns


def untold(change: Any = None, **options: Any) -> Any:
    """What DPA409 says of a saved batch of a healthy or changed step, without its settings."""
    made = boundaries(Options(**{"prompts": 8, "response_width": 8, **options}))
    [after] = [b for b in made if (b.stage, b.when) == ("advantage", "after")]
    truth = change(after) if change else None
    report = check(after.batch)
    [outcome] = [o for o in report.outcomes if o.check == "advantage_off_mask"]
    return outcome, [f for f in report if f.code == "DPA409"], truth


@pytest.mark.parametrize("how", [{}, {"estimator": "remax"}, {"estimator": "rloo"}])
def test_a_row_that_is_odd_off_the_mask_is_found_without_settings(how: dict[str, Any]) -> None:
    outcome, found, _ = untold(**how)
    assert (outcome.kind, found) == ("passed", [])
    outcome, found, truth = untold(off_mask, **how)
    if how.get("estimator") == "remax":  # its baselines are in the batch: it may leave values
        assert (outcome.kind, outcome.reason) == (
            "not_checkable", "setting unknown: adv_estimator")  # fmt: skip
        return
    [finding] = found
    assert (finding.severity, finding.columns) == ("fail", truth.columns)


def test_values_off_the_mask_in_most_rows_are_a_convention() -> None:
    outcome, found, _ = untold(spread_over_the_row)
    assert (outcome.kind, found) == ("not_checkable", [])


def test_values_between_trained_tokens_are_not_asked_for_without_settings() -> None:
    def between(b: Boundary) -> Truth:
        mask = b.batch.batch["response_mask"] != 0
        row = int((mask.sum(1) > 2).nonzero()[0])
        own(b, "response_mask")[row, 1] = 0
        own(b, FIELD)[row, 1] = 0.5
        return at(FIELD, (row, 1))

    outcome, found, _ = untold(between)
    assert (outcome.kind, found) == ("not_checkable", [])


def test_a_critics_batch_may_leave_values_without_settings() -> None:
    outcome, found, _ = untold(off_mask, critic=True)
    assert (outcome.kind, found) == ("not_checkable", [])


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


# -- causes are tried ------------------------------------------------------------------------------


def _of_groups(codes: Any) -> Any:
    """Advantages of other groups than those of the uid; ``codes`` numbers rows of a batch of n."""

    def change(b: Boundary) -> Truth:
        tensors = b.batch.batch
        groups = codes(torch.arange(len(tensors[FIELD])))
        made = estimators.grpo(tensors["token_level_rewards"], tensors["response_mask"], groups)
        tensors[FIELD] = made[0].float()
        return Truth(FIELD)

    return change


def other_sign(b: Boundary) -> Truth:
    b.batch.batch[FIELD] = -b.batch.batch[FIELD]
    return Truth(FIELD)


def halved(b: Boundary) -> Truth:
    b.batch.batch[FIELD] = b.batch.batch[FIELD] / 2
    return Truth(FIELD)


def nothing(b: Boundary) -> Truth:
    own(b, FIELD)[:] = 0.0
    return Truth(FIELD)


def one_row_late(b: Boundary) -> Truth:
    values, mask = b.batch.batch[FIELD], b.batch.batch["response_mask"] != 0
    own_value = values.gather(1, mask.int().argmax(1, keepdim=True))
    b.batch.batch[FIELD] = torch.where(mask, torch.roll(own_value, 1, 0), 0.0)
    return Truth(FIELD)


WIDE = Options(prompts=8, n=4, response_width=8, seed=3)


@pytest.mark.parametrize(
    ("change", "cause", "told"),
    [
        (other_sign, "wrong_sign", "with the other sign"),
        (_of_groups(lambda rows: rows * 0), "wrong_group_normalisation", "all rows as one group"),
        (_of_groups(lambda rows: rows // 4), "tiled_groups", "groups of 4 consecutive rows"),
        (_of_groups(lambda rows: rows), "wrong_group_normalisation", "rule that fits: raw_score"),
        (without_std, "wrong_group_normalisation", "rule that fits: mean_only"),
        (one_row_late, "row_permutation", "rows matched anew"),
        (nothing, "zero_advantage", ""),
        (halved, "wrong_group_normalisation", ""),
    ],
)
def test_the_cause_that_gives_the_advantages_comes_first(
    change: Any, cause: str, told: str
) -> None:
    ran = audit(WIDE, {"advantage": change}, until="advantage")
    [finding] = ran.findings("advantage_recomputed", "advantage")
    assert finding.causes[0] == cause
    assert any(told in name for name in finding.evidence)


def test_returns_are_the_advantages() -> None:
    def other(b: Boundary) -> Truth:
        row = row_of(b, 4)
        own(b, "returns")[row, 2] += 0.1
        return at("returns", (row, 2))

    ran = audit(change={"advantage": other}, until="advantage")
    [finding] = ran.findings("advantage_recomputed", "advantage")
    assert (finding.field, finding.severity) == ("returns", "warn")
    assert finding.columns == ran.truths[0].columns


def test_groups_of_different_sizes_may_be_sessions() -> None:
    """Several outputs of one session share an advantage, and nothing in the batch says so."""
    options = Options(prompts=3, counts=(3, 5, 4))
    ran = audit(options, {"advantage": one_cell}, until="advantage")
    [finding] = ran.findings("advantage_recomputed", "advantage")
    assert finding.severity == "warn"


@pytest.mark.parametrize(("by", "found"), [(0.9e-5, False), (1.2e-5, True)])
def test_returns_are_the_advantages_within_rounding(by: float, found: bool) -> None:
    """Also of small advantages: the tolerance is that of values of 1."""

    def moved(b: Boundary) -> Truth:
        tensors = b.batch.batch
        row = row_of(b, 4)
        small = tensors["advantages"].double() * 1.0
        tensors["returns"] = small.clone()
        tensors["returns"][row, 1] += by
        return at("returns", (row, 1))

    ran = audit(Options(equal_groups=True), {"advantage": moved}, until="advantage")
    findings = [f for f in ran.findings("advantage_recomputed", "advantage")]
    assert bool(findings) is found
    if found:
        assert (findings[0].field, findings[0].severity) == ("returns", "warn")
        assert findings[0].columns == ran.truths[0].columns


def test_values_off_the_mask_are_counted_by_cell_and_by_row() -> None:
    def change(b: Boundary) -> Truth:
        row = row_of(b, 1)
        own(b, FIELD)[row, 1:4] = 0.5
        return Truth("")

    [finding] = audit(change={"advantage": change}, until="advantage").findings(
        "advantage_off_mask", "advantage"
    )
    assert finding.actual == "3 values in 1 rows"
