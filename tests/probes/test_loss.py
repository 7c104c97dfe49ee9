"""The update against one unsplit recomputation (DPA5xx)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, loner, own

AFTER = "update_actor"
MINI = Options(mini_batches=2)


def other_log_prob(b: Boundary) -> Truth:
    row = loner(b)
    own(b, "update_log_probs")[row, 1] -= 0.3
    return at("old_log_probs", (row, 1))


def _term(name: str, factor: float, number: int = 0) -> Any:
    def change(b: Boundary) -> Truth:
        b.evidence["losses"][number][name] *= factor
        return Truth("losses")

    change.__name__ = f"{name}_times_{factor}_of_{number}"
    return change


CASES = [
    Case("first_ratio", "DPA501", AFTER, other_log_prob, "dropout_on",
         "old_log_probs equal to update_log_probs", also=("DPA502",)),
    Case("loss_recomputed", "DPA502", AFTER, _term("pg_loss", 2.0), "loss_depends_on_split",
         "evidence  factor: 2"),
    Case("loss_recomputed", "DPA502", AFTER, _term("total", 0.5), "loss_depends_on_split",
         "terms wrong: total"),
    Case("loss_recomputed", "DPA502", AFTER, _term("kl_loss", 3.0, 1), "wrong_kl_estimator",
         "of mini-batch 1, unsplit", options=MINI),
    Case("loss_recomputed", "DPA502", AFTER, _term("entropy_loss", 1.5), "loss_depends_on_split",
         "terms wrong: entropy_loss", options=Options(entropy=True)),
    Case("loss_normaliser", "DPA503", AFTER, _term("normaliser", 0.5), "wrong_normaliser",
         "(token-mean) for mini-batch 0"),
    Case("loss_normaliser", "DPA503", AFTER, _term("normaliser", 2.0, 1), "wrong_normaliser",
         "mini-batches wrong: 1", options=MINI),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_kl_that_is_zero_cannot_hide_another_estimator() -> None:
    """At step 1 the KL is about 0; at a later step a wrong estimator shows."""
    ran = audit(Options(step=5), settings={"kl_loss_type": "abs"}, until=AFTER)
    [finding] = ran.findings("loss_recomputed", AFTER)
    assert finding.causes[0] == "wrong_kl_estimator"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("clip_ratio_high", 0.0001), ("clip_ratio_low", 0.0001)],
)
def test_another_clip_range_shows_in_the_second_mini_batch(setting: str, value: float) -> None:
    ran = audit(Options(mini_batches=3, step=3), settings={setting: value}, until=AFTER)
    [finding] = ran.findings("loss_recomputed", AFTER)
    assert "pg_loss" in finding.evidence["terms wrong"]
    assert "wrong_clip" in finding.causes


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]
)
def test_every_aggregation_is_recomputed(mode: str) -> None:
    ran = audit(Options(loss_agg_mode=mode, mini_batches=2), until=AFTER)
    assert not ran.bad()
    for probe in ("loss_recomputed", "loss_normaliser"):
        assert ran.outcome(probe, AFTER).kind == "passed"


def test_a_loss_of_another_aggregation_is_found() -> None:
    ran = audit(settings={"loss_agg_mode": "seq-mean-token-mean"}, until=AFTER)
    assert {f.code for f in ran.report(AFTER)} == {"DPA502", "DPA503"}


@pytest.mark.parametrize("probe", ["loss_recomputed", "loss_normaliser"])
def test_an_aggregation_of_ones_own_is_not_recomputed(probe: str) -> None:
    outcome = audit(settings={"loss_agg_mode": "mine"}, until=AFTER).outcome(probe, AFTER)
    assert (outcome.kind, outcome.reason) == ("not_applicable", "unknown aggregation mine")


def _without(name: str) -> Any:
    def dropped(b: Boundary) -> Truth:
        if name == "ref_log_prob":
            own(b, name)
        del b.batch.batch[name]
        return Truth(name)

    return dropped


@pytest.mark.parametrize(
    ("name", "options"),
    [("ref_log_prob", Options()), ("update_entropys", Options(entropy=True))],
)
def test_a_term_whose_field_is_missing_cannot_be_recomputed(name: str, options: Options) -> None:
    ran = audit(options, {AFTER: _without(name)}, until=AFTER)
    outcome = ran.outcome("loss_recomputed", AFTER)
    assert outcome.kind == "not_checkable"
    assert outcome.reason == f"field missing, or not as declared: {name}"


@pytest.mark.parametrize(
    ("probe", "number", "reason"),
    [
        ("first_ratio", 1, "no row of the first mini-batch was recorded"),
        ("loss_recomputed", 7, "no row of the reported mini-batches was recorded"),
        ("loss_normaliser", 7, "no row of the reported mini-batches was recorded"),
    ],
)
def test_rows_of_no_reported_mini_batch(probe: str, number: int, reason: str) -> None:
    def numbered(b: Boundary) -> Truth:
        own(b, "mini_batch")[:] = number
        return Truth("")

    outcome = audit(change={AFTER: numbered}, until=AFTER).outcome(probe, AFTER)
    assert (outcome.kind, outcome.reason) == ("not_checkable", reason)


def test_a_normaliser_that_nobody_noted() -> None:
    def dropped(b: Boundary) -> Truth:
        del b.evidence["losses"][0]["normaliser"]
        return Truth("")

    outcome = audit(change={AFTER: dropped}, until=AFTER).outcome("loss_normaliser", AFTER)
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "not recorded: losses.normaliser",
    )  # fmt: skip


def test_a_loss_that_is_not_a_number_where_it_should_be_one() -> None:
    ran = audit(change={AFTER: _term("total", float("nan"))}, until=AFTER)
    assert ran.findings("loss_recomputed", AFTER)[0].actual == "nan"


def test_the_ratio_of_later_mini_batches_is_free() -> None:
    ran = audit(Options(mini_batches=4), until=AFTER)
    assert ran.outcome("first_ratio", AFTER).kind == "passed"
    ran.auditor.end_step()
    assert ran.auditor.history["audit/first_ratio_gap_max"][0] < 1e-4
