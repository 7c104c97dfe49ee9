"""Log-probs: their range, the rollout's, the reference's, and how a gap is explained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.testing import faults
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Change, Truth, at, audit, check_case, each, loner, own, row_of, twins

WIDE = Options(response_width=12, prompts=6, truncated=6, vocab=64)
HALF = Options(dtype="bfloat16")
ROLLOUT, OLD, REF = "rollout_log_probs", "old_log_probs", "ref_log_prob"


def _cell(field: str, value: float, *, add: bool = False) -> Change:
    """Set, or move, one value of a row whose prefix no other row shares."""

    def change(b: Boundary) -> Truth:
        row = loner(b)
        tensor = own(b, field)
        tensor[row, 1] = value + (tensor[row, 1] if add else 0.0)
        return at(field, (row, 1))

    change.__name__ = f"{field}_{'plus_' if add else ''}{value}"
    return change


def shifted_old(b: Boundary) -> Truth:
    truth = faults.FAULTS["log_prob_shift"].apply(b.batch)
    return Truth(truth.field, truth.rows, truth.columns)


def reordered_old(b: Boundary) -> Truth:
    old, mask = own(b, OLD), b.batch.batch["response_mask"] != 0
    rows = torch.nonzero(mask.all(1)).squeeze(1)[:4]
    before = old.clone()
    old[rows] = old[rows.roll(1)]
    changed = (old != before) & mask
    return at(OLD, *map(tuple, torch.nonzero(changed).tolist()))


def bfloat16_old(b: Boundary) -> Truth:
    b.batch.batch[OLD] = b.batch.batch[OLD].bfloat16()
    return Truth(OLD)


CASES = [
    *(
        Case(f"{field}_finite", "DPA301", stage, _cell(field, value), "non_finite", says)
        for field, stage in ((ROLLOUT, "rollout"), (OLD, "old_log_prob"), (REF, "ref_log_prob"))
        for value, says in ((float("nan"), "nan first at row"), (float("-inf"), "-inf first at"))
    ),
    Case(f"{ROLLOUT}_nonpositive", "DPA302", "rollout", _cell(ROLLOUT, 0.5),
         "positive_log_prob", "up to 0.5"),
    Case(f"{OLD}_nonpositive", "DPA302", "old_log_prob", _cell(OLD, 0.5),
         "positive_log_prob", "up to 0.5", also=("DPA303",)),
    Case(f"{REF}_nonpositive", "DPA302", "ref_log_prob", _cell(REF, 0.5),
         "positive_log_prob", "up to 0.5", also=("DPA305",)),
    Case("rollout_old_gap", "DPA303", "old_log_prob", _cell(OLD, -0.01, add=True),
         "precision", "1 tokens in 1 rows disagree"),
    Case("rollout_old_gap", "DPA304", "old_log_prob", shifted_old, "shift",
         "column t of old_log_probs must score responses[:, t]", options=WIDE,
         also=("DPA307",)),
    Case("rollout_old_gap", "DPA303", "old_log_prob", reordered_old, "row_permutation",
         "rows matched anew", options=WIDE),
    Case("old_ref_first", "DPA305", "ref_log_prob", _cell(REF, -0.5, add=True),
         "row_outlier", "1 tokens in 1 rows disagree"),
    Case("precision", "DPA108", "old_log_prob", bfloat16_old, "precision",
         "old_log_probs bfloat16, rollout_log_probs float32", severity="warn"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(
    ("kind", "severity"),
    [(torch.float64, "info"), (torch.bfloat16, "warn"), (torch.float16, "warn")],
)
def test_float64_beside_float32_loses_nothing(kind: torch.dtype, severity: str) -> None:
    def widened(b: Boundary) -> Truth:
        b.batch.batch[OLD] = b.batch.batch[OLD].to(kind)
        return Truth(OLD)

    ran = audit(change={"old_log_prob": widened}, until="old_log_prob")
    [finding] = ran.findings("precision", "old_log_prob")
    assert finding.severity == severity


def test_half_precision_is_told_but_no_warning() -> None:
    ran = audit(HALF, until="ref_log_prob")
    assert not ran.bad()
    [finding] = ran.findings("precision", "old_log_prob")
    assert (finding.severity, finding.code) == ("info", "DPA108")
    assert ran.outcome("precision", "ref_log_prob").kind == "passed"


def test_half_precision_bounds_the_mean_and_not_the_token() -> None:
    one = audit(HALF, {"old_log_prob": _cell(OLD, -0.5, add=True)}, until="old_log_prob")
    assert one.outcome("rollout_old_gap", "old_log_prob").kind == "passed"

    def all_off(b: Boundary) -> Truth:
        own(b, OLD).sub_(0.5)
        return Truth(OLD)

    ran = audit(HALF, {"old_log_prob": all_off}, until="old_log_prob")
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert finding.severity == "fail"
    assert finding.evidence["noise model"] == "half precision on one side"
    assert len(finding.rows) == 16


def test_a_temperature_that_the_engine_does_not_report() -> None:
    def colder(used: dict[str, Any]) -> dict[str, Any]:
        return {**used, "temperature": 0.7}

    def as_configured(b: Boundary) -> Truth:
        b.batch.meta_info["sampling"]["temperature"] = 1.0
        return Truth("")

    ran = audit(WIDE, {"rollout": as_configured}, until="old_log_prob", sampling=colder)
    assert ran.report("rollout").ok
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert finding.causes[0] == "temperature_mismatch"
    assert abs(finding.evidence["slope"] - 1.0) > 0.1
    assert finding.severity == "fail"


def test_stale_weights_of_the_engine() -> None:
    ran = audit(Options(step=4, stale_steps=3, response_width=12), until="old_log_prob")
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert finding.causes[0] == "stale_rollout_weights"
    assert not ran.findings("rollout_log_probs_same_prefix", "rollout")


@pytest.mark.parametrize("unknown", ["top_p", "top_k", "on_policy"])
def test_a_gap_that_an_unknown_setting_may_explain_is_only_told(unknown: str) -> None:
    change = {"old_log_prob": _cell(OLD, -0.5, add=True)}
    ran = audit(change=change, until="old_log_prob", settings={unknown: None})
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert finding.severity == "info"
    assert finding.hint == f"tell {unknown}: they could explain the gap"


def test_a_repair_makes_it_a_fail_whatever_is_unknown() -> None:
    ran = audit(WIDE, {"old_log_prob": shifted_old}, until="old_log_prob",
                settings={"top_p": None, "on_policy": None})  # fmt: skip
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert (finding.code, finding.severity, finding.causes[0]) == ("DPA304", "fail", "shift")


def test_the_side_that_contradicts_itself_is_named_with_its_writer() -> None:
    """Shared prefixes convict the rollout, though the gap is seen after old_log_prob."""

    def one_of_twins(b: Boundary) -> Truth:
        row = twins(b)[0]
        own(b, ROLLOUT)[row, 0] -= 0.5
        return at(ROLLOUT, (row, 0))

    ran = audit(change={"rollout": one_of_twins}, until="old_log_prob")
    [finding] = ran.findings("rollout_old_gap", "old_log_prob")
    assert (finding.field, finding.stage) == (ROLLOUT, "rollout")
    assert finding.evidence["contradicts itself over shared prefixes"].startswith(ROLLOUT)
    assert finding.cells == 1


@pytest.mark.parametrize(
    ("probe", "stage", "settings", "step", "reason"),
    [
        ("rollout_old_gap", "old_log_prob", {"top_p": 0.9}, 1,
         "top-p or top-k renormalises the rollout's log-probs"),
        ("rollout_old_gap", "old_log_prob", {"top_k": 50}, 1,
         "top-p or top-k renormalises the rollout's log-probs"),
        ("rollout_old_gap", "old_log_prob", {"on_policy": False}, 1,
         "rollouts may come from older weights"),
        ("old_ref_first", "ref_log_prob", {}, 2, "only at the first step"),
        ("old_ref_first", "ref_log_prob", {"ref_from_actor": False}, 1, "only at the first step"),
    ],
)  # fmt: skip
def test_what_does_not_apply_says_why(
    probe: str, stage: str, settings: dict[str, Any], step: int, reason: str
) -> None:
    ran = audit(Options(step=step), until=stage, settings=settings)
    outcome = ran.outcome(probe, stage)
    assert (outcome.kind, outcome.reason) == ("not_applicable", reason)
    assert probe not in ran.auditor.fired


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_off_the_mask_is_a_warning(value: float) -> None:
    """0 times NaN is NaN, so a mask does not remove it."""
    seen: list[int] = []

    def garbage(b: Boundary) -> Truth:
        seen.append(row_of(b, 1))
        own(b, OLD)[seen[0], 2] = value
        return Truth(OLD)

    ran = audit(change={"old_log_prob": garbage}, until="old_log_prob")
    [finding] = ran.bad()
    assert (finding.code, finding.severity, finding.check) == (
        "DPA301", "warn", "old_log_probs_finite",
    )  # fmt: skip
    assert finding.columns == {seen[0]: (2,)}
    assert finding.expected == "finite values also off the response mask"


def test_finite_values_whose_sum_is_not_are_finite() -> None:
    """Half precision ends at 65504, which the log-probs of one block add up to."""

    def large(b: Boundary) -> Truth:
        b.batch.batch[OLD] = torch.full_like(b.batch.batch[OLD], -30000.0).half()
        return Truth(OLD)

    ran = audit(change={"old_log_prob": large}, until="old_log_prob")
    assert ran.outcome("old_log_probs_finite", "old_log_prob").kind == "passed"
    assert not [f for f in ran.auditor.findings if f.code == "DPA901"]


def test_values_off_the_mask_are_never_judged() -> None:
    def garbage(b: Boundary) -> Truth:
        row = row_of(b, 1)
        own(b, OLD)[row, 2:] = torch.tensor([-77.0, 99.0])
        return Truth(OLD)

    assert not audit(change={"old_log_prob": garbage}, until="old_log_prob").bad()


def test_without_rollout_log_probs_there_is_nothing_to_compare() -> None:
    def dropped(b: Boundary) -> Truth:
        del b.batch.batch[ROLLOUT]
        return Truth(ROLLOUT)

    ran = audit(change={"rollout": dropped}, until="old_log_prob")
    for probe in ("rollout_old_gap", "precision"):
        outcome = ran.outcome(probe, "old_log_prob")
        assert outcome.kind == "not_checkable"
        assert outcome.reason == f"field not in the batch: {ROLLOUT}"


def test_the_gap_is_measured_and_kept() -> None:
    ran = audit(until="old_log_prob")
    ran.auditor.end_step()
    history = ran.auditor.history
    assert 0 < history["training/rollout_log_probs_diff_max"][0] < 1e-3
    assert 0 <= history["rollout_corr/k3_kl"][0] < 1e-6
    assert len(history["rollout_corr/kl"]) == 1


def test_a_float_limit_just_above_zero_is_rounding() -> None:
    def rounded_up(b: Boundary) -> Truth:
        old, rolled = own(b, OLD), own(b, ROLLOUT)
        old[0, 0] = 5e-5
        rolled[0, 0] = 5e-5
        return Truth(OLD)

    ran = audit(change={"old_log_prob": rounded_up}, until="old_log_prob")
    assert ran.outcome("old_log_probs_nonpositive", "old_log_prob").kind == "passed"


def test_a_plain_dict_is_read_as_well() -> None:
    options = Options()
    auditor = Auditor(options.settings(), on_fail="record")
    auditor.begin_step(1)
    fields = {
        OLD: np.full((2, 3), 0.5, np.float32),
        "response_mask": np.array([[1, 1, 0], [1, 0, 0]]),
        "responses": np.array([[3, 2, 0], [2, 0, 0]]),
    }
    report = auditor.boundary("old_log_prob", fields)
    [finding] = [f for f in report if f.check == "old_log_probs_nonpositive"]
    assert finding.columns == {0: (0, 1), 1: (0,)}


def test_gaps_are_measured_with_their_sign() -> None:
    def lower(b: Boundary) -> Truth:
        mask = b.batch.batch["response_mask"] != 0
        old, rollout = own(b, OLD), b.batch.batch[ROLLOUT]
        old[:] = torch.where(mask, rollout - 2e-4, 0.0)
        cell = mask.nonzero()[3]
        old[cell[0], cell[1]] = rollout[cell[0], cell[1]] + 6e-4
        return Truth("")

    ran = audit(change={"old_log_prob": lower}, until="old_log_prob")
    tokens = _trained()
    ran.auditor.end_step()
    history = ran.auditor.history
    absolute = (2e-4 * (tokens - 1) + 6e-4) / tokens
    signed = (-2e-4 * (tokens - 1) + 6e-4) / tokens
    k3 = (2e-8 * (tokens - 1) + 1.8e-7) / tokens
    for name, want in (
        ("training/rollout_log_probs_diff_max", 6e-4),
        ("training/rollout_log_probs_diff_mean", absolute),
        ("rollout_corr/kl", -signed),
        ("rollout_corr/k3_kl", k3),
    ):
        assert history[name][0] == pytest.approx(want, rel=0.02), name


def _trained() -> int:
    seen: list[int] = []
    audit(change={"rollout": lambda b: seen.append(int(b.batch.batch["response_mask"].sum()))},
          until="rollout")  # fmt: skip
    return seen[0]


@pytest.mark.parametrize("name", [ROLLOUT, OLD])
def test_the_largest_positive_log_prob_is_told(name: str) -> None:
    """A ten-thousandth above 0 is rounding; at more than that the largest is named."""
    stage = {ROLLOUT: "rollout", OLD: "old_log_prob"}[name]
    for highest, found in ((0.9e-4, False), (1.1e-4, True)):

        def change(b: Boundary, highest: float = highest) -> Truth:
            values = own(b, name)
            values[0, 0], values[1, 0] = highest, highest / 4
            return Truth("")

        ran = audit(change={stage: change}, until=stage)
        findings = ran.findings(f"{name}_nonpositive", stage)
        assert bool(findings) is found
        if found:
            assert findings[0].expected == "at most 0.0001"
            assert findings[0].actual == "up to 0.00011"
            assert findings[0].columns == {0: (0,)}


def test_the_first_value_that_is_not_finite_is_told() -> None:
    def two(b: Boundary) -> Truth:
        values = own(b, OLD)
        values[2, 0], values[3, 0] = float("nan"), float("inf")
        return Truth("")

    [finding] = audit(change={"old_log_prob": two}, until="old_log_prob").findings(
        f"{OLD}_finite", "old_log_prob"
    )
    assert finding.actual == "nan first at row 2, column 0"
    assert finding.columns == {2: (0,), 3: (0,)}


@pytest.mark.parametrize(("dtypes", "severity"), [(("float32", "bfloat16"), "info"),
                                                  (("float32", "float32"), "warn")])  # fmt: skip
def test_dtypes_that_differ_are_listed(dtypes: tuple[str, str], severity: str) -> None:
    def half(b: Boundary) -> Truth:
        b.batch.batch[OLD] = b.batch.batch[OLD].bfloat16()
        return Truth("")

    settings = {"trainer_dtype": dtypes[0], "rollout_dtype": dtypes[1]}
    [finding] = audit(change={"old_log_prob": half}, until="old_log_prob",
                      settings=settings).findings("precision", "old_log_prob")  # fmt: skip
    assert finding.severity == severity
    assert finding.actual == f"{OLD} bfloat16, {ROLLOUT} float32"
