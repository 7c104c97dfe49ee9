"""The update against one unsplit recomputation (DPA5xx)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dataproto_audit.reference.losses import policy_loss
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, loner, own

AFTER = "update_actor"
MINI = Options(mini_batches=2)
FAR = Options(mini_batches=3, update_drift=6.0, step=3, response_width=8)


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


def _logged(value: Any, losses: bool = True) -> Any:
    def change(b: Boundary) -> Truth:
        b.evidence["metrics"]["actor/kl_loss"] = value
        if not losses:
            del b.evidence["losses"]
        return Truth("actor/kl_loss")

    change.__name__ = f"logged_{value}"
    return change


CASES = [
    Case("first_ratio", "DPA501", AFTER, other_log_prob, "row_outlier",
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
    Case("logged_kl", "DPA504", AFTER, _logged(-0.05), "wrong_kl_estimator",
         "is not the one that is trained on", options=FAR),
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


# -- causes are tried ------------------------------------------------------------------------------


def _remade(scale: float = 1.0, **changes: Any) -> Any:
    """All losses with other settings than configured, times ``scale``."""

    def change(b: Boundary) -> Truth:
        s, tensors = FAR.settings(), b.batch.batch
        how = {"clip_ratio_low": s.clip_ratio_low, "clip_ratio_high": s.clip_ratio_high,
               "clip_ratio_c": 3.0, "kl_loss_coef": s.kl_loss_coef, **changes}  # fmt: skip
        for number, loss in enumerate(b.evidence["losses"]):
            rows = tensors["mini_batch"] == number
            names = ("update_log_probs", "old_log_probs", "advantages", "response_mask")
            ref = tensors["ref_log_prob"][rows]
            made = policy_loss(*(tensors[n][rows] for n in names), ref_log_prob=ref, **how)
            for name in ("pg_loss", "kl_loss", "total"):
                loss[name] = scale * float(made[name])
        return Truth("losses")

    return change


def of_micro_batches(b: Boundary) -> Truth:
    """Means of the means of micro-batches."""
    s, tensors = FAR.settings(), b.batch.batch
    names = ("update_log_probs", "old_log_probs", "advantages", "response_mask", "ref_log_prob")
    for number, loss in enumerate(b.evidence["losses"]):
        made, start = [], 0
        for rank in b.evidence["ranks"]:
            for micro in rank["indices"]:
                rows = torch.tensor(micro) + start
                if int(tensors["mini_batch"][rows[0]]) != number:
                    continue
                *parts, ref = (tensors[n][rows] for n in names)
                made.append(policy_loss(
                    *parts, ref_log_prob=ref, clip_ratio_low=s.clip_ratio_low,
                    clip_ratio_high=s.clip_ratio_high, kl_loss_coef=s.kl_loss_coef,
                ))  # fmt: skip
            start += rank["rows"]
        for name in ("pg_loss", "kl_loss", "total"):
            loss[name] = sum(float(part[name]) for part in made) / len(made)
    return Truth("losses")


def padded_count(b: Boundary) -> Truth:
    for number, loss in enumerate(b.evidence["losses"]):
        rows = int((b.batch.batch["mini_batch"] == number).sum())
        for name in ("pg_loss", "kl_loss", "total"):
            loss[name] *= loss["normaliser"] / (8 * rows)
        loss["normaliser"] = 8.0 * rows
    return Truth("losses")


def bonus_added(b: Boundary) -> Truth:
    for loss in b.evidence["losses"]:
        loss["total"] += 2 * 0.001 * loss["entropy_loss"]
    return Truth("losses")


def kl_added(b: Boundary) -> Truth:
    for loss in b.evidence["losses"]:
        loss["total"] += 0.5 * loss["kl_loss"]
    return Truth("losses")


def _loss_finding(change: Any, options: Options = FAR) -> Any:
    ran = audit(options, {AFTER: change}, until=AFTER)
    [finding] = ran.findings("loss_recomputed", AFTER)
    return finding


@pytest.mark.parametrize(
    ("change", "cause", "told"),
    [
        (_remade(clip_ratio_low=0.28, clip_ratio_high=0.2), "wrong_clip", "swapped"),
        (_remade(clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=None), "wrong_clip",
         "no clip"),
        (_remade(loss_agg_mode="seq-mean-token-mean"), "wrong_normaliser", "aggregated as"),
        (_remade(kl_loss_type="kl"), "wrong_kl_estimator", "k1"),
        (_remade(2.0), "wrong_normaliser", "2 times too large"),
        (of_micro_batches, "loss_depends_on_split", "micro-batches"),
        (padded_count, "wrong_normaliser", "instead of"),
        (kl_added, "engine_setting", "a KL coefficient of 0.51 instead of 0.01"),
    ],
)  # fmt: skip
def test_the_cause_that_gives_the_reported_loss_comes_first(
    change: Any, cause: str, told: str
) -> None:
    finding = _loss_finding(change)
    assert finding.causes[0] == cause
    assert told in finding.evidence["explained by"]


def test_an_entropy_bonus_of_the_other_sign() -> None:
    finding = _loss_finding(bonus_added, replace(FAR, entropy=True))
    assert finding.causes[0] == "entropy_sign"


def test_without_the_ranks_notes_no_split_is_tried() -> None:
    def change(b: Boundary) -> Truth:
        of_micro_batches(b)
        del b.evidence["ranks"]
        return Truth("losses")

    finding = _loss_finding(change)
    assert "explained by" not in finding.evidence
    assert finding.causes[0] == "loss_depends_on_split"


# -- the logged KL ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "losses"), [(-0.05, True), (900.0, True), (-0.05, False)])
def test_a_logged_kl_of_another_estimator(value: float, losses: bool) -> None:
    ran = audit(FAR, {AFTER: _logged(value, losses)}, until=AFTER)
    [finding] = ran.findings("logged_kl", AFTER)
    assert (finding.code, finding.field) == ("DPA504", "actor/kl_loss")
    assert finding.causes[0] == "wrong_kl_estimator"


@pytest.mark.parametrize(
    ("change", "settings", "kind", "reason"),
    [
        (_logged(None), {}, "not_checkable", "not recorded: metrics.actor/kl_loss"),
        (_logged(float("nan")), {}, "not_checkable", "not recorded: metrics.actor/kl_loss"),
        (_logged(-0.1, losses=False), {"kl_loss_type": "kl"}, "not_checkable",
         "not recorded: losses.kl_loss"),
        (_logged(-0.1), {"use_kl_loss": False}, "not_applicable", "no KL in the loss"),
    ],
)  # fmt: skip
def test_a_logged_kl_that_cannot_be_judged(
    change: Any, settings: dict[str, Any], kind: str, reason: str
) -> None:
    ran = audit(FAR, {AFTER: change}, until=AFTER, settings=settings)
    outcome = ran.outcome("logged_kl", AFTER)
    assert (outcome.kind, outcome.reason) == (kind, reason)


# -- paths that average over micro-batches ---------------------------------------------------------


def weighted_by_rows(scale: float = 1.0, **more: Any) -> Any:
    """Losses as verl's legacy actor makes them: those of micro-batches, by their share of rows."""

    def change(b: Boundary) -> Truth:
        s, tensors = FAR.settings(), b.batch.batch
        names = ("update_log_probs", "old_log_probs", "advantages", "response_mask", "ref_log_prob")
        for number, loss in enumerate(b.evidence["losses"]):
            total, start = 0.0, 0
            for rank in b.evidence["ranks"]:
                micros = [torch.tensor(m) + start for m in rank["indices"]]
                micros = [m for m in micros if int(tensors["mini_batch"][m[0]]) == number]
                rows = sum(len(m) for m in micros)
                for m in micros:
                    new, old, *parts, ref = (tensors[n][m] for n in names)
                    old = new if more.get("old") == "new" else old
                    made = policy_loss(
                        new, old, *parts, ref_log_prob=ref, clip_ratio_low=s.clip_ratio_low,
                        clip_ratio_high=s.clip_ratio_high, kl_loss_coef=s.kl_loss_coef,
                    )  # fmt: skip
                    total += float(made["total"]) * len(m) / rows / len(b.evidence["ranks"])
                start += rank["rows"]
            loss.clear()
            loss.update(mini_batch=number, total=scale * total, split="rows", **more)
        return Truth("losses")

    return change


@pytest.mark.parametrize("more", [{}, {"old": "new"}, {"eps": 2.0**-8}])
def test_a_mean_over_micro_batches_is_recomputed_as_one(more: dict[str, Any]) -> None:
    ran = audit(FAR, {AFTER: weighted_by_rows(**more)}, until=AFTER)
    assert ran.outcome("loss_recomputed", AFTER).kind == "passed"
    assert ran.outcome("loss_normaliser", AFTER).kind == "not_checkable"


def test_a_mean_over_micro_batches_that_is_doubled_is_found() -> None:
    finding = _loss_finding(weighted_by_rows(2.0))
    assert finding.evidence["factor"] == pytest.approx(2.0, rel=1e-4)


def test_a_mean_over_micro_batches_needs_to_know_them() -> None:
    def change(b: Boundary) -> Truth:
        weighted_by_rows()(b)
        b.evidence["ranks"][0]["indices"] = b.evidence["ranks"][0]["indices"][1:]
        return Truth("losses")

    outcome = audit(FAR, {AFTER: change}, until=AFTER).outcome("loss_recomputed", AFTER)
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "not recorded: micro-batches that make up each mini-batch",
    )  # fmt: skip


def test_a_loss_that_is_not_known_is_not_recomputed() -> None:
    def change(b: Boundary) -> None:
        for entry in b.evidence["losses"]:
            entry["loss_mode"] = "cispo"

    outcome = audit(change={AFTER: change}, until=AFTER).outcome("loss_recomputed", AFTER)
    assert (outcome.kind, outcome.reason) == ("not_checkable", "no recomputation of the loss cispo")


@pytest.mark.parametrize("name", ["pg_loss", "total", "normaliser"])
@pytest.mark.parametrize("value", ["x", [1.0, 2.0], torch.ones((), device="meta"), 1j, b"1"])
def test_a_term_that_is_no_number_is_told(name: str, value: Any) -> None:
    def change(b: Boundary) -> None:
        b.evidence["losses"][0][name] = value

    ran = audit(change={AFTER: change}, until=AFTER)
    for probe in ("loss_recomputed", "loss_normaliser"):
        outcome = ran.outcome(probe, AFTER)
        assert (outcome.kind, outcome.reason) == ("not_checkable", f"losses.{name} is no number")
    assert not [f for f in ran.auditor.findings if f.code.startswith("DPA9")]


def test_terms_may_be_scalars_of_torch_and_numpy() -> None:
    def change(b: Boundary) -> None:
        for loss in b.evidence["losses"]:
            loss["pg_loss"] = torch.tensor(loss["pg_loss"])
            loss["normaliser"] = torch.tensor(loss["normaliser"]).numpy()

    ran = audit(change={AFTER: change}, until=AFTER)
    assert ran.outcome("loss_recomputed", AFTER).kind == "passed"
    assert ran.outcome("loss_normaliser", AFTER).kind == "passed"
