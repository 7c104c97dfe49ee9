"""Merges before they happen (DPA103, DPA114 to DPA116)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.merge import concat_violations, union_violations
from dataproto_audit.contracts.relations import RowViolation

N = {"n": 3}


def batch(rows: int = 2, *, uids: Any = None, meta: Any = None, **fields: Any) -> BatchView:
    made = {"responses": torch.arange(rows * 4).reshape(rows, 4)} | fields
    tensors = {name: value for name, value in made.items() if value is not None}
    arrays = {} if uids is None else {"uid": np.array(uids, object)}
    return BatchView.of({"batch": tensors, "non_tensor_batch": arrays, "meta_info": meta or {}})


def union(left: BatchView, right: BatchView, **factors: int) -> list[RowViolation]:
    return union_violations(left, right, factors=factors or N)


# -- union -----------------------------------------------------------------------------------------


def test_sides_that_fit_may_have_fields_in_common() -> None:
    left = batch(uids=["a", "b"], meta={"n": 3, "temperature": 1.0})
    right = batch(values=torch.ones(2, 4), meta={"n": 3, "eos": 2})
    assert union(left, right) == []
    assert union(left, BatchView.of({})) == []
    assert union(BatchView.of({"meta_info": {"n": 3}}), left) == []


@pytest.mark.parametrize(
    ("left", "right", "story"),
    [
        (batch(2), batch(6), "6 = n·2, n=3: the left side was not repeated"),
        (batch(6), batch(2), "6 = n·2, n=3: the right side was not repeated"),
        (batch(6, uids=list("aaabbb")), batch(18),
         "18 = n·6, n=3: the right side was repeated twice"),
        (batch(18), batch(6, uids=list("aaabbb")),
         "18 = n·6, n=3: the left side was repeated twice"),
    ],
)  # fmt: skip
def test_a_side_that_was_not_or_twice_repeated_is_named(
    left: BatchView, right: BatchView, story: str
) -> None:
    [found] = union(left, right)
    assert (found.code, found.field) == ("DPA114", "batch_size")
    assert found.actual == f"left {left.rows}, right {right.rows}"
    assert found.evidence == {"quotient": 3.0, "explained": story}
    assert found.causes[0] == ("repeated_twice" if "twice" in story else "not_repeated")


def test_a_gather_over_ranks_is_told_apart() -> None:
    [found] = union(batch(4), batch(16), dp=4, n=3)
    assert found.evidence["explained"] == "16 = dp·4: gathered over dp twice, or not cut"
    assert found.causes[0] == "gathered_twice"


def test_other_counts_have_no_story() -> None:
    [found] = union(batch(4), batch(6))
    assert found.evidence == {"quotient": 1.5}
    assert found.causes == ("rows_lost",)
    [found] = union(batch(0), batch(6))
    assert found.evidence == {"quotient": 0.0}


def test_other_values_under_one_name_are_named_cell_by_cell() -> None:
    right = batch()
    right.tensors["responses"] = right.tensors["responses"].clone()
    right.tensors["responses"][1, [0, 3]] += 9
    [found] = union(batch(), right)
    assert (found.code, found.field, found.rows) == ("DPA115", "responses", (1,))
    assert found.columns == {1: (0, 3)}
    assert found.expected == "4 at [1, 0] of the left side"
    assert found.actual == "13 on the right"
    assert found.causes == ("row_permutation", "field_overwritten")


def test_fields_of_more_axes_name_rows_only() -> None:
    one, other = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    other[0, 1, 2] = 1
    [found] = union(batch(position_ids=one), batch(position_ids=other))
    assert (found.rows, found.columns) == ((0,), {})


def test_nan_equals_nan() -> None:
    values = torch.tensor([[0.5, float("nan")]] * 2)
    assert union(batch(values=values), batch(values=values.clone())) == []
    [found] = union(batch(values=values), batch(values=torch.ones(2, 2)))
    assert found.rows == (0, 1)


def test_shapes_and_entries_that_differ() -> None:
    [found] = union(batch(values=torch.ones(2, 4)), batch(values=torch.ones(2, 5)))
    assert (found.expected, found.actual) == ("f32[2,4]", "f32[2,5]")
    [found] = union(batch(uids=["a", "b"]), batch(uids=["a", "c"]))
    assert (found.field, found.rows) == ("uid", (1,))
    assert found.expected == "b in row 1 of the left side"
    [found] = union(batch(uids=["a", "b"]), batch(uids=["a"]))
    assert found.actual == "1 entries"


def test_a_long_entry_is_cut() -> None:
    [found] = union(batch(uids=["a" * 90, "b"]), batch(uids=["c", "b"]))
    assert found.expected == "a" * 37 + "... in row 0 of the left side"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.0 + 1e-9, True), (1.0, 1, True), (float("nan"), float("nan"), True),
        (1.0, 1.1, False), ([1, 2], [1, 2], True), ([1, 2], [2, 1], False),
        (np.arange(3), np.arange(3), True), ({"a": 1}, {"a": 2}, False), ("x", "y", False),
    ],
)  # fmt: skip
def test_meta_entries_are_compared_by_value(one: Any, other: Any, same: bool) -> None:
    found = union(batch(meta={"k": one}), batch(meta={"k": other}))
    assert [(v.code, v.field) for v in found] == ([] if same else [("DPA115", "meta_info.k")])


def test_what_workers_measure_is_their_own() -> None:
    left, right = batch(meta={"timing": 1.0, "metrics": 1}), batch(meta={"timing": 2.0})
    assert union(left, right) == []
    assert concat_violations([left, right]) == []


# -- concat ----------------------------------------------------------------------------------------


def test_parts_alike_are_joined() -> None:
    assert concat_violations([batch(2), batch(3), batch(1)]) == []
    assert concat_violations([batch(2), BatchView.of({})]) == []
    assert concat_violations([]) == []


def test_a_field_that_not_all_parts_have_is_lost() -> None:
    parts = [batch(), batch(values=torch.ones(2, 4)), batch(values=torch.ones(2, 4))]
    [found] = concat_violations(parts)
    assert (found.code, found.field) == ("DPA116", "values")
    assert (found.actual, found.causes) == ("missing in part 0", ("field_forgotten",))


def test_other_widths_cannot_be_joined() -> None:
    [found] = concat_violations([batch(values=torch.ones(2, 4)), batch(values=torch.ones(2, 5))])
    assert (found.code, found.field) == ("DPA103", "values")
    assert found.actual == "f32[2,4], f32[2,5]"
    assert found.causes == ("wrong_width",)


def whole(prompt: int, response: int, **more: Any) -> BatchView:
    """A batch with fields of every axis."""
    ids, full = torch.ones(2, response), torch.ones(2, prompt + response)
    fields = {"prompts": torch.ones(2, prompt), "responses": ids, "input_ids": full,
              "attention_mask": full, "old_log_probs": ids, "values": ids}  # fmt: skip
    return BatchView.of({"batch": fields | more})


def test_all_fields_of_an_axis_are_one_finding() -> None:
    [found] = concat_violations([whole(3, 5), whole(3, 6)])
    assert (found.code, found.field) == ("DPA103", "responses")
    assert found.evidence == {"also": "old_log_probs, values, input_ids, attention_mask"}
    [found] = concat_violations([whole(3, 5), whole(4, 5), whole(3, 5)])
    assert found.field == "prompts"
    assert found.evidence == {"also": "input_ids, attention_mask"}


def test_other_axes_are_findings_of_their_own() -> None:
    both = concat_violations([whole(3, 5), whole(4, 7)])
    assert [found.field for found in both] == ["prompts", "responses"]
    one = concat_violations([whole(3, 5), whole(3, 6, values=torch.ones(2, 9))])
    assert [found.field for found in one] == ["responses", "values"]
    kept = concat_violations([whole(3, 5), whole(3, 5, values=torch.ones(2, 9))])
    assert [(found.field, dict(found.evidence)) for found in kept] == [("values", {})]


def test_jagged_fields_have_no_width() -> None:
    def jagged(*lengths: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)

    assert concat_violations([batch(values=jagged(1, 2)), batch(values=jagged(4, 5))]) == []


def test_meta_entries_of_some_parts_are_lost_and_others_in_conflict() -> None:
    parts = [batch(meta={"n": 3, "t": 1.0}), batch(meta={"n": 3}), batch(meta={"n": 4, "t": 1.0})]
    lost, conflict = concat_violations(parts)
    assert (lost.code, lost.field, lost.actual) == ("DPA116", "meta_info.t", "only in part 0, 2")
    assert lost.causes == ("meta_lost",)
    assert (conflict.code, conflict.field) == ("DPA115", "meta_info.n")
    assert conflict.causes == ("meta_conflict",)


@given(rows=st.integers(0, 5), row=st.integers(0, 4), column=st.integers(0, 3))
def test_a_union_finds_exactly_the_cell_that_differs(rows: int, row: int, column: int) -> None:
    left, right = batch(rows), batch(rows)
    if row < rows:
        right.tensors["responses"][row, column] += 1
    found = union(left, right)
    assert [(v.rows, v.columns) for v in found] == (
        [((row,), {row: (column,)})] if row < rows else []
    )
