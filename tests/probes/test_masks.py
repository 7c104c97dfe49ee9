"""Masks, ids, positions and stop tokens (DPA2xx)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, lengths, own, own_array, row_of

PROMPT, RESPONSE = Options().prompt_width, Options().response_width
MULTI_TURN = Options(multi_turn=True, response_width=8)


def attention_of_two(b: Boundary) -> Truth:
    own(b, "attention_mask")[3, PROMPT + 1] = 2
    return at("attention_mask", (3, PROMPT + 1))


def negative_mask(b: Boundary) -> Truth:
    own(b, "response_mask")[0, 2] = -1
    return at("response_mask", (0, 2))


def hole_in_response(b: Boundary) -> Truth:
    own(b, "attention_mask")[0, PROMPT + 1] = 0
    return at("attention_mask", (0, PROMPT + 1))


def hole_in_prompt(b: Boundary) -> Truth:
    own(b, "attention_mask")[12, 2] = 0
    return at("attention_mask", (12, 2))


def other_id(b: Boundary) -> Truth:
    own(b, "input_ids")[2, PROMPT + 2] += 1
    return at("input_ids", (2, PROMPT + 2))


def other_prompt_id(b: Boundary) -> Truth:
    own(b, "input_ids")[2, PROMPT - 1] += 1
    return at("input_ids", (2, PROMPT - 1))


def swapped_ids(b: Boundary) -> Truth:
    ids = own(b, "input_ids")
    before = ids.clone()
    ids[[4, 5]] = ids[[5, 4]]
    changed = [(row, col) for row, col in torch.nonzero(ids != before).tolist()]
    return at("input_ids", *changed)


def late_position(b: Boundary) -> Truth:
    own(b, "position_ids")[4, PROMPT] += 1
    return at("position_ids", (4, PROMPT))


def positions_from_one(b: Boundary) -> Truth:
    own(b, "position_ids")[5] += 1
    used = b.batch.batch["attention_mask"][5].nonzero().squeeze(1).tolist()
    return at("position_ids", *((5, column) for column in used))


def lost_first_token(b: Boundary) -> Truth:
    """The positions still count it, so it is the attention that is wrong."""
    own(b, "attention_mask")[12, 0] = 0
    return at("attention_mask", (12, 0))


def mask_one_further(b: Boundary) -> Truth:
    row = row_of(b, 1)
    own(b, "response_mask")[row, 1] = 1
    return at("response_mask", (row, 1))


def stop_overwritten(b: Boundary) -> Truth:
    row = row_of(b, 2)
    for name, first in (("responses", 0), ("input_ids", PROMPT)):
        own(b, name)[row, first + 1] = 5
    return at("responses", (row, 1))


def wrong_reason(b: Boundary) -> Truth:
    own_array(b, "finish_reason")[0] = "stop"
    return at("responses", (0, RESPONSE - 1))


def stop_called_length(b: Boundary) -> Truth:
    row = row_of(b, 1)
    own_array(b, "finish_reason")[row] = "length"
    return at("responses", (row, 0))


def id_on_left_padding(b: Boundary) -> Truth:
    for name in ("prompts", "input_ids"):
        own(b, name)[5, 0] = 9
    return at("input_ids", (5, 0))


def id_on_right_padding(b: Boundary) -> Truth:
    row = row_of(b, 1)
    for name, first in (("responses", 0), ("input_ids", PROMPT)):
        own(b, name)[row, first + 3] = 9
    return at("input_ids", (row, PROMPT + 3))


def mask_hole(b: Boundary) -> Truth:
    own(b, "response_mask")[0, 2] = 0
    return at("response_mask", (0, 2))


def mask_one_late(b: Boundary) -> Truth:
    """Every mask is one column late: the first token is left out."""
    mask = own(b, "response_mask")
    mask[:] = torch.roll(mask, 1, dims=1)
    mask[:, 0] = 0
    return at("response_mask", *((row, 0) for row in range(len(mask))))


def _at_rollout(probe: str, code: str, change: Any, cause: str, says: str, *also: str) -> Case:
    return Case(probe, code, "rollout", change, cause, says, also=also)


CASES = [
    _at_rollout("mask_values", "DPA201", attention_of_two, "wrong_dtype", "actual    [2.0]"),
    _at_rollout("mask_values", "DPA201", negative_mask, "wrong_dtype", "actual    [-1.0]"),
    _at_rollout("padding_side", "DPA202", hole_in_response, "mask_hole",
                "the response part is attended in pieces", "DPA204", "DPA205", "DPA207"),
    _at_rollout("padding_side", "DPA202", hole_in_prompt, "left_right_padding",
                "the prompt part is attended in pieces", "DPA204", "DPA207"),
    _at_rollout("ids_layout", "DPA203", other_id, "stale_buffer", "1 ids differ in 1 rows"),
    _at_rollout("ids_layout", "DPA203", other_prompt_id, "stale_buffer", "row 2: 5"),
    _at_rollout("ids_layout", "DPA203", swapped_ids, "row_permutation", "ids differ in 2 rows"),
    _at_rollout("positions", "DPA204", late_position, "wrong_position_ids",
                "position 2 at row 4, column 6"),
    _at_rollout("positions", "DPA204", positions_from_one, "wrong_position_ids",
                "evidence  offset: 1"),
    _at_rollout("positions", "DPA204", lost_first_token, "wrong_position_ids",
                "columns   row 12: 0", "DPA207"),
    _at_rollout("mask_on_padding", "DPA205", mask_one_further, "mask_on_padding",
                "1 on 1 padding slots in 1 rows"),
    _at_rollout("stop_token", "DPA206", stop_overwritten, "silent_truncation",
                "another id before the limit"),
    _at_rollout("stop_token", "DPA206", wrong_reason, "wrong_stop_token", "they disagree"),
    _at_rollout("stop_token", "DPA206", stop_called_length, "wrong_stop_token", "stop ids: 2"),
    _at_rollout("pad_ids", "DPA207", id_on_left_padding, "stale_buffer", "pad id 0 off"),
    _at_rollout("pad_ids", "DPA207", id_on_right_padding, "stale_buffer", "1 other ids"),
    _at_rollout("mask_complete", "DPA208", mask_hole, "mask_hole", "0 on 1 sampled tokens"),
    _at_rollout("mask_complete", "DPA208", mask_one_late, "shift", "0 on 16 sampled", "DPA205"),
    Case("mask_values", "DPA201", "validation", lambda b: _validation_mask(b), "wrong_dtype",
         "after validation"),
]  # fmt: skip


def _validation_mask(b: Boundary) -> Truth:
    own(b, "response_mask")[0, 0] = 3
    return at("response_mask", (0, 0))


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_a_prompt_padded_on_the_right_is_named_cell_by_cell() -> None:
    def pushed_left(b: Boundary) -> Truth:
        for name in ("prompts", "input_ids", "attention_mask"):
            part = own(b, name)[4]
            part[:PROMPT] = torch.roll(part[:PROMPT], -3)
        return Truth("attention_mask")

    ran = audit(change={"rollout": pushed_left}, until="rollout")
    [finding] = ran.findings("padding_side", "rollout")
    assert finding.rows == (4,)
    # Row 4 holds two prompt ids, now in columns 1 and 2: without them it would be as declared.
    assert finding.columns == {4: (1, 2)}


def test_bool_and_float_masks_are_fine_where_they_hold_0_and_1() -> None:
    def as_bool(b: Boundary) -> Truth:
        b.batch.batch["response_mask"] = b.batch.batch["response_mask"].bool()
        return Truth("response_mask")

    ran = audit(change={"rollout": as_bool}, until="rollout")
    assert ran.outcome("mask_values", "rollout").kind == "passed"
    assert not ran.bad()


def test_positions_on_padding_are_free() -> None:
    def garbage(b: Boundary) -> Truth:
        positions = own(b, "position_ids")
        positions[b.batch.batch["attention_mask"] == 0] = 77
        return Truth("position_ids")

    assert not audit(change={"rollout": garbage}, until="rollout").bad()


def test_positions_on_several_axes_are_not_judged() -> None:
    def rotary(b: Boundary) -> Truth:
        positions = b.batch.batch["position_ids"]
        b.batch.batch["position_ids"] = positions[:, None].repeat(1, 3, 1)
        return Truth("position_ids")

    outcome = audit(change={"rollout": rotary}, until="rollout").outcome("positions", "rollout")
    assert outcome.kind == "not_applicable"
    assert outcome.reason == "positions on several axes follow the image grid"


@pytest.mark.parametrize(
    ("probe", "options", "settings", "reason"),
    [
        ("stop_token", MULTI_TURN, {}, "turns may end in tool text"),
        ("mask_complete", MULTI_TURN, {}, "tool turns or rejection leave tokens out"),
        ("mask_complete", Options(), {"rejection": True},
         "tool turns or rejection leave tokens out"),
    ],
)  # fmt: skip
def test_what_does_not_apply_says_why(
    probe: str, options: Options, settings: dict[str, Any], reason: str
) -> None:
    outcome = audit(options, until="rollout", settings=settings).outcome(probe, "rollout")
    assert (outcome.kind, outcome.reason) == ("not_applicable", reason)


def test_the_reported_limit_counts_before_the_configured_one() -> None:
    def five_at_most(b: Boundary) -> Truth:
        b.batch.meta_info["sampling"]["max_tokens"] = 5
        return Truth("responses")

    ran = audit(change={"rollout": five_at_most}, until="rollout")
    [finding] = ran.findings("stop_token", "rollout")
    assert 0 in finding.rows
    assert finding.columns[0] == (RESPONSE - 1,)


def test_a_second_stop_id_ends_a_response_too() -> None:
    def other_stop(b: Boundary) -> Truth:
        row = row_of(b, 2)
        for name, first in (("responses", 0), ("input_ids", PROMPT)):
            own(b, name)[row, first + 1] = 31
        return Truth("responses")

    ran = audit(change={"rollout": other_stop}, until="rollout", settings={"stop_ids": (2, 31)})
    assert not [f for f in ran.findings("stop_token", "rollout") if "limit" in f.actual]


def test_a_later_stage_that_changes_the_mask_is_checked_again() -> None:
    def filled(b: Boundary) -> Truth:
        row = next(row for row, length in enumerate(lengths(b)) if length < RESPONSE)
        own(b, "response_mask")[row, RESPONSE - 1] = 1
        return at("response_mask", (row, RESPONSE - 1))

    ran = audit(change={"advantage": filled}, until="advantage", settings={"rejection": True})
    [finding], [truth] = ran.findings("mask_on_padding", "advantage"), ran.truths
    assert (finding.rows, finding.columns) == (truth.rows, truth.columns)


def test_what_breaks_its_declaration_is_not_read() -> None:
    def floats(b: Boundary) -> Truth:
        b.batch.batch["attention_mask"] = b.batch.batch["attention_mask"].float() * 2
        return Truth("attention_mask")

    outcome = audit(change={"rollout": floats}, until="rollout").outcome("positions", "rollout")
    assert outcome.kind == "not_checkable"
    assert outcome.reason.startswith("field breaks its declaration: attention_mask is ")


FIELDS = ("input_ids", "prompts", "responses", "attention_mask", "position_ids", "response_mask")


@given(
    name=st.sampled_from(FIELDS),
    seed=st.integers(0, 3),
    row=st.integers(0, 15),
    place=st.integers(0, PROMPT + RESPONSE - 1),
    value=st.integers(-1, 40),
)
def test_any_single_cell_is_found_in_its_row_or_harmless(
    name: str, seed: int, row: int, place: int, value: int
) -> None:
    seen: dict[str, Any] = {}

    def one_cell(b: Boundary) -> Truth:
        tensors = b.batch.batch
        column = place % tensors[name].shape[1]
        seen["column"], seen["old"] = column, int(tensors[name][row, column])
        attention = tensors["attention_mask"][row].tolist()
        seen["attended"] = attention[column] if len(attention) > column else None
        own(b, name)[row, column] = value
        return at(name, (row, column))

    ran = audit(Options(seed=seed), {"rollout": one_cell}, until="rollout")
    assume(seen["old"] != value)
    findings = ran.bad()
    if name == "position_ids" and not seen["attended"]:
        assert not findings  # padding slots are free
        return
    assert findings
    wrong = [f for f in findings if f.rows != (row,)]
    assert not wrong, "\n".join(map(str, wrong))
    place_of = {"prompts": seen["column"], "responses": PROMPT + seen["column"]}
    expected = {
        (name, seen["column"]), ("input_ids", place_of.get(name, -1)),
    }  # fmt: skip
    named = {(f.field, c) for f in findings for cols in f.columns.values() for c in cols}
    assert named & expected, "\n".join(map(str, findings))


def _moved(by: int) -> Any:
    def change(b: Boundary) -> Truth:
        mask = own(b, "response_mask")
        mask[:] = torch.roll(mask, by, 1)
        mask[:, 0 if by > 0 else -1] = 0
        return Truth("response_mask")

    return change


def _from_the_prompt(b: Boundary) -> Truth:
    own(b, "response_mask")[:] = b.batch.batch["attention_mask"][:, :RESPONSE]
    return Truth("response_mask")


@pytest.mark.parametrize(
    ("change", "cause"), [(_moved(1), "shift"), (_from_the_prompt, "mask_from_prompt")]
)
def test_what_the_mask_was_built_from(change: Any, cause: str) -> None:
    ran = audit(change={"rollout": change}, until="rollout")
    for name in ("mask_on_padding", "mask_complete"):
        [finding] = ran.findings(name, "rollout")
        assert finding.causes[0] == cause


@pytest.mark.parametrize("same", [True, False])
def test_rows_that_all_end_on_one_unknown_id_were_stopped_by_it(same: bool) -> None:
    def other_stop(b: Boundary) -> Truth:
        ids = own(b, "responses")
        ends = [(row, n - 1) for row, n in enumerate(lengths(b)) if n < RESPONSE][:4]
        for place, (row, column) in enumerate(ends):
            ids[row, column] = 11 if same else 11 + place
        own(b, "input_ids")[:, PROMPT:] = ids
        return at("responses", *ends)

    [finding] = audit(change={"rollout": other_stop}, until="rollout").findings(
        "stop_token", "rollout"
    )
    assert finding.causes[0] == ("wrong_stop_token" if same else "silent_truncation")


@pytest.mark.parametrize(("scored", "cause"), [(True, "mask_hole"), (False, "left_right_padding")])
def test_a_hole_with_a_log_prob_under_it_is_a_hole(scored: bool, cause: str) -> None:
    def change(b: Boundary) -> Truth:
        if not scored:
            own(b, "rollout_log_probs")[0, 1] = 0.0
        return hole_in_response(b)

    [finding] = audit(change={"rollout": change}, until="rollout").findings(
        "padding_side", "rollout"
    )
    assert finding.causes[0] == cause
