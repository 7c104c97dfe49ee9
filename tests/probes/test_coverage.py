"""What the response mask trains on (DPA205, DPA208 to DPA210, DPA212)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.testing.healthy import Boundary, Options
from dataproto_audit.testing.toy_policy import PAD, STOP

from ._corrupt import (
    Case,
    Truth,
    at,
    audit,
    check_case,
    each,
    ends_with_stop,
    lengths,
    own,
    row_of,
    run_case,
    where,
)

MASK = "response_mask"
TOOLS = Options(recorded=True, multi_turn=True, response_width=8, micro_rows=4)
PROMPT = Options().prompt_width
REJECTS = {"rejection": None}


def hole_in_sampled(b: Boundary) -> Truth:
    row = next(r for r, n in enumerate(lengths(b)) if n >= 3 and ends_with_stop(b, r))
    own(b, MASK)[row, 1] = 0
    return at(MASK, (row, 1))


def tool_tokens_in(b: Boundary) -> Truth:
    before = b.batch.batch[MASK].clone()
    mask, attended = own(b, MASK), b.batch.batch["attention_mask"][:, PROMPT:]
    mask[attended != 0] = 1
    return where(MASK, mask != before)


def second_mask_differs(b: Boundary) -> Truth:
    own(b, "tool_mask")[3, 0] = 0
    return at(MASK, (3, 0))


def more_than_the_loss_mask(b: Boundary) -> Truth:
    own(b, "loss_mask")[3, 0] = 0
    return at(MASK, (3, 0))


def pads_generated(b: Boundary) -> Truth:
    """The engine went on after the stop token, and its pads count as a response."""
    row = row_of(b, 2)
    for name, first in (("attention_mask", PROMPT), (MASK, 0)):
        own(b, name)[row, first + 2 : first + 4] = 1
    positions = own(b, "position_ids")
    positions[row, PROMPT + 2 :] = positions[row, PROMPT + 1] + torch.arange(1, 3)
    own(b, "rollout_log_probs")[row, 2:4] = -0.1
    return at(MASK, (row, 2), (row, 3))


def _mask_of(cells: list[tuple[int, int]]) -> Any:
    def change(b: Boundary) -> Truth:
        mask = own(b, MASK)
        mask[:] = 0
        for row, column in cells:
            mask[row, column] = 1
        return at(MASK, *cells)

    change.__name__ = f"{len(cells)}_left"
    return change


def nothing_left(b: Boundary) -> Truth:
    _mask_of([])(b)
    return Truth(MASK, tuple(range(len(b.batch))))


def one_row_empty(b: Boundary) -> Truth:
    own(b, MASK)[4] = 0
    return at(MASK, *((4, column) for column in range(b.batch.batch[MASK].shape[1])))


def _train(change: Any, cause: str, says: str, **more: Any) -> Case:
    settings = {"rejection": True, **more.pop("settings", {})}
    return Case("something_to_train", "DPA212", "update_actor", change, cause, says,
                settings=settings, **more)  # fmt: skip


CASES = [
    Case("sampled_tokens_trained", "DPA208", "rollout", hole_in_sampled, "mask_hole",
         "0 on 1 tokens with a log-prob of the engine", at="old_log_prob", blames="rollout",
         options=Options(balanced=False), settings=REJECTS),
    Case("tool_tokens_untrained", "DPA209", "rollout", tool_tokens_in, "mask_on_tool",
         "0 on what a tool wrote", options=TOOLS, also=("DPA210", "DPA210", "DPA307", "DPA309")),
    Case("masks_agree", "DPA210", "rollout", second_mask_differs, "masks_disagree",
         "the same as tool_mask", options=TOOLS),
    Case("masks_agree", "DPA210", "rollout", more_than_the_loss_mask, "masks_disagree",
         "the same as loss_mask", options=TOOLS),
    Case("pad_ids_untrained", "DPA205", "rollout", pads_generated, "mask_on_padding",
         "0 on trailing pad ids (0)", also=("DPA206",)),
]  # fmt: skip
TRAINED = [
    _train(nothing_left, "empty_mask", "a masked mean over it is 0/0"),
    _train(_mask_of([(2, 0)]), "empty_mask", "a variance over one token is 0/0",
           blames="advantage", options=Options(estimator="reinforce_plus_plus")),
    _train(_mask_of([(2, 0)]), "empty_mask", "a variance over one token is 0/0",
           blames="advantage", severity="warn", settings={"adv_estimator": None}),
    _train(one_row_empty, "empty_mask", "none in 1 rows", severity="warn",
           settings={"micro_batch_size": 1}),
]  # fmt: skip
CASES += TRAINED


@each([case for case in CASES if case not in TRAINED])
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@each(TRAINED)
def test_a_mask_with_next_to_nothing_in_it(case: Case) -> None:
    """The simulated loss was computed with another mask, so that much else is found, too."""
    ran = run_case(case)
    [finding], [truth] = ran.findings(case.probe, case.stage), ran.truths
    assert (finding.code, finding.severity) == (case.code, case.severity)
    assert finding.stage == (case.blames or case.stage)
    assert (finding.field, finding.rows, finding.columns) == (
        truth.field, truth.rows, truth.columns,
    )  # fmt: skip
    assert case.says in str(finding)
    assert finding.causes == (case.cause,)


def test_one_trained_token_is_too_few_for_a_critic() -> None:
    """Whatever the estimator is called (ROLL issue 475, case B035)."""
    ran = audit(Options(critic=True), {"update_actor": _mask_of([(2, 0)])}, until="update_actor",
                settings={"rejection": True, "adv_estimator": "grpo"})  # fmt: skip
    [finding] = ran.findings("something_to_train", "update_actor")
    assert (finding.severity, finding.stage) == ("fail", "advantage")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax"])
def test_one_trained_token_is_enough_where_nothing_is_whitened(estimator: str) -> None:
    ran = audit(change={"update_actor": _mask_of([(2, 0)])}, until="update_actor",
                settings={"rejection": True, "adv_estimator": estimator})  # fmt: skip
    assert ran.outcome("something_to_train", "update_actor").kind == "passed"


# -- near-misses -----------------------------------------------------------------------------------


def _rejected(threshold: float, seed: int) -> Any:
    """Tokens are rejected whose gap exceeds ``threshold``, as rejection sampling does."""

    def change(b: Boundary) -> Truth:
        random = np.random.default_rng(seed)
        tensors = b.batch.batch
        old = own(b, "old_log_probs")
        old -= torch.from_numpy(random.exponential(0.2, old.shape)).float() * (old != 0)
        gap = (old - tensors["rollout_log_probs"]).abs()
        own(b, MASK)[gap > threshold] = 0
        return Truth(MASK)

    return change


@given(threshold=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
def test_rejection_at_any_threshold_is_a_reason(threshold: float, seed: int) -> None:
    options = Options(prompts=8, seed=seed % 5)
    ran = audit(options, {"old_log_prob": _rejected(threshold, seed)}, until="old_log_prob",
                settings=REJECTS)  # fmt: skip
    outcome = ran.outcome("sampled_tokens_trained", "old_log_prob")
    assert outcome.kind in ("passed", "not_checkable")


def test_rows_cut_at_the_limit_may_be_left_out() -> None:
    """Overlong filtering drops whole rows without a stop token."""

    def overlong(b: Boundary) -> Truth:
        mask, width = own(b, MASK), b.batch.batch[MASK].shape[1]
        for row, length in enumerate(lengths(b)):
            if length == width and not ends_with_stop(b, row):
                mask[row] = 0
        return Truth(MASK)

    options = Options(truncated=6, prompts=8)
    ran = audit(options, {"rollout": overlong}, until="old_log_prob", settings=REJECTS)
    assert ran.outcome("sampled_tokens_trained", "old_log_prob").kind == "passed"


def test_a_whole_row_that_stopped_has_no_reason_to_be_left_out() -> None:
    def dropped(b: Boundary) -> Truth:
        row = next(r for r, n in enumerate(lengths(b)) if n >= 2 and ends_with_stop(b, r))
        mask = own(b, MASK)
        before = mask.clone()
        mask[row] = 0
        return where(MASK, mask != before)

    ran = audit(Options(balanced=False), {"rollout": dropped}, until="old_log_prob",
                settings=REJECTS)  # fmt: skip
    [finding], [truth] = ran.findings("sampled_tokens_trained", "old_log_prob"), ran.truths
    assert (finding.rows, finding.columns) == (truth.rows, truth.columns)


def test_tokens_without_a_log_prob_of_the_engine_were_not_sampled() -> None:
    ran = audit(TOOLS, until="old_log_prob", settings=REJECTS)
    assert ran.outcome("sampled_tokens_trained", "old_log_prob").kind == "passed"


def test_with_three_tokens_left_there_is_no_usual_gap() -> None:
    ran = audit(change={"rollout": _mask_of([(0, 0), (0, 1), (0, 2)])}, until="old_log_prob",
                settings=REJECTS)  # fmt: skip
    outcome = ran.outcome("sampled_tokens_trained", "old_log_prob")
    assert outcome.kind == "not_checkable"
    assert outcome.reason.startswith("response_mask leaves 3 tokens")


def test_where_rejection_is_configured_the_mask_is_cut_on_purpose() -> None:
    ran = audit(until="old_log_prob", settings={"rejection": True})
    outcome = ran.outcome("sampled_tokens_trained", "old_log_prob")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "rejection cuts the mask")


@pytest.mark.parametrize("rejection", [None, True])
def test_the_loss_mask_may_hold_what_rejection_has_cut(rejection: bool | None) -> None:
    """``loss_mask`` is the mask before a correction."""

    def cut(b: Boundary) -> Truth:
        own(b, MASK)[3, 0] = 0
        own(b, "tool_mask")[3, 0] = 0
        return at(MASK, (3, 0))

    ran = audit(TOOLS, {"rollout": cut}, until="rollout", settings={"rejection": rejection})
    assert ran.outcome("masks_agree", "rollout").kind == "passed"
    ran = audit(TOOLS, {"rollout": cut}, until="rollout", settings={"rejection": False})
    [finding] = ran.findings("masks_agree", "rollout")
    assert finding.columns == {3: (0,)}


def test_one_mask_is_no_two() -> None:
    outcome = audit(until="rollout").outcome("masks_agree", "rollout")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "one mask only")


def test_a_second_mask_of_another_width_is_not_compared() -> None:
    def wider(b: Boundary) -> Truth:
        mask = b.batch.batch["tool_mask"]
        b.batch.batch["tool_mask"] = torch.cat([mask, mask], 1)
        del b.batch.batch["loss_mask"]
        return Truth("tool_mask")

    ran = audit(TOOLS, {"rollout": wider}, until="rollout")
    assert ran.outcome("masks_agree", "rollout").kind == "not_applicable"


def _pads_end(b: Boundary, first: int) -> Truth:
    """Row with its ids from ``first`` on turned into pads, all of them attended and trained."""
    row = row_of(b, 4)
    for name, start in (("responses", 0), ("input_ids", PROMPT)):
        own(b, name)[row, start + first : start + 4] = PAD
    return at(MASK, *((row, column) for column in range(first + 1, 4)))


def test_where_the_pad_id_is_a_stop_id_one_of_them_is_the_stop_token() -> None:
    settings = {"stop_ids": (PAD, STOP)}
    ran = audit(change={"rollout": lambda b: _pads_end(b, 3)}, until="rollout", settings=settings)
    assert ran.outcome("pad_ids_untrained", "rollout").kind == "passed"
    ran = audit(change={"rollout": lambda b: _pads_end(b, 1)}, until="rollout", settings=settings)
    [finding] = ran.findings("pad_ids_untrained", "rollout")
    assert finding.columns == ran.truths[0].columns


def test_a_pad_id_that_the_model_sampled_inside_is_its_own_choice() -> None:
    def inside(b: Boundary) -> Truth:
        row = row_of(b, 4)
        for name, start in (("responses", 0), ("input_ids", PROMPT)):
            own(b, name)[row, start + 1] = PAD
        return Truth("")

    ran = audit(change={"rollout": inside}, until="rollout")
    assert ran.outcome("pad_ids_untrained", "rollout").kind == "passed"


@pytest.mark.parametrize(
    "cells", [[(2, 0), (2, 1)], [(2, 0), (5, 0)], [(row, 0) for row in range(16)]]
)
def test_two_tokens_have_a_variance(cells: list[tuple[int, int]]) -> None:
    ran = audit(change={"update_actor": _mask_of(cells)}, until="update_actor",
                settings={"rejection": True})  # fmt: skip
    assert ran.outcome("something_to_train", "update_actor").kind == "passed"


def test_an_empty_row_among_others_is_fine_in_a_larger_micro_batch() -> None:
    ran = audit(change={"update_actor": one_row_empty}, until="update_actor",
                settings={"rejection": True, "micro_batch_size": 2})  # fmt: skip
    assert ran.outcome("something_to_train", "update_actor").kind == "passed"


def test_nothing_trained_is_seen_at_the_rollout() -> None:
    def nothing(b: Boundary) -> Truth:
        own(b, MASK).zero_()
        return Truth(MASK)

    ran = audit(Options(multi_turn=True, response_width=8), {"rollout": nothing}, until="rollout")
    [finding] = ran.findings("something_to_train", "rollout")
    assert finding.causes == ("empty_mask",)
    assert finding.rows == tuple(range(16))


def test_a_rollout_without_any_token_has_nothing_to_train() -> None:
    ran = audit(Options(aborted=16), until="rollout")
    outcome = ran.outcome("something_to_train", "rollout")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no response has a token")


def test_a_single_last_pad_id_that_the_engine_scored_was_sampled() -> None:
    from dataproto_audit import check
    from dataproto_audit.testing.recipes import cook

    one = [{"op": "set", "f": "responses", "at": [3, 4], "v": 0},
           {"op": "set", "f": "input_ids", "at": [3, 8], "v": 0}]  # fmt: skip
    assert "DPA205" not in {f.code for f in check(cook("T", one))}
    unscored = [*one, {"op": "set", "f": "rollout_log_probs", "at": [3, 4], "v": 0.0}]
    [found] = [f for f in check(cook("T", unscored)) if f.code == "DPA205"]
    assert dict(found.columns) == {3: (4,)}


def test_a_single_turn_has_no_tools() -> None:
    outcome = audit(until="rollout").outcome("tool_tokens_untrained", "rollout")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no tools: one turn")
