"""Which of two sources is wrong, and how, where ids and positions disagree (DPA203, DPA204)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Truth, audit, own

PROMPT = Options().prompt_width


def found(change: Any, **settings: Any) -> dict[str, Any]:
    ran = audit(change={"rollout": change}, until="rollout", settings=settings)
    return {
        f.field: f for name in ("positions", "ids_layout") for f in ran.findings(name, "rollout")
    }


def from_one(b: Boundary) -> Truth:
    b.batch.batch["position_ids"] = b.batch.batch["attention_mask"].cumsum(1)
    return Truth("position_ids")


def start_again(b: Boundary) -> Truth:
    own(b, "position_ids")[:, PROMPT:] -= b.batch.batch["position_ids"][:, PROMPT : PROMPT + 1]
    return Truth("position_ids")


@pytest.mark.parametrize("change", [from_one, start_again])
def test_positions_are_wrong_where_ids_bear_the_attention_out(change: Any) -> None:
    assert set(found(change)) == {"position_ids"}
    assert found(change)["position_ids"].rows == tuple(range(16))


def test_attention_is_wrong_where_ids_contradict_it() -> None:
    def longer(b: Boundary) -> None:
        attention = own(b, "attention_mask")
        first = attention[:, :PROMPT].argmax(1)
        for row in torch.nonzero(first > 0).squeeze(1)[:2].tolist():
            attention[row, first[row] - 1] = (
                1  # a pad id is attended, and positions do not count it
            )

    assert set(found(longer)) == {"attention_mask"}


def test_without_a_pad_id_the_response_mask_alone_bears_out() -> None:
    assert "position_ids" in found(start_again, pad_id=None)


def _shifted(b: Boundary) -> None:
    ids = own(b, "input_ids")
    ids[:, PROMPT + 1 :] = b.batch.batch["responses"][:, :-1]
    ids[:, PROMPT] = 1


def _decoded_again(b: Boundary) -> None:
    own(b, "input_ids")[:5, PROMPT] += 1


@pytest.mark.parametrize(
    ("change", "cause"), [(_shifted, "shift"), (_decoded_again, "stale_buffer")]
)
def test_a_shift_is_one_where_the_ids_are_one_column_further(change: Any, cause: str) -> None:
    assert found(change)["input_ids"].causes[0] == cause


def test_differing_ids_are_counted_by_id_and_by_row() -> None:
    def three(b: Boundary) -> None:
        ids = own(b, "input_ids")
        ids[2, PROMPT : PROMPT + 2] += 1
        ids[4, PROMPT] += 1

    assert found(three)["input_ids"].actual == "3 ids differ in 2 rows"


def _in_two_pieces(b: Boundary, second: int) -> None:
    """Row 12, whose prompt fills all columns, has a hole; positions after it go on from there."""
    own(b, "attention_mask")[12, 3] = 0
    positions = own(b, "position_ids")
    positions[12, 4:] = torch.arange(second, second + positions.shape[1] - 4)
    positions[12, 3] = 0


@pytest.mark.parametrize(("second", "right"), [(3, True), (0, False), (4, False)])
def test_positions_behind_a_hole_go_on_counting(second: int, right: bool) -> None:
    """What stands in the hole itself is free; a count that begins anew behind it is wrong."""
    wrong = found(lambda b: _in_two_pieces(b, second))
    assert bool(wrong) is not right


def test_the_offset_of_a_position_has_a_sign() -> None:
    def early(b: Boundary) -> None:
        own(b, "position_ids")[4, PROMPT + 1 :] -= 3

    finding = found(early)["position_ids"]
    assert finding.evidence["offset"] == -3
    assert finding.columns[4][0] == PROMPT + 1
