"""Metrics over steps, and the weights that reached the engine (DPA6xx)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataproto_audit.probes.dynamics import WARM_UP, spike
from dataproto_audit.testing import faults
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Change, Truth, at, audit, check_case, each, loner, own

CALM = [0.01 + 0.0001 * (step % 7) for step in range(WARM_UP)]


def _metric(name: str, value: float) -> Change:
    def change(b: Boundary) -> Truth:
        b.evidence["metrics"][name] = value
        return Truth(name)

    change.__name__ = f"{name}_{value}"
    return change


def _spike(probe: str, code: str, metric: str, cause: str, *also: str) -> Case:
    return Case(probe, code, "update_actor", _metric(metric, 5.0), cause,
                "near its median 0.0103", severity="warn", history={metric: CALM},
                also=also)  # fmt: skip


def beyond_log_vocab(b: Boundary) -> Truth:
    row = loner(b)
    own(b, "entropys")[row, 1] = 4.0
    return at("entropys", (row, 1))


def negative_entropy(b: Boundary) -> Truth:
    row = loner(b)
    own(b, "entropys")[row, 2] = -0.1
    return at("entropys", (row, 2))


def entropy_not_a_number(b: Boundary) -> Truth:
    row = loner(b)
    own(b, "entropys")[row, 0] = float("nan")
    return at("entropys", (row, 0))


def one_stale_tensor(b: Boundary) -> Truth:
    b.evidence["engine_checksum"]["layer.2"] = 7
    return Truth("weights")


def stale_head(b: Boundary) -> Truth:
    for side, number in (("trainer_checksum", 1), ("engine_checksum", 2)):
        b.evidence[side]["lm_head.weight"] = number
    return Truth("weights")


def told_stale(b: Boundary) -> Truth:
    b.evidence["engine_stale"] = ["unread.weight"]  # type: ignore[index]
    return Truth("weights")


def other_score(b: Boundary) -> Truth:
    b.evidence["sync_probe"]["engine"][1] += 0.2
    return Truth("weights")


def unscored(b: Boundary) -> Truth:
    b.evidence["sync_probe"]["engine"][0] = np.nan
    return Truth("weights")


def kept_cache(b: Boundary) -> Truth:
    b.evidence["engine_prefix_cache_reset"] = False  # type: ignore[index]
    return Truth("weights")


CASES = [
    Case("metrics_finite", "DPA601", "update_actor", _metric("actor/grad_norm", float("nan")),
         "non_finite", "actor/grad_norm = nan"),
    Case("metrics_finite", "DPA601", "update_actor", _metric("actor/pg_loss", float("inf")),
         "non_finite", "actor/pg_loss = inf"),
    _spike("kl_spike", "DPA602", "actor/ppo_kl", "learning_rate_too_high"),
    _spike("ref_kl_spike", "DPA602", "actor/kl_loss", "learning_rate_too_high", "DPA504"),
    _spike("grad_norm_spike", "DPA603", "actor/grad_norm", "bad_row"),
    Case("entropy_bounds", "DPA604", "old_log_prob", beyond_log_vocab, "temperature_mismatch",
         "log(vocabulary) = 3.466"),
    Case("entropy_bounds", "DPA604", "old_log_prob", negative_entropy, "temperature_mismatch",
         "-0.1 to"),
    Case("entropy_bounds", "DPA604", "old_log_prob", entropy_not_a_number,
         "temperature_mismatch", "between 0 and", also=("DPA420",)),
    Case("weights_arrived", "DPA605", "sync_weights", one_stale_tensor, "stale_rollout_weights",
         "layer.2 with checksum 1002"),
    Case("weights_arrived", "DPA605", "sync_weights", stale_head, "tied_head_not_updated",
         "tensors compared: 5"),
    Case("weights_arrived", "DPA605", "sync_weights", told_stale, "stale_rollout_weights",
         "unread.weight with checksum of what was sent"),
    Case("prefix_cache_dropped", "DPA606", "sync_weights", kept_cache, "stale_prefix_cache",
         "the engine kept it"),
    Case("engine_scores_alike", "DPA606", "sync_weights", other_score, "tied_head_not_updated",
         "tokens wrong: 1"),
    Case("engine_scores_alike", "DPA606", "sync_weights", unscored, "tied_head_not_updated",
         "apart"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_weights_of_the_sync_before() -> None:
    stale = faults.FAULTS["stale_rollout_weights"].apply
    ran = audit(Options(step=3), until="sync_weights", sent=stale)
    assert {f.code for f in ran.report("sync_weights")} == {"DPA605", "DPA606"}
    [finding] = ran.findings("weights_arrived", "sync_weights")
    assert finding.evidence == {"tensors wrong": 4, "tensors compared": 4}


def test_tensors_of_other_names_cannot_be_compared() -> None:
    def renamed(b: Boundary) -> Truth:
        names = b.evidence["engine_checksum"]
        b.evidence["engine_checksum"] = {f"x.{n}": v for n, v in names.items()}  # type: ignore[index]
        return Truth("")

    ran = audit(change={"sync_weights": renamed}, until="sync_weights")
    outcome = ran.outcome("weights_arrived", "sync_weights")
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "trainer and engine name no tensor alike",
    )  # fmt: skip


def test_samples_of_two_sizes_cannot_be_compared() -> None:
    def shorter(b: Boundary) -> Truth:
        b.evidence["sync_probe"]["engine"] = b.evidence["sync_probe"]["engine"][:2]
        return Truth("")

    ran = audit(change={"sync_weights": shorter}, until="sync_weights")
    outcome = ran.outcome("engine_scores_alike", "sync_weights")
    assert outcome.kind == "not_checkable"
    assert outcome.reason == "samples of 3 and 2 tokens cannot be compared"


def test_a_step_at_which_nothing_was_scored_says_why() -> None:
    def skipped(b: Boundary) -> Truth:
        b.evidence["sync_probe_skipped"] = "every 10 steps"  # type: ignore[index]
        return Truth("")

    ran = audit(change={"sync_weights": skipped}, until="sync_weights")
    outcome = ran.outcome("engine_scores_alike", "sync_weights")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "every 10 steps")


@pytest.mark.parametrize(
    ("probe", "metric"),
    [("kl_spike", "actor/ppo_kl"), ("ref_kl_spike", "actor/kl_loss"),
     ("grad_norm_spike", "actor/grad_norm")],
)  # fmt: skip
@pytest.mark.parametrize("steps", [0, WARM_UP - 1])
def test_before_the_warm_up_there_is_no_verdict(probe: str, metric: str, steps: int) -> None:
    ran = audit(until="update_actor", history={metric: CALM[:steps]})
    outcome = ran.outcome(probe, "update_actor")
    assert outcome.kind == "not_checkable"
    assert outcome.reason == f"fewer than {WARM_UP} earlier steps of {metric}"


@pytest.mark.parametrize(
    ("probe", "metric"),
    [("kl_spike", "actor/ppo_kl"), ("grad_norm_spike", "actor/grad_norm")],
)
def test_a_metric_that_nobody_recorded(probe: str, metric: str) -> None:
    def dropped(b: Boundary) -> Truth:
        del b.evidence["metrics"][metric]
        return Truth("")

    ran = audit(change={"update_actor": dropped}, until="update_actor", history={metric: CALM})
    outcome = ran.outcome(probe, "update_actor")
    assert (outcome.kind, outcome.reason) == ("not_checkable", f"not recorded: metrics.{metric}")


def test_metrics_that_are_no_numbers_are_left_alone() -> None:
    ran = audit(change={"update_actor": _metric("note", "fine")}, until="update_actor")  # type: ignore[arg-type]
    assert ran.outcome("metrics_finite", "update_actor").kind == "passed"


@pytest.mark.parametrize(
    ("value", "history", "floor", "found"),
    [
        (5.0, CALM, 0.0, True),
        (-5.0, CALM, 0.0, True),
        (0.05, CALM, 0.0, False),  # not ten times the median
        (5.0, CALM, 10.0, False),  # below the floor
        (5.0, CALM[:-1], 0.0, False),  # the history is too short
        (5.0, [0.0] * 100, 0.0, False),  # nothing was learned from
        (float("nan"), CALM, 0.0, False),  # another check's
        (5.0, [*CALM, 2.0], 0.0, False),  # a steady rise
        (5.0, [*CALM, *[float("nan")] * 5], 0.0, True),
        (30.0, [1.0, 9.0] * 20, 0.0, False),  # it jumps all the time
    ],
)
def test_what_a_spike_is(value: float, history: list[float], floor: float, found: bool) -> None:
    assert (spike(value, history, floor=floor) is not None) == found


def test_history_is_kept_from_step_to_step() -> None:
    from dataproto_audit.auditor import Auditor
    from dataproto_audit.protocol import DataProto

    auditor = Auditor(Options().settings(), on_fail="record")
    reports = []
    for step in range(1, WARM_UP + 2):
        metrics: dict[str, Any] = {"actor/grad_norm": 50.0 if step > WARM_UP else 0.5}
        auditor.begin_step(step)
        reports.append(auditor.boundary("update_actor", DataProto(), evidence={"metrics": metrics}))
        auditor.end_step(metrics)
    assert not [f for report in reports[:-1] for f in report if f.check == "grad_norm_spike"]
    [finding] = [f for f in reports[-1] if f.check == "grad_norm_spike"]
    assert (finding.severity, finding.step) == ("warn", WARM_UP + 1)


def test_the_first_of_several_stale_tensors_is_told() -> None:
    def two(b: Boundary) -> Truth:
        b.evidence["engine_checksum"]["layer.1"] = 7
        b.evidence["engine_checksum"]["layer.2"] = 8
        b.evidence["engine_stale"] = ["unread.weight", "layer.2"]  # type: ignore[index]
        return Truth("weights")

    ran = audit(change={"sync_weights": two}, until="sync_weights")
    [finding] = [
        f for f in ran.report("sync_weights") if f.field == "weights" and f.code != "DPA606"
    ]
    names = [n for n in ("layer.1", "layer.2") if n in finding.expected]
    assert names == ["layer.1"]
    assert finding.actual == "7"
    assert finding.evidence["tensors wrong"] == 3
    assert "of what was sent" not in finding.expected


@pytest.mark.parametrize(("value", "found"), [(0.0099, False), (0.0102, True)])
@pytest.mark.parametrize(
    ("probe", "metric"),
    [("kl_spike", "actor/ppo_kl"), ("ref_kl_spike", "actor/kl_loss"),
     ("grad_norm_spike", "actor/grad_norm")],
)  # fmt: skip
def test_below_a_hundredth_a_jump_harms_nobody(
    probe: str, metric: str, value: float, found: bool
) -> None:
    def jump(b: Boundary) -> Truth:
        b.evidence["metrics"] = {**b.evidence.get("metrics", {}), metric: value}  # type: ignore[index]
        return Truth(metric)

    calm = [1e-4 + 1e-6 * (step % 7) for step in range(4 * WARM_UP)]
    ran = audit(change={"update_actor": jump}, until="update_actor", history={metric: calm})
    assert bool(ran.findings(probe, "update_actor")) is found
