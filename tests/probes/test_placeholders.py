"""Exact zeros that stand for 'not computed' (DPA309, DPA414)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, lengths, own, where

ROLLOUT, OLD, VALUES = "rollout_log_probs", "old_log_probs", "values"
PLAIN, CRITIC = Options(balanced=False), Options(critic=True)
AT = "old_log_prob"
WIDTH = 8
TOOLS = Options(multi_turn=True, response_width=WIDTH, balanced=False)


def one_zero(b: Boundary) -> Truth:
    own(b, ROLLOUT)[0, 1] = 0.0
    return at(ROLLOUT, (0, 1))


def one_late(b: Boundary) -> Truth:
    """Every log-prob belongs to the token before: the last has none."""
    tensors, values = b.batch.batch, own(b, ROLLOUT)
    values[:] = torch.roll(values, -1, 1)
    for row, length in enumerate(lengths(b)):
        values[row, length - 1 :] = 0.0
    ends = [(row, length - 1) for row, length in enumerate(lengths(b))]
    assert (tensors[ROLLOUT] == 0).any()
    return at(ROLLOUT, *ends)


def some_values(b: Boundary) -> Truth:
    own(b, VALUES)[[1, 4], 0] = 0.0
    return at(VALUES, (1, 0), (4, 0))


def values_times_other_mask(b: Boundary) -> Truth:
    """Multiplied by the mask in another order of the rows."""
    values, mask = own(b, VALUES), b.batch.batch["response_mask"]
    values *= mask.flip(0)
    return where(VALUES, (values == 0) & (mask != 0))


def tools_trained(b: Boundary) -> Truth:
    mask, attended = own(b, "response_mask"), b.batch.batch["attention_mask"][:, -WIDTH:]
    added = (attended != 0) & (mask == 0)
    mask[added] = 1
    return where("response_mask", added)


def stop_tokens_zero(b: Boundary) -> Truth:
    """Most rows end on a token whose log-prob was not computed, and some do not."""
    rows = [row for row, length in enumerate(lengths(b)) if length < 4][:4]
    ends = [(row, lengths(b)[row] - 1) for row in rows]
    values = own(b, ROLLOUT)
    for row, column in ends:
        values[row, column] = 0.0
    return at(ROLLOUT, *ends)


def joined(b: Boundary) -> Truth:
    """Values of several turns follow each other as if no tool had written anything."""
    old, mask = b.batch.batch[ROLLOUT], b.batch.batch["response_mask"] != 0
    values = own(b, ROLLOUT)
    values[:] = 0.0
    for row in range(len(values)):
        kept = old[row][mask[row]]
        values[row, : len(kept)] = kept
    return where(ROLLOUT, values != old)


CASES = [
    Case("zeros_are_certain", "DPA309", "rollout", tools_trained, "mask_on_tool",
         "tokens within 0.01 nats of 0: 0", options=TOOLS, also=("DPA307",)),
    Case("zeros_are_certain", "DPA309", "rollout", stop_tokens_zero, "placeholder_log_prob",
         "exactly 0.0 on 4 of", options=PLAIN, also=("DPA307",)),
    Case("log_probs_in_place", "DPA304", "rollout", joined, "shift",
         "rows filled from column 0 on", options=TOOLS, also=("DPA309",)),
    Case("no_placeholder_log_probs", "DPA309", "rollout", one_zero, "placeholder_log_prob",
         "exactly 0.0 on 1 tokens that old scores down to", at=AT, blames="rollout",
         options=PLAIN, also=("DPA303",)),
    Case("no_placeholder_log_probs", "DPA309", "rollout", one_late, "shift",
         "the engine's log-prob of every trained token", at=AT, blames="rollout", options=PLAIN,
         also=("DPA304",)),
    Case("no_placeholder_values", "DPA414", "values", some_values, "row_permutation",
         "exactly 0.0 on 2 of", options=CRITIC),
    Case("no_placeholder_values", "DPA414", "values", values_times_other_mask, "row_permutation",
         "a value on every trained token", options=CRITIC),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@given(row=st.integers(0, 15), column=st.integers(0, 3), old=st.floats(-0.029, 0.0))
def test_a_token_that_both_are_certain_of_is_fine(row: int, column: int, old: float) -> None:
    def certain(b: Boundary) -> Truth:
        own(b, OLD)[row, column] = old
        own(b, ROLLOUT)[row, column] = 0.0
        return Truth("")

    ran = audit(PLAIN, {AT: certain}, until=AT)
    assert ran.outcome("no_placeholder_log_probs", AT).kind == "passed"


def test_tool_tokens_have_no_log_prob_of_the_engine() -> None:
    ran = audit(Options(multi_turn=True, response_width=8), until=AT)
    assert ran.outcome("no_placeholder_log_probs", AT).kind == "passed"


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": 1}])
def test_a_filter_may_leave_one_token_only(settings: Any) -> None:
    outcome = audit(until=AT, settings=settings).outcome("no_placeholder_log_probs", AT)
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "a filter may leave one token only",
    )  # fmt: skip


@pytest.mark.parametrize("share", ["all", "most"])
def test_a_critic_that_says_0_mostly_is_a_fresh_one(share: str) -> None:
    def fresh(b: Boundary) -> Truth:
        values = own(b, VALUES)
        values[:, 0 if share == "all" else 1 :] = 0.0
        if share == "most":
            values[5:, :] = 0.0
        return Truth("")

    ran = audit(CRITIC, {"values": fresh}, until="values")
    assert ran.outcome("no_placeholder_values", "values").kind == "passed"


def test_zeros_off_the_mask_are_what_a_mask_leaves() -> None:
    def masked(b: Boundary) -> Truth:
        own(b, VALUES)[b.batch.batch["response_mask"] == 0] = 0.0
        return Truth("")

    assert not audit(CRITIC, {"values": masked}, until="values").bad()


@pytest.mark.parametrize(
    ("settings", "kind", "reason"),
    [
        ({"top_p": 0.9}, "not_applicable", "a filter may leave one token only"),
        ({"temperature": 0.0}, "not_applicable", "greedy"),
        ({"top_p": None}, "not_checkable", "setting unknown: top_p"),
        ({}, "failed", ""),
    ],
)
def test_a_filter_may_leave_one_token(settings: dict[str, Any], kind: str, reason: str) -> None:
    ran = audit(PLAIN, {"rollout": stop_tokens_zero}, until="rollout", settings=settings)
    outcome = ran.outcome("zeros_are_certain", "rollout")
    assert (outcome.kind, outcome.reason) == (kind, reason)


@pytest.mark.parametrize(("nearly", "kind"), [(0, "failed"), (1, "not_applicable")])
def test_zeros_among_nearly_certain_tokens_are_certain(nearly: int, kind: str) -> None:
    def sure(b: Boundary) -> Truth:
        truth = stop_tokens_zero(b)
        own(b, ROLLOUT)[0, :nearly] = -2e-3
        return truth

    ran = audit(PLAIN, {"rollout": sure}, until="rollout")
    assert ran.outcome("zeros_are_certain", "rollout").kind == kind


@pytest.mark.parametrize("zeros", [1, 2])
def test_one_or_two_zeros_are_left_to_other_checks(zeros: int) -> None:
    def few(b: Boundary) -> Truth:
        own(b, ROLLOUT)[:zeros, 0] = 0.0
        return Truth("")

    ran = audit(PLAIN, {"rollout": few}, until="rollout")
    assert ran.outcome("zeros_are_certain", "rollout").kind == "not_applicable"


def test_log_probs_on_tool_tokens_alone_are_in_place() -> None:
    """Engines that score what a tool wrote leave no trained token empty."""

    def scored(b: Boundary) -> Truth:
        values, attended = own(b, ROLLOUT), b.batch.batch["attention_mask"][:, -WIDTH:]
        values[(values == 0) & (attended != 0)] = -3.0
        return Truth("")

    ran = audit(TOOLS, {"rollout": scored}, until="rollout")
    assert ran.outcome("log_probs_in_place", "rollout").kind == "passed"
    assert not ran.bad()


@pytest.mark.parametrize(("zeros", "kind"), [(2, "not_applicable"), (3, "failed")])
def test_from_three_zeros_on_they_tell(zeros: int, kind: str) -> None:
    def some_zeros(b: Boundary) -> Truth:
        values = own(b, "rollout_log_probs")
        values[:] = torch.where(values != 0, values.clamp(max=-0.5), 0.0)
        cells = (b.batch.batch["response_mask"] != 0).nonzero()[::5][:zeros]
        values[cells[:, 0], cells[:, 1]] = 0.0
        return Truth("")

    ran = audit(change={"rollout": some_zeros}, until="rollout")
    assert ran.outcome("zeros_are_certain", "rollout").kind == kind
    if kind == "failed":
        [finding] = ran.findings("zeros_are_certain", "rollout")
        assert finding.actual.startswith("exactly 0.0 on 3 of ")
        assert finding.evidence == {"tokens within 0.01 nats of 0": 0}


@pytest.mark.parametrize(("old", "found"), [(-0.029, False), (-0.031, True)])
def test_what_old_is_nearly_certain_of_may_be_zero(old: float, found: bool) -> None:
    def one(b: Boundary) -> Truth:
        own(b, "rollout_log_probs")[0, 0] = 0.0
        own(b, "old_log_probs")[0, 0] = old
        return Truth("")

    ran = audit(change={"old_log_prob": one}, until="old_log_prob")
    findings = ran.findings("no_placeholder_log_probs", "old_log_prob")
    assert bool(findings) is found
    if found:
        assert findings[0].actual == "exactly 0.0 on 1 tokens that old scores down to -0.031"


@pytest.mark.parametrize(("share", "found"), [(0.4, True), (0.6, False)])
def test_values_that_mostly_are_zero_are_a_fresh_critic(share: float, found: bool) -> None:
    def some(b: Boundary) -> Truth:
        values, cells = own(b, "values"), (b.batch.batch["response_mask"] != 0).nonzero()
        values[:] = torch.where(values == 0, 0.3, values)
        zero = cells[: int(share * len(cells))]
        values[zero[:, 0], zero[:, 1]] = 0.0
        return Truth("")

    ran = audit(Options(critic=True), {"values": some}, until="values")
    findings = ran.findings("no_placeholder_values", "values")
    assert bool(findings) is found
    if found:
        assert findings[0].actual.startswith(f"exactly 0.0 on {findings[0].cells} of ")


@pytest.mark.parametrize(("share", "kind"), [(0.45, "failed"), (0.55, "not_applicable")])
def test_a_batch_that_is_mostly_zeros_is_left_to_others(share: float, kind: str) -> None:
    def many(b: Boundary) -> Truth:
        values, cells = own(b, "rollout_log_probs"), (b.batch.batch["response_mask"] != 0).nonzero()
        values[:] = torch.where(values != 0, values.clamp(max=-0.5), 0.0)
        zero = cells[: int(share * len(cells))]
        values[zero[:, 0], zero[:, 1]] = 0.0
        return Truth("")

    ran = audit(change={"rollout": many}, until="rollout")
    assert ran.outcome("zeros_are_certain", "rollout").kind == kind


@pytest.mark.parametrize(("nearly", "kind"), [(1, "not_applicable"), (0, "failed")])
@pytest.mark.parametrize(("value", "counts"), [(-0.0099, True), (-0.0101, False)])
def test_one_nearly_certain_token_makes_four_zeros_credible(
    nearly: int, kind: str, value: float, counts: bool
) -> None:
    def four(b: Boundary) -> Truth:
        values, cells = own(b, "rollout_log_probs"), (b.batch.batch["response_mask"] != 0).nonzero()
        values[:] = torch.where(values != 0, values.clamp(max=-0.5), 0.0)
        zero = cells[::4][:4]
        values[zero[:, 0], zero[:, 1]] = 0.0
        for row, column in cells[1:][:nearly].tolist():
            values[row, column] = value
        return Truth("")

    ran = audit(change={"rollout": four}, until="rollout")
    assert ran.outcome("zeros_are_certain", "rollout").kind == (kind if counts else "failed")


def test_runs_of_zeros_in_a_single_turn_are_no_tool_s() -> None:
    """No tool wrote them: they stand for what was not computed."""

    def runs(b: Boundary) -> Truth:
        values, mask = own(b, "rollout_log_probs"), b.batch.batch["response_mask"] != 0
        values[:] = torch.where(values != 0, values.clamp(max=-0.5), 0.0)
        for row in (mask.sum(1) == 4).nonzero().flatten()[:3].tolist():
            values[row, 1:3] = 0.0
        return Truth("")

    causes = {}
    for turns in (False, None):
        ran = audit(change={"rollout": runs}, until="rollout", settings={"multi_turn": turns})
        [finding] = ran.findings("zeros_are_certain", "rollout")
        causes[turns] = (finding.field, finding.causes)
    assert causes[False] == ("rollout_log_probs", ("placeholder_log_prob", "mask_on_tool"))
    assert causes[None] == ("response_mask", ("mask_on_tool", "placeholder_log_prob"))
