"""Which of two masks is right, and what tools or padding may have written (DPA205 to DPA210)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing.healthy import Boundary, Options
from dataproto_audit.testing.toy_policy import PAD

from ._corrupt import Truth, at, audit, own, row_of

MASK = "response_mask"
TOOLS = Options(recorded=True, multi_turn=True, response_width=8, micro_rows=4)
PROMPT = Options().prompt_width


def _two_masks(change: Any, *, tool: bool) -> Any:
    """A second mask that differs on sampled tokens, or on tokens that a tool wrote."""

    def run(b: Boundary) -> Truth:
        tensors = b.batch.batch
        sampled = (tensors["rollout_log_probs"] != 0) & (tensors[MASK] != 0)
        attended = tensors["attention_mask"][:, -sampled.shape[1] :] != 0
        cells = attended & ~sampled if tool else sampled
        row = int(cells.sum(1).argmax())
        column = int(cells[row].nonzero()[0])
        change(b, row, column)
        return at(MASK, (row, column))

    return run


def _causes(change: Any, *, tool: bool, extra: Any = None) -> tuple[str, ...]:
    def both(b: Boundary) -> Truth:
        truth = _two_masks(change, tool=tool)(b)
        if extra:
            extra(b)
        return truth

    ran = audit(TOOLS, {"rollout": both}, until="rollout")
    [finding] = ran.findings("masks_agree", "rollout")
    assert finding.columns == ran.truths[0].columns
    assert finding.actual == "1 cells differ in 1 rows"
    return tuple(finding.causes)


def _out(b: Boundary, row: int, column: int) -> None:
    own(b, MASK)[row, column] = 0


def _second_out(b: Boundary, row: int, column: int) -> None:
    own(b, "tool_mask")[row, column] = 0


def _in(b: Boundary, row: int, column: int) -> None:
    own(b, MASK)[row, column] = 1
    own(b, "loss_mask")[row, column] = 1


def _second_in(b: Boundary, row: int, column: int) -> None:
    own(b, "tool_mask")[row, column] = 1


def _without_engine(b: Boundary) -> None:
    del b.batch.batch["rollout_log_probs"]


def _broken_engine(b: Boundary) -> None:
    b.batch.batch["rollout_log_probs"] = b.batch.batch["rollout_log_probs"].long()


@pytest.mark.parametrize(
    ("change", "tool", "extra", "first"),
    [
        (_out, False, None, "mask_hole"),
        (_second_out, False, None, "masks_disagree"),  # the response mask is right
        (_second_in, True, None, "masks_disagree"),  # so it is here
        (_in, True, None, "mask_on_tool"),
        (_out, False, _without_engine, "masks_disagree"),
        (_out, False, _broken_engine, "masks_disagree"),
    ],
)
def test_the_engine_bears_one_of_two_masks_out(
    change: Any, tool: bool, extra: Any, first: str
) -> None:
    def out_of_both(b: Boundary, row: int, column: int) -> None:
        change(b, row, column)
        if change is _out:
            own(b, "loss_mask")[row, column] = 0

    assert _causes(out_of_both, tool=tool, extra=extra)[0] == first


@pytest.mark.parametrize(
    ("multi_turn", "tool_ids", "kind"),
    [
        (False, None, "not_applicable"), (False, (99,), "passed"), (None, (99,), "passed"),
        (None, None, "not_checkable"), (True, None, "not_checkable"), (True, (99,), "passed"),
    ],
)  # fmt: skip
def test_where_tools_may_have_written(multi_turn: Any, tool_ids: Any, kind: str) -> None:
    ran = audit(until="rollout", settings={"multi_turn": multi_turn, "tool_ids": tool_ids})
    assert ran.outcome("tool_tokens_untrained", "rollout").kind == kind


@pytest.mark.parametrize(("pads", "found"), [(1, False), (2, True)])
def test_without_log_probs_of_the_engine_two_pads_in_a_row_are_none_sampled(
    pads: int, found: bool
) -> None:
    def change(b: Boundary) -> Truth:
        row = row_of(b, 4)
        for name, start in (("responses", 0), ("input_ids", PROMPT)):
            own(b, name)[row, start : start + 4] = 7
            own(b, name)[row, start + 4 - pads : start + 4] = PAD
        del b.batch.batch["rollout_log_probs"]
        b.batch.non_tensor_batch.pop("finish_reason", None)
        return at(MASK, *((row, column) for column in range(4 - pads, 4)))

    ran = audit(change={"rollout": change}, until="rollout")
    findings = ran.findings("pad_ids_untrained", "rollout")
    assert bool(findings) is found
    if found:
        assert findings[0].columns == ran.truths[0].columns
        assert findings[0].actual == f"1 on {pads} of them in 1 rows"
