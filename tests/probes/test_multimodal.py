"""Images among the tokens (DPA213, DPA214)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dataproto_audit
from dataproto_audit.probes.multimodal import _expected
from dataproto_audit.testing.healthy import Boundary, Options
from dataproto_audit.testing.recipes import cook

from ._corrupt import Case, Truth, at, audit, check_case, each, own, where

IMAGES = Options(images=True)
PROMPT = IMAGES.prompt_width


def _pieces(b: Boundary, row: int) -> list[int]:
    """Columns of the two image pieces of a row."""
    ids = b.batch.batch["input_ids"][row]
    return torch.nonzero(ids == IMAGES.image_id).squeeze(1).tolist()


def counted_like_text(b: Boundary) -> Truth:
    """The text axis copied over the others."""
    positions = own(b, "position_ids")
    before = positions.clone()
    positions[:, 1:] = positions[:, :1]
    attended = (b.batch.batch["attention_mask"] != 0)[:, None]
    return where("position_ids", ((positions != before) & attended).any(1))


def one_axis_late(b: Boundary) -> Truth:
    own(b, "position_ids")[3, 2, PROMPT] += 1
    return at("position_ids", (3, PROMPT))


def types_one_late(b: Boundary) -> Truth:
    types = own(b, "mm_token_type_ids")
    before = types[2].clone()
    types[2] = torch.roll(types[2], 1)
    return where("mm_token_type_ids", torch.stack([before * 0] * 2 + [before != types[2]]))


def type_on_text(b: Boundary) -> Truth:
    own(b, "mm_token_type_ids")[1, PROMPT] = 1
    return at("mm_token_type_ids", (1, PROMPT))


CASES = [
    Case("image_positions", "DPA213", "rollout", counted_like_text, "text_positions",
         "time, height and width counted over the image grid", options=IMAGES),
    Case("image_positions", "DPA213", "rollout", one_axis_late, "text_positions",
         "other positions on 1 tokens in 1 rows", options=IMAGES),
    Case("token_types", "DPA214", "rollout", types_one_late, "left_right_padding",
         "2 tokens in 1 rows differ", options=IMAGES),
    Case("token_types", "DPA214", "rollout", type_on_text, "left_right_padding",
         "1 exactly on image ids", options=IMAGES),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_positions_and_types_on_padding_are_free() -> None:
    def garbage(b: Boundary) -> Truth:
        off = b.batch.batch["attention_mask"] == 0
        own(b, "position_ids")[off[:, None].expand(-1, 4, -1)] = 77
        own(b, "mm_token_type_ids")[off] = 1
        return Truth("")

    assert not audit(IMAGES, {"rollout": garbage}, until="rollout").bad()


def test_video_types_are_not_judged() -> None:
    def video(b: Boundary) -> Truth:
        own(b, "mm_token_type_ids")[1, PROMPT] = 2
        return Truth("")

    assert not audit(IMAGES, {"rollout": video}, until="rollout").bad()


def _reason(probe: str, change: Any) -> tuple[str, str]:
    ran = audit(IMAGES, {"rollout": change}, until="rollout")
    assert "DPA901" not in [f.code for f in ran.auditor.findings]
    outcome = ran.outcome(probe, "rollout")
    return outcome.kind, outcome.reason


def test_positions_without_axes_say_nothing_of_images() -> None:
    def flat(b: Boundary) -> Truth:
        b.batch.batch["position_ids"] = b.batch.batch["position_ids"][:, 0].clone()
        return Truth("")

    kind, reason = _reason("image_positions", flat)
    assert kind == "not_checkable"
    assert reason == "position_ids with 2 axes: no positions of images to look at"


def test_three_axes_may_have_lost_the_first() -> None:
    def three(b: Boundary) -> Truth:
        b.batch.batch["position_ids"] = b.batch.batch["position_ids"][:, 1:].clone()
        return Truth("")

    kind, reason = _reason("image_positions", three)
    assert kind == "not_checkable"
    assert reason == "position_ids has no text axis, or the first axis was lost"


@pytest.mark.parametrize("grid", [[[1, 2, 6]], [[1, 2, 4], [1, 2, 4]], np.zeros((0, 3))])
def test_grids_that_do_not_fit_the_ids_are_named(grid: Any) -> None:
    def other(b: Boundary) -> Truth:
        grids = b.batch.non_tensor_batch["image_grid_thw"].copy()
        grids[5] = np.asarray(grid)
        b.batch.non_tensor_batch["image_grid_thw"] = grids
        return Truth("")

    kind, reason = _reason("image_positions", other)
    assert kind == "not_checkable"
    assert reason == "row 5: image ids and image_grid_thw do not fit together"


@pytest.mark.parametrize(
    "grid", [None, "1x2", [1, 2], [[0, 2, 4]], [[-1, 2, 4]], [[1, -2, -4]], [[1, 2], [4]]]
)
def test_a_grid_that_is_none_is_no_fault_of_ours(grid: Any) -> None:
    def other(b: Boundary) -> Truth:
        grids = b.batch.non_tensor_batch["image_grid_thw"].copy()
        grids[5] = grid
        b.batch.non_tensor_batch["image_grid_thw"] = grids
        return Truth("")

    assert _reason("image_positions", other)[0] == "not_checkable"


def test_types_of_another_shape_are_not_compared() -> None:
    def narrow(b: Boundary) -> Truth:
        b.batch.batch["mm_token_type_ids"] = b.batch.batch["mm_token_type_ids"][:, :-1].clone()
        return Truth("")

    assert _reason("token_types", narrow)[0] == "not_checkable"


def test_a_patch_is_a_piece_where_nothing_is_merged() -> None:
    """merge_size is 1 unless told: then two pieces do not fill a grid of eight patches."""
    report = dataproto_audit.check(cook("V", [{"op": "meta", "k": "merge_size", "v": None}]))
    [outcome] = [o for o in report.outcomes if o.check == "image_positions"]
    assert outcome.kind == "not_checkable"


def _by_hand(kinds: list[Any]) -> list[tuple[int, int, int]]:
    """Positions of a row of texts (0) and images (their grid in pieces), counted one by one."""
    out, following = [], 0
    for kind in kinds:
        if kind == 0:
            out.append((following,) * 3)
            following += 1
            continue
        t, h, w = kind
        out += [(following + i, following + j, following + k)
                for i in range(t) for j in range(h) for k in range(w)]  # fmt: skip
        following += max(kind)
    return out


_sizes = st.tuples(*(st.integers(1, 3) for _ in range(3)))


@given(st.lists(st.one_of(st.just(0), _sizes), max_size=6), st.integers(1, 2), st.integers(0, 3))
def test_positions_are_those_counted_by_hand(kinds: list[Any], merge: int, left: int) -> None:
    """Also where two images stand side by side, and behind left padding."""
    pieces = [[0] if kind == 0 else [1] * int(np.prod(kind)) for kind in kinds]
    images = np.array([False] * left + [bool(p) for row in pieces for p in row], bool)
    grids = [(t, h * merge, w * merge) for t, h, w in (k for k in kinds if k != 0)]
    attended = np.arange(len(images)) >= left
    want = _expected(attended, images, np.array(grids).reshape(-1, 3), merge)
    assert [tuple(column) for column in want[:, left:].T.tolist()] == _by_hand(kinds)


def test_a_batch_of_text_has_no_images() -> None:
    ran = audit(Options(), until="rollout")
    for name in ("image_positions", "token_types"):
        outcome = ran.outcome(name, "rollout")
        assert (outcome.kind, outcome.reason) == (
            "not_applicable", "no images: text positions, no image ids",
        )  # fmt: skip


def test_where_image_ids_are_known_their_fields_are_missed() -> None:
    ran = audit(Options(), until="rollout", settings={"image_ids": (31,)})
    for name, field in (("image_positions", "image_grid_thw"),
                        ("token_types", "mm_token_type_ids")):  # fmt: skip
        outcome = ran.outcome(name, "rollout")
        assert (outcome.kind, outcome.reason) == (
            "not_checkable", f"field not in the batch: {field}",
        )  # fmt: skip


@pytest.mark.parametrize("merge", [0, -2, None])
def test_a_merge_size_that_is_none_counts_as_one(merge: Any) -> None:
    report = dataproto_audit.check(cook("V", [{"op": "meta", "k": "merge_size", "v": merge}]))
    assert not [f for f in report.findings if f.code in ("DPA901", "DPA213")]
