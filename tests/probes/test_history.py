"""What only several steps show (DPA413, DPA607 to DPA610)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.auditor import Auditor
from dataproto_audit.probes.dynamics import WEIGHTS
from dataproto_audit.probes.outliers import REF_GAP
from dataproto_audit.probes.registry import AT_END
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import HISTORY, METRICS, Case, Ran, Truth, audit, check_case, each

GAP, LR, NORM = "rollout_corr/abs_log_prob_gap", "actor/lr", "actor/grad_norm"
DEAD, SHARE = "groups/dead_share", "response_mask/masked_share"
CLIPPED, KL = "actor/pg_clipfrac", "actor/ppo_kl"
REF = "ref_log_prob"
ANSWER = "rollout/greedy_hash"
Series = Mapping[str, Sequence[float]]


def _metrics(name: str, field: str, **values: float) -> Callable[[Boundary], Truth]:
    """A change of the step's metrics; ``__`` in a keyword stands for the slash of a metric."""

    def change(b: Boundary) -> Truth:
        b.evidence.update({k.replace("__", "/"): v for k, v in values.items()})  # type: ignore[attr-defined]
        return Truth(field)

    change.__name__ = name
    return change


def _case(
    probe: str, code: str, change: Any, cause: str, says: str, blames: str, history: Series,
    **more: Any,
) -> Case:  # fmt: skip
    past = {**HISTORY, **history}
    return Case(probe, code, AT_END, change, cause, says, blames=blames, history=past, **more)


def _gap(now: float) -> Any:
    return _metrics("gap", "rollout_log_probs", rollout_corr__abs_log_prob_gap=now)


def ref_is_the_policy(b: Boundary) -> Truth:
    b.batch.batch[REF] = b.batch.batch["old_log_probs"].clone()
    return Truth(REF)


MOVED = {REF_GAP: (0.0, 1e-6), WEIGHTS: (11.0, 12.0)}
"""Two steps in which the weights changed and the reference went with them."""
LATER = Options(step=4)
NO_ADVANTAGES = {f"critic/advantages/{name}": (0.0, 0.0) for name in ("max", "min")}

CASES = [
    Case("reference_stays", "DPA612", "ref_log_prob", ref_is_the_policy, "reference_not_frozen",
         "of the policy's in 3 steps", severity="warn", options=LATER, history=MOVED),
    Case("reference_stays", "DPA612", "ref_log_prob", ref_is_the_policy, "reference_not_frozen",
         "of the policy's in 3 steps", severity="warn", options=LATER,
         history={REF_GAP: (0.0, 0.0), LR: (1e-6, 1e-6)}),
    _case("gap_stays", "DPA607", _gap(0.9), "stale_rollout_weights", "times: 225", "old_log_prob",
          {GAP: (0.004,) * 4}),
    _case("gap_stays", "DPA607",
          _metrics("drift", "rollout_log_probs", rollout_corr__abs_log_prob_gap=0.03, actor__lr=0),
          "backend_drift", "actual    0.03", "old_log_prob",
          {GAP: (0.004, 0.01, 0.02), LR: (0.0,) * 3}),
    _case("gap_stays", "DPA607",
          _metrics("one_answer", "rollout_log_probs", rollout_corr__abs_log_prob_gap=0.03,
                   rollout__greedy_hash=7.0),
          "stale_rollout_weights", "compare the weights of engine and trainer", "old_log_prob",
          {GAP: (0.004, 0.01, 0.02), ANSWER: (7.0,) * 3}),
    _case("tokens_trained", "DPA608", _metrics("none", "loss", response_mask__tokens=0),
          "empty_mask", "trained tokens in every step", "update_actor", {}),
    _case("ratio_moves", "DPA609",
          _metrics("frozen", "ratio", actor__pg_clipfrac=0.0, actor__ppo_kl=0.0),
          "ratio_always_one", "a KL of exactly 0 in 3 steps", "update_actor",
          {CLIPPED: (0.0,) * 2, KL: (0.0,) * 2}),
    _case("masked_share_stays", "DPA610",
          _metrics("none_masked", "response_mask", response_mask__masked_share=0.0),
          "mask_on_tool", "about 0.2 of the response masked", "rollout", {}),
    _case("groups_alive", "DPA413", _metrics("dead", "token_level_rewards", groups__dead_share=0.8),
          "dead_groups", "70% or more in 3 steps", "advantage",
          {DEAD: (0.7, 0.9)}, severity="warn"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def _end(history: Series | None = None, settings: Any = None, **now: Any) -> Ran:
    """The end of a step with the metrics ``now`` after those of ``history``."""
    past = {**HISTORY, **(history or {})}
    change = {AT_END: _metrics("change", "", **now)}
    return audit(change=change, until=AT_END, history=past, settings=settings)


NEAR: dict[str, tuple[Series, dict[str, float]]] = {
    "a healthy step": ({}, {}),
    "a jump to less than 0.1": ({GAP: (0.004,) * 4}, {GAP: 0.09}),
    "a wide gap that is no jump": ({GAP: (0.02,) * 4}, {GAP: 0.15}),
    "a gap that was as wide two steps before": ({GAP: (0.004, 0.004, 0.2, 0.004)}, {GAP: 0.2}),
    "growth while the policy learns": ({GAP: (0.004, 0.01, 0.02), LR: (1e-6,) * 3}, {GAP: 0.05}),
    "growth by less than half": ({GAP: (0.02, 0.021, 0.022), LR: (0.0,) * 3},
                                 {GAP: 0.024, LR: 0.0}),
    "a step that does not grow": ({GAP: (0.004, 0.03, 0.02), LR: (0.0,) * 3},
                                  {GAP: 0.05, LR: 0.0}),
    "answers that differ": ({GAP: (0.004, 0.01, 0.02), ANSWER: (7.0, 7.0, 8.0)},
                            {GAP: 0.05, ANSWER: 8.0}),
    "no answers": ({GAP: (0.004, 0.01, 0.02)}, {GAP: 0.05}),
    "one token": ({}, {"response_mask/tokens": 1}),
    "a ratio of 1 in two steps": ({CLIPPED: (0.1, 0.0), KL: (0.1, 0.0)}, {CLIPPED: 0.0, KL: 0.0}),
    "no clipping, but a KL": ({CLIPPED: (0.0,) * 2, KL: (0.001,) * 2}, {CLIPPED: 0.0, KL: 0.001}),
    "nothing masked from the start": ({SHARE: (0.0, 0.0)}, {SHARE: 0.0}),
    "a few masked, then none": ({SHARE: (0.04, 0.03)}, {SHARE: 0.0}),
    "two steps of dead groups": ({DEAD: (0.6, 0.9)}, {DEAD: 0.9}),
    "groups dead short of the limit": ({DEAD: (0.69,) * 2}, {DEAD: 0.69}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NEAR))
def test_what_healthy_runs_do_stays_quiet(name: str) -> None:
    history, now = NEAR[name]
    ran = _end(history, **{key.replace("/", "__"): value for key, value in now.items()})
    assert not ran.bad(), "\n".join(map(str, ran.bad()))


def test_a_run_that_is_off_policy_by_design_has_no_usual_gap() -> None:
    ran = _end({GAP: (0.004,) * 4}, {"on_policy": False}, rollout_corr__abs_log_prob_gap=0.9)
    outcome = ran.outcome("gap_stays", AT_END)
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "rollouts may come from older weights",
    )  # fmt: skip


@pytest.mark.parametrize("told", ["metric", "setting"])
def test_a_single_update_has_a_ratio_of_1(told: str) -> None:
    settings = {"ppo_epochs": 1} if told == "setting" else None
    ran = _end({CLIPPED: (0.0,) * 2, KL: (0.0,) * 2}, settings,
               actor__ppo_epochs=1, actor__pg_clipfrac=0.0, actor__ppo_kl=0.0)  # fmt: skip
    outcome = ran.outcome("ratio_moves", AT_END)
    assert outcome.kind == "not_applicable"
    assert outcome.reason == "one epoch: the ratio of a single update is 1"


def test_the_configured_epochs_count_before_those_of_the_metrics() -> None:
    ran = _end({CLIPPED: (0.0,) * 2, KL: (0.0,) * 2}, {"ppo_epochs": 4},
               actor__ppo_epochs=1, actor__pg_clipfrac=0.0, actor__ppo_kl=0.0)  # fmt: skip
    [finding] = ran.findings("ratio_moves", AT_END)
    assert "within 4 epochs" in finding.expected


@pytest.mark.parametrize(
    ("probe", "metric", "history", "reason"),
    [
        ("gap_stays", GAP, {}, f"not recorded: metrics.{GAP}"),
        ("gap_stays", "", {GAP: ()}, f"no earlier steps of {GAP}"),
        ("tokens_trained", "response_mask/tokens", {},
         "not recorded: metrics.response_mask/tokens"),
        ("ratio_moves", "actor/ppo_epochs", {}, "not recorded: metrics.actor/ppo_epochs"),
        ("ratio_moves", CLIPPED, {}, f"not recorded: metrics.{CLIPPED}"),
        ("ratio_moves", "", {KL: (0.0,)}, f"fewer than 3 steps of {KL}"),
        ("masked_share_stays", SHARE, {}, f"not recorded: metrics.{SHARE}"),
        ("masked_share_stays", "", {SHARE: ()}, f"no earlier steps of {SHARE}"),
        ("groups_alive", DEAD, {}, f"not recorded: metrics.{DEAD}"),
        ("groups_alive", "", {DEAD: (0.9,)}, f"fewer than 3 steps of {DEAD}"),
    ],
)  # fmt: skip
def test_what_was_not_recorded_is_said(
    probe: str, metric: str, history: Series, reason: str
) -> None:
    def dropped(b: Boundary) -> Truth:
        b.evidence.pop(metric, None)  # type: ignore[attr-defined]
        return Truth("")

    ran = audit(change={AT_END: dropped}, until=AT_END, history={**HISTORY, **history})
    outcome = ran.outcome(probe, AT_END)
    assert (outcome.kind, outcome.reason) == ("not_checkable", reason)


@pytest.mark.parametrize("value", [True, "0.3", None, [0.3]])
def test_a_metric_of_another_kind_counts_as_not_recorded(value: Any) -> None:
    outcome = _end(groups__dead_share=value).outcome("groups_alive", AT_END)
    assert (outcome.kind, outcome.reason) == ("not_checkable", f"not recorded: metrics.{DEAD}")


def test_the_finding_names_its_step_and_no_rows() -> None:
    ran = _end(response_mask__tokens=0)
    [finding] = ran.bad()
    assert (finding.step, finding.rows, finding.columns) == (1, (), {})


def test_metrics_join_the_history_after_they_were_looked_at() -> None:
    auditor = _end().auditor
    assert auditor.history[GAP] == [*HISTORY[GAP], METRICS[GAP]]
    assert not auditor.findings


@given(st.lists(st.floats(0.0, 0.09), min_size=2, max_size=8))
def test_small_gaps_of_any_kind_are_quiet_while_the_policy_learns(gaps: list[float]) -> None:
    assert not _end({GAP: gaps[:-1]}, rollout_corr__abs_log_prob_gap=gaps[-1]).bad()


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        ({}, "not_checkable"),
        ({REF_GAP: (0.0,), WEIGHTS: (11.0,)}, "not_checkable"),
        ({REF_GAP: (0.0, 0.0)}, "not_checkable"),  # nothing tells that the policy moved
        ({REF_GAP: (0.0, 0.0), WEIGHTS: (11.0, 11.0)}, "not_applicable"),
        ({REF_GAP: (0.0, 0.0), WEIGHTS: (11.0, 11.0), LR: (1e-3, 1e-3)}, "not_applicable"),
        ({REF_GAP: (0.0, 0.0), LR: (1e-6, 0.0)}, "not_checkable"),
        ({REF_GAP: (0.0, 0.0), LR: (0.0, 0.0)}, "not_applicable"),
        ({REF_GAP: (0.0, 0.0), LR: (0.0, 0.0), NORM: (0.4, 0.4)}, "not_applicable"),
        ({REF_GAP: (0.0, 0.0), LR: (1e-3, 1e-3), NORM: (0.0, 0.0)}, "not_applicable"),
        # only the decay moved the weights
        ({**MOVED, LR: (1e-3, 1e-3), NORM: (0.0, 0.0)}, "not_applicable"),
        ({**MOVED, LR: (1e-3, 1e-3), NORM: (0.3, 0.0)}, "not_checkable"),
        ({**MOVED, LR: (1e-3, 1e-3), NORM: (0.3, 0.1)}, "failed"),
        ({REF_GAP: (0.0, 0.0), LR: (1e-3, 1e-3), NORM: (0.3, 0.1)}, "failed"),
        ({REF_GAP: (0.0, 0.0), LR: (1e-3, 1e-3), **NO_ADVANTAGES}, "not_checkable"),
        ({**MOVED, LR: (1e-9, 1e-9), NORM: (0.3, 0.1)}, "not_checkable"),
        ({REF_GAP: (0.0, 0.3), WEIGHTS: (11.0, 12.0)}, "passed"),
        (MOVED, "failed"),
    ],
)
def test_a_reference_is_only_suspect_while_the_policy_moves(history: Series, kind: str) -> None:
    ran = audit(LATER, {REF: ref_is_the_policy}, until=REF, history=history)
    assert ran.outcome("reference_stays", REF).kind == kind


def test_a_reference_of_its_own_is_fine() -> None:
    ran = audit(LATER, until=REF, history=MOVED)
    assert ran.outcome("reference_stays", REF).kind == "passed"


@pytest.mark.parametrize(("metrics", "kind"), [
    ({"val/score": 0.1}, "not_applicable"), ({"actor/lr": 0.1}, "not_checkable"),
])  # fmt: skip
def test_a_step_0_that_only_validates(metrics: dict[str, float], kind: str) -> None:
    auditor = Auditor(Options().settings(), on_fail="record")
    auditor.begin_step(0)
    report = auditor.end_step(metrics)
    said = {o.check: o.kind for o in report.outcomes}
    for name in ("gap_stays", "tokens_trained", "masked_share_stays", "groups_alive", "kl_spike"):
        assert said[name] == kind
