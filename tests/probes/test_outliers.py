"""Rows that disagree while the rest of the batch agrees (DPA305, DPA310 to DPA312)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, own_array, row_of, where

OLD, ROLLOUT, REF = "old_log_probs", "rollout_log_probs", "ref_log_prob"
HALF = Options(dtype="bfloat16", prompts=8, balanced=False)
RECORDED = Options(recorded=True, micro_rows=4, balanced=False)
STILL = Options(exact=True, step=2, step_drift=0.0, balanced=False)
"""Step 2 with a learning rate of 0: old and reference are equal bit for bit."""
AT = "old_log_prob"


def _row(field: str, by: float, *, row: int = 5, column: int = 0) -> Any:
    def change(b: Boundary) -> Truth:
        own(b, field)[row, column] += by
        return at(field, (row, column))

    change.__name__ = f"{field}_by_{by:g}"
    return change


def a_whole_row(b: Boundary) -> Truth:
    """By less than half precision may move a single token."""
    row = row_of(b, 4)
    mask = b.batch.batch["response_mask"][row] != 0
    own(b, OLD)[row] -= 0.9 * mask
    return at(OLD, *((row, column) for column in range(int(mask.sum()))))


def gap_of_half_precision(b: Boundary) -> Truth:
    """Most rows have a gap: none of them stands out."""
    values = own(b, OLD)
    values[:, 0] = b.batch.batch[ROLLOUT][:, 0] - 0.25
    return where(OLD, np.arange(values.shape[1])[None] + np.zeros((len(values), 1)) == 0)


def older_rows_off(b: Boundary) -> Truth:
    own_array(b, "weight_version")[[2, 7]] = 0
    own(b, ROLLOUT)[[2, 7], 0] -= 0.5
    return Truth(ROLLOUT, (2, 7))


def scored_by_another(b: Boundary) -> Truth:
    b.batch.meta_info["old_log_prob_version"] = 4
    return Truth(OLD, tuple(range(len(b.batch))))


def one_bit(b: Boundary) -> Truth:
    values = own(b, OLD)
    values[3, 0] = torch.nextafter(values[3, 0], torch.tensor(-100.0))
    return at(OLD, (3, 0))


def both_ways(b: Boundary) -> Truth:
    row = row_of(b, 4)
    own(b, REF)[row, :3] += torch.tensor([-0.3, 0.2, 1e-3])
    return at(REF, (row, 0), (row, 1), (row, 2))


def some_rows_otherwise(b: Boundary) -> Truth:
    """By less than any bound of float32 lets pass, and far more than the other rows."""
    mask = b.batch.batch["response_mask"][2:4] != 0
    own(b, "update_log_probs")[2:4] -= 9e-4 * mask
    cells = np.zeros(b.batch.batch["response_mask"].shape, bool)
    cells[2:4] = mask
    return where("update_log_probs", cells)


CASES = [
    Case("update_rows_alike", "DPA310", "update_actor", some_rows_otherwise, "precision",
         "as the other rows", options=Options(balanced=False)),
    Case("rows_alike", "DPA310", AT, _row(OLD, -6.0), "row_outlier",
         "nats of the other rows", options=HALF, also=("DPA108",)),
    Case("rows_alike", "DPA310", AT, a_whole_row, "row_outlier",
         "nats of the other rows", options=HALF, also=("DPA108",)),
    Case("one_weight_version", "DPA311", "rollout", older_rows_off, "stale_prefix_cache",
         "as rows of version 1", at=AT, options=RECORDED, also=("DPA303",)),
    Case("one_weight_version", "DPA311", AT, scored_by_another, "stale_rollout_weights",
         "of version 4", options=RECORDED, severity="warn"),
    Case("exactly_equal", "DPA312", AT, one_bit, "precision", "1 tokens differ",
         options=Options(exact=True)),
    Case("ref_equal_elsewhere", "DPA305", "ref_log_prob", _row(REF, -0.2), "row_outlier",
         "as on 15 other rows", options=STILL),
    Case("ref_equal_elsewhere", "DPA305", "ref_log_prob", both_ways, "dropout_on",
         "both directions: True", options=STILL, also=("DPA306",)),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


# -- near-misses -----------------------------------------------------------------------------------


def _outcome(ran: Any, probe: str, stage: str = AT) -> tuple[str, str]:
    outcome = ran.outcome(probe, stage)
    return outcome.kind, outcome.reason


@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 0.02))
def test_noise_of_one_size_has_no_row_that_stands_out(seed: int, scale: float) -> None:
    def noisy(b: Boundary) -> Truth:
        random = np.random.default_rng(seed)
        old = own(b, OLD)
        noise = random.normal(0.0, scale, old.shape)
        old += torch.from_numpy(noise).to(old.dtype) * (old != 0)
        return Truth("")

    options = replace(HALF, seed=seed % 7)
    ran = audit(options, {AT: noisy}, until=AT)
    assert not [f for f in ran.findings("rows_alike", AT) if f.severity != "info"]


def test_a_gap_of_all_rows_is_only_told() -> None:
    ran = audit(HALF, {AT: gap_of_half_precision}, until=AT)
    [finding] = ran.findings("rows_alike", AT)
    assert (finding.severity, finding.field) == ("info", OLD)
    assert set(finding.columns) == set(range(32))
    assert finding.hint == "tell precision and staleness, or pass model= to recompute"


@given(st.floats(-1.5, -0.2))
def test_a_single_far_token_is_only_told_where_the_batch_is_near(by: float) -> None:
    """Published runs of large models have such tokens in good health."""
    ran = audit(HALF, {AT: _row(OLD, by)}, until=AT)
    [finding] = ran.findings("rows_alike", AT)
    assert finding.severity == "info"
    assert 5 in finding.rows


def test_the_rollout_is_named_where_its_row_is_the_less_likely_one() -> None:
    ran = audit(HALF, {"rollout": _row(ROLLOUT, -9.0)}, until=AT)
    [finding] = ran.findings("rows_alike", AT)
    assert (finding.field, finding.rows) == (ROLLOUT, (5,))


@pytest.mark.parametrize(
    ("options", "settings", "reason"),
    [
        (Options(), {}, "single tokens have a bound of their own"),
        (HALF, {"top_p": 0.9}, "top-p or top-k renormalises the rollout's log-probs"),
        (HALF, {"top_k": 20}, "top-p or top-k renormalises the rollout's log-probs"),
        (HALF, {"on_policy": False}, "rollouts may come from older weights"),
    ],
)
def test_where_rows_need_not_be_alike(options: Options, settings: Any, reason: str) -> None:
    ran = audit(options, until=AT, settings=settings)
    assert _outcome(ran, "rows_alike") == ("not_applicable", reason)


def _versions(values: Any) -> Any:
    def change(b: Boundary) -> Truth:
        listed = np.empty(len(b.batch), object)
        listed[:] = [values(row) for row in range(len(listed))]
        b.batch.non_tensor_batch["weight_version"] = listed
        return Truth("")

    return change


def test_rows_of_several_versions_are_not_one_kind() -> None:
    options = replace(RECORDED, dtype="bfloat16")
    ran = audit(options, {"rollout": _versions(lambda row: row % 2)}, until=AT)
    assert _outcome(ran, "rows_alike") == ("not_applicable", "rows of several weight versions")


def test_older_rows_that_agree_are_fine() -> None:
    ran = audit(RECORDED, {"rollout": _versions(lambda row: row % 2)}, until=AT)
    assert ran.outcome("one_weight_version", AT).kind == "passed"


def test_newest_rows_that_disagree_are_for_other_checks() -> None:
    ran = audit(RECORDED, {AT: _row(OLD, -0.5)}, until=AT)
    assert ran.outcome("one_weight_version", AT).kind == "passed"


@pytest.mark.parametrize("value", ["new", None, [1, 2]])
def test_versions_that_are_no_numbers(value: Any) -> None:
    ran = audit(RECORDED, {"rollout": _versions(lambda row: value)}, until=AT)
    kind, reason = _outcome(ran, "one_weight_version")
    assert kind == "not_checkable"
    assert reason == "weight_version does not hold one number a row"
    assert not [f for f in ran.auditor.findings if f.code == "DPA901"]


def test_versions_may_be_written_as_text() -> None:
    ran = audit(RECORDED, {"rollout": _versions(lambda row: "7")}, until=AT)
    assert ran.outcome("one_weight_version", AT).kind == "passed"


@pytest.mark.parametrize("told", [False, None])
def test_what_promised_nothing_need_not_be_equal(told: Any) -> None:
    ran = audit(until=AT, settings={"exact_log_probs": told})
    assert _outcome(ran, "exactly_equal") == ("not_applicable", "nobody promised equal bits")


@pytest.mark.parametrize(
    ("on_policy", "said"),
    [(True, ("not_applicable", "every rollout comes from the newest weights, as configured")),
     (None, ("not_checkable", "field not in the batch: weight_version"))],
)  # fmt: skip
def test_batches_that_tell_no_weight_version(on_policy: Any, said: tuple[str, str]) -> None:
    ran = audit(until=AT, settings={"on_policy": on_policy})
    assert _outcome(ran, "one_weight_version") == said


def test_off_the_mask_nothing_need_be_equal() -> None:
    def off(b: Boundary) -> Truth:
        own(b, OLD)[row_of(b, 1), 2] = -3.0
        return Truth("")

    assert not audit(Options(exact=True), {AT: off}, until=AT).bad()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(exact=True), "old_ref_first says more"),
        (Options(step=2), "the policy has moved away from the reference"),
        (replace(STILL, step_drift=0.02), "the policy has moved away from the reference"),
    ],
)
def test_where_the_reference_is_another_policy(options: Options, reason: str) -> None:
    ran = audit(options, until="ref_log_prob")
    assert _outcome(ran, "ref_equal_elsewhere", "ref_log_prob") == ("not_applicable", reason)


def test_a_small_difference_of_a_few_rows_is_rounding() -> None:
    ran = audit(STILL, {"ref_log_prob": _row(REF, -0.09)}, until="ref_log_prob")
    assert ran.outcome("ref_equal_elsewhere", "ref_log_prob").kind == "passed"


def test_rows_that_all_differ_alike_are_no_outliers() -> None:
    def all_of_them(b: Boundary) -> None:
        own(b, "update_log_probs").sub_(4e-4)

    ran = audit(change={"update_actor": all_of_them}, until="update_actor")
    assert ran.outcome("update_rows_alike", "update_actor").kind == "passed"


def test_half_precision_passes_are_not_compared_row_by_row() -> None:
    ran = audit(Options(dtype="bfloat16"), until="update_actor")
    outcome = ran.outcome("update_rows_alike", "update_actor")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "half precision has heavy tails")


LONG = Options(dtype="bfloat16", prompts=4, n=4, response_width=12, balanced=False)


@pytest.mark.parametrize("by", [1, -1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_few_shifted_rows_are_told_from_the_noise_of_half_precision(by: int, seed: int) -> None:
    rows: list[int] = []

    def change(b: Boundary) -> Truth:
        values = own(b, OLD)
        rows[:] = (b.batch.batch["response_mask"].sum(1)).argsort(descending=True)[:2].tolist()
        values[rows] = torch.roll(values[rows], by, 1)
        return Truth(OLD, tuple(rows))

    ran = audit(replace(LONG, seed=seed), {AT: change}, until=AT)
    [found] = [f for f in ran.findings("rows_alike", AT) if f.severity == "fail"]
    assert found.code == "DPA304"
    assert found.causes[0] == "shift"
    assert sorted(found.rows) == sorted(rows)
    assert f"shift by {-by:+d}" in str(found)


@pytest.mark.parametrize("seed", range(8))
def test_no_healthy_row_of_half_precision_is_called_shifted(seed: int) -> None:
    def far(b: Boundary) -> Truth:
        """One token far off at the end of a row, where a shift would push it out."""
        mask = b.batch.batch["response_mask"] != 0
        row = int(mask.sum(1).argmax())
        own(b, OLD)[row, int(mask[row].sum()) - 1] -= 0.4
        return Truth(OLD, (row,))

    for changes in ({}, {AT: far}):
        ran = audit(replace(LONG, seed=seed), changes, until=AT)
        assert [f for f in ran.findings("rows_alike", AT) if f.code == "DPA304"] == []
