"""What a finding about masks counts and lists, and masks of batches with little in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import check
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Truth, at, audit, ends_with_stop, lengths, own, own_array, row_of

PROMPT, RESPONSE = Options().prompt_width, Options().response_width


def found(probe: str, change: Any, **settings: Any) -> Any:
    """The one finding of ``probe`` at the rollout."""
    ran = audit(change={"rollout": change}, until="rollout", settings=settings)
    [finding] = ran.findings(probe, "rollout")
    return finding


def test_at_most_five_of_the_wrong_values_are_listed() -> None:
    def seven(b: Boundary) -> None:
        own(b, "attention_mask")[0, PROMPT : PROMPT + 4] = torch.tensor([3, 2, 5, 4])
        own(b, "attention_mask")[1, PROMPT : PROMPT + 3] = torch.tensor([9, 7, 8])

    finding = found("mask_values", seven)
    assert finding.actual == "[2.0, 3.0, 4.0, 5.0, 7.0]"
    assert finding.columns == {0: tuple(range(PROMPT, PROMPT + 4)),
                               1: tuple(range(PROMPT, PROMPT + 3))}  # fmt: skip


def test_both_masks_may_be_wrong() -> None:
    def both(b: Boundary) -> None:
        for name in ("attention_mask", "response_mask"):
            own(b, name)[0, 0] = 2

    ran = audit(change={"rollout": both}, until="rollout")
    fields = [f.field for f in ran.findings("mask_values", "rollout")]
    assert fields == ["attention_mask", "response_mask"]


@pytest.mark.parametrize("pad_id", [0, None])
def test_padding_on_the_wrong_side_is_cut_where_the_ids_or_the_attention_begin(
    pad_id: int | None,
) -> None:
    """Without a pad id it is the first attended token of the prompt from which on 1 is expected."""

    def hole(b: Boundary) -> Truth:
        own(b, "attention_mask")[12, 2:4] = 0  # of a prompt that fills all columns
        return at("attention_mask", (12, 2), (12, 3))

    finding = found("padding_side", hole, pad_id=pad_id)
    assert finding.actual == "the prompt part is attended in pieces"
    assert finding.columns == {12: (2, 3)}


@pytest.mark.parametrize(("pad_id", "column"), [(0, PROMPT - 3), (None, PROMPT - 2)])
def test_a_tie_is_decided_by_the_ids_or_else_by_the_first_attended(
    pad_id: int | None, column: int
) -> None:
    """Attention ends 1 0 1: either the first is wrong, or the hole is."""

    def apart(b: Boundary) -> None:
        for name in ("prompts", "input_ids"):
            own(b, name)[5, : PROMPT - 1] = 0
        own(b, "attention_mask")[5, :PROMPT] = 0
        own(b, "attention_mask")[5, [PROMPT - 3, PROMPT - 1]] = 1

    assert found("padding_side", apart, pad_id=pad_id).columns == {5: (column,)}


def test_a_batch_without_prompt_columns() -> None:
    attention = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    ids = torch.where(attention != 0, 7, 0)
    fields = {"prompts": torch.zeros(2, 0, dtype=torch.int64), "responses": ids,
              "input_ids": ids.clone(), "attention_mask": attention,
              "response_mask": attention.clone()}  # fmt: skip
    [finding] = [f for f in check({"batch": fields}, "rollout") if f.check == "padding_side"]
    assert finding.columns == {0: (0,)}
    assert finding.actual == "the response part is attended in pieces"


def test_trained_padding_is_counted_by_cell_and_by_row() -> None:
    def two_rows(b: Boundary) -> None:
        mask = own(b, "response_mask")
        mask[row_of(b, 1), 1:] = 1
        mask[row_of(b, 2), 2] = 1

    finding = found("mask_on_padding", two_rows)
    assert finding.actual == f"1 on {RESPONSE} padding slots in 2 rows"
    assert finding.evidence["on padding"] == RESPONSE


def test_untrained_tokens_are_counted() -> None:
    def three(b: Boundary) -> None:
        own(b, "response_mask")[row_of(b, 4), 1:4] = 0

    assert found("mask_complete", three).actual == "0 on 3 sampled tokens"


@pytest.mark.parametrize(("rows", "first"), [(2, "silent_truncation"), (3, "wrong_stop_token")])
def test_from_three_rows_on_one_last_id_is_a_stop_id(rows: int, first: str) -> None:
    def other(b: Boundary) -> None:
        ids = own(b, "responses")
        short = [r for r, n in enumerate(lengths(b)) if n < RESPONSE and ends_with_stop(b, r)]
        for row in short[:rows]:
            ids[row, lengths(b)[row] - 1] = 11
        own(b, "input_ids")[:, PROMPT:] = ids

    finding = found("stop_token", other)
    assert len(finding.rows) == rows
    assert finding.causes[0] == first


def test_reasons_that_are_no_words_never_say_stop() -> None:
    """Arrays and None among the entries: rows that ended on the stop id contradict them."""

    def mixed(b: Boundary) -> None:
        reasons = own_array(b, "finish_reason").astype(object)
        reasons[0], reasons[1] = np.array(["stop", "stop"]), None
        for row in (0, 1):
            reasons[row] = reasons[row] if ends_with_stop(b, row) else "length"
        b.batch.non_tensor_batch["finish_reason"] = reasons

    ran = audit(change={"rollout": mixed}, until="rollout")
    ended = tuple(r for r in (0, 1) if lengths_end(ran, r))
    said = [f.rows for f in ran.findings("stop_token", "rollout")]
    assert said == ([ended] if ended else [])


def lengths_end(ran: Any, row: int) -> bool:
    """Whether a row of the healthy step ends on the stop id; read off a step of its own."""
    seen: list[bool] = []
    audit(change={"rollout": lambda b: seen.append(ends_with_stop(b, row))}, until="rollout")
    return seen[0]
