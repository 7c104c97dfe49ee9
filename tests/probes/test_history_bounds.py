"""From where on several steps tell something (DPA413, DPA607, DPA609, DPA610, DPA612)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataproto_audit.probes.dynamics import WEIGHTS
from dataproto_audit.probes.outliers import REF_GAP
from dataproto_audit.probes.registry import AT_END
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import HISTORY, Ran, Truth, audit

GAP, LR, ANSWER = "rollout_corr/abs_log_prob_gap", "actor/lr", "rollout/greedy_hash"
DEAD, SHARE = "groups/dead_share", "response_mask/masked_share"
CLIPPED, KL = "actor/pg_clipfrac", "actor/ppo_kl"


def end(history: dict[str, Any], now: dict[str, Any], **settings: Any) -> Ran:
    """The end of a step with these earlier steps and these metrics, the others as in health."""

    def change(b: Boundary) -> Truth:
        b.evidence.update(now)  # type: ignore[attr-defined]
        return Truth("")

    past = {**HISTORY, **history}
    return audit(change={AT_END: change}, until=AT_END, settings=settings, history=past)


@pytest.mark.parametrize(
    ("before", "now", "times"),
    [
        ((0.01, 0.02, 0.012), 0.101, 0.101 / 0.012),  # the median counts
        ((0.01, 0.02, 0.012), 0.099, None),  # a tenth of a nat at least
        ((0.02, 0.02, 0.02), 0.159, None),  # not eight times
        ((0.02, 0.02, 0.02), 0.161, 8.05),
        ((0.02, 0.02, 0.11), 0.5, None),  # the gap was wide already
        ((0.11, 0.02, 0.02, 0.02), 0.5, 25.0),  # four steps ago
        ((0.02,), 0.5, 25.0),
    ],
)
def test_from_where_on_a_gap_has_jumped(
    before: tuple[float, ...], now: float, times: float | None
) -> None:
    found = end({GAP: before}, {GAP: now}).findings("gap_stays", AT_END)
    assert [f.evidence["times"] for f in found] == ([] if times is None else [pytest.approx(times)])
    if found:
        assert found[0].causes == ("stale_rollout_weights", "stale_prefix_cache")
        assert found[0].actual == f"{now:.4g}"


@pytest.mark.parametrize(
    ("gaps", "rates", "found"),
    [
        ((0.01, 0.012, 0.0151), (0.0, 0.0, 0.0), True),
        ((0.01, 0.012, 0.0149), (0.0, 0.0, 0.0), False),  # by half at least
        ((0.01, 0.01, 0.02), (0.0, 0.0, 0.0), False),  # step by step
        ((0.01, 0.012, 0.02), (0.0, 0.0, 1e-6), False),
        ((0.01, 0.012, 0.02), (1e-6, 0.0, 0.0), False),
        ((0.05, 0.01, 0.012, 0.02), (1e-6, 0.0, 0.0, 0.0), True),  # three steps count
        ((0.01, 0.02), (0.0, 0.0), False),
    ],
)
def test_a_gap_that_grows_while_nothing_is_learned(
    gaps: tuple[float, ...], rates: tuple[float, ...], found: bool
) -> None:
    history = {GAP: gaps[:-1], LR: rates[:-1]}
    findings = end(history, {GAP: gaps[-1], LR: rates[-1]}).findings("gap_stays", AT_END)
    assert bool(findings) is found
    if found:
        assert findings[0].causes == ("backend_drift",)
        assert findings[0].expected == "a mean gap near 0.01 nats, as before"


@pytest.mark.parametrize(
    ("answers", "found"),
    [((7, 7, 7), True), ((7, 7, 8), False), ((7, 7), False), ((8, 7, 7, 7), True),
     ((None, None, None), False)],
)  # fmt: skip
def test_a_gap_that_grows_while_the_engine_answers_alike(answers: Any, found: bool) -> None:
    history = {GAP: (0.01, 0.012), LR: (1e-6,) * 2, ANSWER: answers[:-1]}
    ran = end(history, {GAP: 0.02, LR: 1e-6, ANSWER: answers[-1]})
    causes = [f.causes for f in ran.findings("gap_stays", AT_END)]
    assert causes == ([("stale_rollout_weights",)] if found else [])


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ((0.7, 0.9), 0.7, True), ((0.7, 0.69), 0.7, False), ((0.7, 0.7), 0.69, False),
        ((0.1, 0.7, 0.8), 0.75, True),
    ],
)  # fmt: skip
def test_three_steps_of_dead_groups(before: tuple[float, ...], now: float, found: bool) -> None:
    findings = end({DEAD: before}, {DEAD: now}).findings("groups_alive", AT_END)
    assert [f.actual for f in findings] == (["70% or more in 3 steps"] if found else [])


def test_two_steps_of_dead_groups_are_too_few() -> None:
    outcome = end({DEAD: (0.9,)}, {DEAD: 0.9}).outcome("groups_alive", AT_END)
    assert (outcome.kind, outcome.reason) == ("not_checkable", f"fewer than 3 steps of {DEAD}")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ((0.3, 0.2), 0.0, True), ((0.3,), 0.0, False), ((0.3, 0.05), 0.0, False),
        ((0.3, 0.051), 0.0, True), ((0.3, 0.2), 1e-4, False), ((0.0, 0.3, 0.2, 0.4), 0.0, True),
        ((0.0, 0.3, 0.2), 0.0, False),
    ],
)  # fmt: skip
def test_a_masked_share_that_vanishes(before: tuple[float, ...], now: float, found: bool) -> None:
    findings = end({SHARE: before}, {SHARE: now}).findings("masked_share_stays", AT_END)
    assert bool(findings) is found


@pytest.mark.parametrize(
    ("clipped", "kl", "epochs", "kind"),
    [
        ((0.0,) * 3, (0.0,) * 3, 2, "failed"), ((0.0,) * 3, (0.0,) * 3, 1, "not_applicable"),
        ((0.0, 0.0, 0.01), (0.0,) * 3, 2, "passed"), ((0.0,) * 3, (1e-9, 0.0, 0.0), 2, "passed"),
        ((0.5, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.0), 4, "failed"),
        ((0.0,) * 2, (0.0,) * 2, 2, "not_checkable"),
    ],
)  # fmt: skip
def test_a_ratio_that_is_always_one(clipped: Any, kl: Any, epochs: int, kind: str) -> None:
    history = {CLIPPED: clipped[:-1], KL: kl[:-1]}
    ran = end(history, {CLIPPED: clipped[-1], KL: kl[-1]}, ppo_epochs=epochs)
    assert ran.outcome("ratio_moves", AT_END).kind == kind
    for finding in ran.findings("ratio_moves", AT_END):
        assert finding.expected == f"a ratio that moves within {epochs} epochs"


@pytest.mark.parametrize(
    ("gaps", "weights", "apart", "kind"),
    [
        ((0.0, 1e-5), (1.0, 2.0), 0.9e-5, "failed"),
        ((0.0, 1e-5), (1.0, 2.0), 1.2e-5, "passed"),
        ((0.0, 1.1e-5), (1.0, 2.0), 0.0, "passed"),
        ((0.3, 0.0, 0.0), (1.0, 1.0, 2.0), 0.0, "failed"),  # two steps before this one
        ((0.0, 0.0), (3.0, 3.0), 0.0, "not_applicable"),
    ],
)
def test_a_reference_that_follows_the_policy(
    gaps: tuple[float, ...], weights: tuple[float, ...], apart: float, kind: str
) -> None:
    def close(b: Boundary) -> Truth:
        tensors = b.batch.batch
        old = tensors["old_log_probs"].double()
        tensors["ref_log_prob"] = old - apart * (old != 0)
        return Truth("")

    def double(b: Boundary) -> Truth:
        b.batch.batch["old_log_probs"] = b.batch.batch["old_log_probs"].to(torch.float64)
        return Truth("")

    ran = audit(Options(step=4), {"old_log_prob": double, "ref_log_prob": close},
                until="ref_log_prob", history={REF_GAP: gaps, WEIGHTS: weights})  # fmt: skip
    assert ran.outcome("reference_stays", "ref_log_prob").kind == kind
