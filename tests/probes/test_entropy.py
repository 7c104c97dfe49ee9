"""Entropies against the sampled tokens and their own history (DPA604, DPA611)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each, own

AT, ENTROPY = "old_log_prob", "actor/entropy"
MANY = Options(prompts=16, response_width=12, truncated=0, one_token=0)
"""Enough sampled tokens for their mean to tell."""
PAST = (2.9,) * 30


def too_wide(b: Boundary) -> Truth:
    """As if the logits had not been divided by the temperature."""
    own(b, "entropys").mul_(1.3)
    return Truth("entropys")


def too_narrow(b: Boundary) -> Truth:
    own(b, "entropys").mul_(0.6)
    return Truth("entropys")


def collapsed(b: Boundary) -> Truth:
    own(b, "entropys").mul_(0.01)
    return Truth(ENTROPY)


CASES = [
    Case("entropy_of_the_sampled", "DPA611", AT, too_wide, "temperature_mismatch",
         "as the sampled tokens have it", severity="warn", options=MANY,
         settings={"vocab_size": 99}),
    Case("entropy_of_the_sampled", "DPA611", AT, too_narrow, "temperature_mismatch",
         "as the sampled tokens have it", severity="warn", options=MANY),
    Case("entropy_stays", "DPA604", AT, collapsed, "policy_collapse", "near its median 2.9",
         severity="warn", history={ENTROPY: PAST}),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_sampled_tokens_bear_the_entropy_out(seed: int, temperature: float) -> None:
    options = Options(
        prompts=24, response_width=12, truncated=0, one_token=0, temperature=temperature, seed=seed
    )
    ran = audit(options, until=AT)
    assert ran.outcome("entropy_of_the_sampled", AT).kind == "passed"


def _outcome(ran: Any, name: str = "entropy_of_the_sampled") -> tuple[str, str]:
    outcome = ran.outcome(name, AT)
    return outcome.kind, outcome.reason


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"top_p": 0.9}, "a filter makes likely tokens likelier"),
        ({"top_k": 5}, "a filter makes likely tokens likelier"),
        ({"temperature": 0.0}, "greedy decoding samples nothing"),
        ({"on_policy": False}, "rollouts may come from older weights"),
    ],
)
def test_what_is_sampled_otherwise_has_another_mean(settings: dict[str, Any], why: str) -> None:
    ran = audit(MANY, {AT: too_wide}, until=AT, settings=settings)
    assert _outcome(ran) == ("not_applicable", why)


def test_few_tokens_do_not_tell() -> None:
    kind, reason = _outcome(audit(change={AT: too_wide}, until=AT))
    assert kind == "not_checkable"
    assert reason.endswith("their mean tells from 200 on")


def test_tokens_of_another_policy_do_not_tell() -> None:
    def off(b: Boundary) -> Truth:
        own(b, "old_log_probs").sub_(0.5)
        return too_wide(b)

    kind, reason = _outcome(audit(MANY, {AT: off}, until=AT))
    assert (kind, reason) == (
        "not_applicable", "old and rollout log-probs are not of one policy",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("past", "kind"),
    [
        (PAST, "failed"),
        (PAST[:19], "not_checkable"),
        ((2.9,) * 20 + (0.05,) * 10, "passed"),  # it fell more than ten steps ago
        (tuple(2.9 * 0.9**step for step in range(40)), "passed"),  # and here steadily
        ((2.9,) * 20 + (float("nan"),) * 3, "failed"),
    ],
)
def test_a_fall_within_ten_steps(past: tuple[float, ...], kind: str) -> None:
    ran = audit(change={AT: collapsed}, until=AT, history={ENTROPY: past})
    assert _outcome(ran, "entropy_stays")[0] == kind


def test_a_negated_entropy_has_the_wrong_sign() -> None:
    def negated(b: Boundary) -> Truth:
        own(b, "entropys").neg_()
        return Truth("entropys")

    [finding] = audit(change={AT: negated}, until=AT).findings("entropy_bounds", AT)
    assert finding.causes[0] == "wrong_sign"


@pytest.mark.parametrize(
    ("factor", "kind"), [(-1.0, "passed"), (-0.05, "passed"), (0.0, "failed"), (0.05, "failed")]
)
def test_a_negative_entropy_is_no_collapse(factor: float, kind: str) -> None:
    """That is a wrong sign, which another check names."""

    def change(b: Boundary) -> Truth:
        own(b, "entropys").mul_(factor)
        return Truth("")

    ran = audit(change={AT: change}, until=AT, history={ENTROPY: PAST})
    assert _outcome(ran, "entropy_stays")[0] == kind


@pytest.mark.parametrize(("now", "kind"), [(0.199, "failed"), (0.201, "passed")])
def test_a_tenth_of_what_it_was_is_a_collapse(now: float, kind: str) -> None:
    def change(b: Boundary) -> Truth:
        own(b, "entropys").fill_(now)
        return Truth("")

    ran = audit(change={AT: change}, until=AT, history={ENTROPY: (2.0,) * 20})
    assert _outcome(ran, "entropy_stays")[0] == kind
    if kind == "failed":
        [finding] = ran.findings("entropy_stays", AT)
        assert finding.evidence == {"steps before": 20, "10 steps ago": 2.0}
