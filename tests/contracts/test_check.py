"""Declared kinds and sizes, of padded and of jagged batches."""

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.check import (
    check_stage,
    describe,
    missing_fields,
    unchecked,
    undeclared,
    wrong_fields,
)
from dataproto_audit.contracts.dims import (
    EXPAND_N,
    PERMUTE,
    SAME,
    Rows,
    expected_rows,
    factor_story,
)
from dataproto_audit.contracts.fields import FIELDS, declare
from dataproto_audit.contracts.stages import STAGES, Stage

B, P, R = 4, 3, 5


def batch(**other):
    tensors = {
        "prompts": torch.ones(B, P, dtype=torch.int64),
        "responses": torch.ones(B, R, dtype=torch.int64),
        "input_ids": torch.ones(B, P + R, dtype=torch.int64),
        "attention_mask": torch.ones(B, P + R, dtype=torch.int64),
        "position_ids": torch.ones(B, P + R, dtype=torch.int64),
        "response_mask": torch.ones(B, R, dtype=torch.int64),
        "old_log_probs": torch.zeros(B, R),
    }
    tensors |= other
    return BatchView.of({"batch": {n: t for n, t in tensors.items() if t is not None}})


def jagged(lengths, width=None, dtype=torch.int64):
    rows = [torch.ones(n, *(() if width is None else (width,)), dtype=dtype) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_a_batch_as_declared():
    assert wrong_fields(batch()) == []
    assert wrong_fields(batch()) == []  # by its signature this time


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_masks_may_be_any_integer_or_bool(kind):
    assert wrong_fields(batch(response_mask=torch.ones(B, R, dtype=kind))) == []


@pytest.mark.parametrize(
    "kind", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_log_probs_may_be_any_float(kind):
    assert wrong_fields(batch(old_log_probs=torch.zeros(B, R).to(kind))) == []


def test_positions_may_have_several_axes():
    assert wrong_fields(batch(position_ids=torch.ones(B, 4, P + R, dtype=torch.int64))) == []
    [found] = wrong_fields(batch(position_ids=torch.ones(B, 4, P, dtype=torch.int64)))
    assert (found.code, found.field) == ("DPA103", "position_ids")


@pytest.mark.parametrize(
    ("name", "value", "code", "expected", "actual"),
    [
        ("response_mask", torch.ones(B, R), "DPA102", "integer or bool[rows=4,response=5]",
         "f32[4,5]"),
        ("responses", torch.ones(B, R + 1, dtype=torch.int64), "DPA103",
         "integer[rows=4,response=5]", "i64[4,6]"),
        ("prompts", torch.ones(B, P + 2, dtype=torch.int64), "DPA103",
         "integer[rows=4,prompt=3]", "i64[4,5]"),
        ("old_log_probs", torch.zeros(B), "DPA103", "float[rows=4,response=5]", "f32[4]"),
        ("old_log_probs", torch.zeros(()), "DPA103", "float[rows=4,response=5]", "f32[]"),
        ("old_log_probs", torch.zeros(B, R, 1), "DPA103", "float[rows=4,response=5]",
         "f32[4,5,1]"),
    ],
)  # fmt: skip
def test_one_wrong_field_is_the_one_that_is_named(name, value, code, expected, actual):
    [found] = wrong_fields(batch(**{name: value}))
    assert (found.code, found.field) == (code, name)
    assert (found.expected, found.actual) == (expected, actual)


def test_known_factors_explain_a_size():
    [found] = wrong_fields(batch(old_log_probs=torch.zeros(2 * B, R)), factors={"dp": 2})
    assert "dp=2" in str(found.evidence["factor"])
    assert found.causes == ("not_repeated",)
    copies = torch.rand(B, R)
    for many in (copies.repeat(2, 1), copies.repeat_interleave(2, 0)):
        [found] = wrong_fields(batch(old_log_probs=many), factors={"dp": 2})
        assert found.causes == ("gathered_twice", "repeated_twice")
    [found] = wrong_fields(batch(old_log_probs=torch.rand(2 * B, R)), factors={"dp": 2})
    assert found.causes == ("not_repeated",)
    [found] = wrong_fields(batch(old_log_probs=torch.zeros(B - 1, R)), factors={"dp": 2})
    assert found.causes == ("rows_lost",)


def test_arrays_have_one_entry_a_row_and_are_no_tensors():
    view = batch()
    view.arrays["uid"] = np.array(["a"] * (B - 1), object)
    view.arrays["values"] = np.array([0.0] * B, object)
    assert [(v.code, v.field) for v in wrong_fields(view)] == [
        ("DPA109", "uid"), ("DPA102", "values"),
    ]  # fmt: skip


def test_a_jagged_batch_compares_lengths():
    own, other = [2, 3, 1, 3], [5, 1, 2, 4]
    both = [a + b for a, b in zip(own, other, strict=True)]
    fields = {
        "prompts": jagged(own),
        "responses": jagged(other),
        "input_ids": jagged(both),
        "position_ids": jagged(both),
        "response_mask": jagged(other),
        "attention_mask": None,
        "old_log_probs": jagged(other, dtype=torch.float32),
    }
    assert wrong_fields(batch(**fields)) == []
    assert missing_fields(STAGES["old_log_prob"], batch(**fields), when="before") == []
    short = [5, 1, 3, 4]
    [found] = wrong_fields(batch(**fields | {"old_log_probs": jagged(short, dtype=torch.float32)}))
    assert (found.code, found.field) == ("DPA103", "old_log_probs")
    assert "rows [2]" in found.actual
    few = jagged(own[:3], dtype=torch.float32)
    [found] = wrong_fields(batch(**fields | {"old_log_probs": few}))
    assert found.actual == "3 rows"


def test_a_jagged_field_among_padded_ones():
    """Its rows are as long as the padded ones are attended."""
    attention = torch.ones(4, 8, dtype=torch.int64)
    attention[2, 5:] = 0  # the response of row 2 has two of its five tokens
    [found] = wrong_fields(
        batch(attention_mask=attention, old_log_probs=jagged([5, 5, 5, 5], dtype=torch.float32))
    )
    assert (found.field, found.expected) == ("old_log_probs", "row lengths of response")
    assert "rows [2]" in found.actual
    own = jagged([5, 5, 2, 5], dtype=torch.float32)
    assert wrong_fields(batch(attention_mask=attention, old_log_probs=own)) == []


def test_an_axis_that_nobody_tells_is_not_checkable():
    view = BatchView.of({"batch": {"attention_mask": torch.ones(2, 7, dtype=torch.int64)}})
    assert wrong_fields(view) == []
    assert unchecked(view) == {"attention_mask": "prompt"}
    assert unchecked(batch()) == {}


def test_fields_of_ones_own_with_an_axis_of_ones_own():
    from jaxtyping import Float
    from torch import Tensor

    declare("route", Float[Tensor, "rows experts"], "rollout", "expert of each row")
    try:
        assert wrong_fields(batch(route=torch.zeros(B, 7))) == []
        [found] = wrong_fields(batch(route=torch.zeros(B + 1, 7)))
        assert found.expected == "float[rows=4,experts]"
        [found] = wrong_fields(batch(route=torch.zeros(B, 7, dtype=torch.int64)))
        assert found.code == "DPA102"
        with pytest.raises(ValueError, match="declared already"):
            declare("route", None, "rollout", "again")
    finally:
        del FIELDS["route"]


def test_missing_and_undeclared_fields():
    stage = STAGES["update_actor"]
    assert [v.field for v in check_stage(stage, batch(), when="before")] == ["advantages"]
    assert check_stage(stage, batch(), when="after") == []
    assert undeclared(batch(mine=torch.zeros(B))) == ("mine",)


def test_short_descriptions():
    view = batch(old_log_probs=torch.zeros(B, R).bfloat16(), values=jagged([1, 2, 3, 1]))
    view.arrays["uid"] = np.array(["a"] * B, object)
    assert [describe(view, n) for n in ("old_log_probs", "values", "uid", "responses")] == [
        "bf16[4,5]", "i64[4,(jagged)]", "object[4]", "i64[4,5]",
    ]  # fmt: skip


def test_row_relations():
    assert [expected_rows(r, 6, {"n": 4}) for r in (SAME, PERMUTE, EXPAND_N)] == [6, 6, 24]
    assert expected_rows(EXPAND_N, 6, {}) is None
    assert expected_rows(Rows("drop"), 6, {"n": 4}) is None
    assert [str(r) for r in (SAME, EXPAND_N)] == ["same", "expand x n"]


def test_a_stage_of_ones_own_takes_a_few_lines():
    class Filter(Stage):
        """Rows whose group teaches nothing are dropped."""

        name = "filter"
        rows = Rows("drop")
        reads = ("responses",)

    try:
        assert STAGES["filter"] is Filter
        assert Filter.declared() == ("responses",)
    finally:
        del STAGES["filter"]


@pytest.mark.parametrize("name", sorted(STAGES))
def test_stages_name_declared_fields_only(name):
    stage = STAGES[name]
    assert set(stage.declared()) | set(stage.drops) <= set(FIELDS)
    assert (stage.__doc__ or "").strip()
    for fields in stage.if_configured.values():
        assert set(fields) <= set(FIELDS)


def test_every_field_has_a_producer_and_a_meaning():
    for field in FIELDS.values():
        assert field.producer in STAGES
        assert field.meaning
        assert field.number in ("integer", "float", "integer or bool", "object", "meta")
        declared = STAGES[field.producer]
        assert field.name in (*declared.adds, *declared.may_add) or field.name == "entropys"


def test_a_jagged_field_of_another_kind_of_number():
    rows = [torch.ones(3), torch.ones(2)]
    ids = torch.nested.nested_tensor([row.long() for row in rows], layout=torch.jagged)
    view = BatchView.of({"batch": {"responses": ids, "old_log_probs": ids}})
    [found] = wrong_fields(view)
    assert (found.code, found.field, found.causes) == ("DPA102", "old_log_probs", ("wrong_dtype",))
    floats = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert wrong_fields(BatchView.of({"batch": {"responses": ids, "old_log_probs": floats}})) == []


def test_axes_and_kind_are_checked_though_sizes_are_unknown():
    flat = BatchView.of({"batch": {"responses": torch.ones(2, dtype=torch.int64)}})
    assert [(v.code, v.field) for v in wrong_fields(flat)] == [("DPA103", "responses")]
    ids = {"position_ids": torch.ones(2, 3, 4, dtype=torch.int64)}
    assert wrong_fields(BatchView.of({"batch": ids})) == []
    floats = BatchView.of({"batch": {"input_ids": torch.ones(2, 4)}})
    assert [(v.code, v.field) for v in wrong_fields(floats)] == [("DPA102", "input_ids")]


@pytest.mark.parametrize("shape", [(2 * B, R, 1), (2 * B,), (2 * B, 3, R, 1)])
def test_another_number_of_axes_has_no_factor(shape):
    """Sizes are compared axis by axis only where there are as many as declared."""
    [found] = wrong_fields(batch(old_log_probs=torch.zeros(shape)), factors={"n": 2})
    assert found.code == "DPA103"
    assert "factor" not in found.evidence
    assert found.causes == ("wrong_width",)


def test_a_wrong_width_may_have_a_factor_and_is_no_lost_row():
    [found] = wrong_fields(batch(old_log_probs=torch.zeros(B, 2 * R)), factors={"sp": 2})
    assert found.evidence["factor"] == "10 = 5 x sp (sp=2): the other side was not repeated"
    assert found.causes == ("wrong_width",)


def test_rows_that_are_all_alike_are_no_copies():
    [found] = wrong_fields(batch(old_log_probs=torch.zeros(2 * B, R)), factors={})
    assert found.causes == ("not_repeated",)
    [found] = wrong_fields(batch(old_log_probs=torch.rand(B + 1, R)), factors={})
    assert found.causes == ("rows_lost",)


@pytest.mark.parametrize(
    ("actual", "expected", "factors", "story"),
    [
        (12, 4, {"n": 3}, "12 = 4 x n (n=3): the other side was not repeated"),
        (4, 12, {"n": 3}, "12 = 4 x n (n=3): not repeated"),
        (12, 4, {"n": 2}, "12 = 4 x 3"),
        (12, 4, {"n": 2, "dp": 3, "tp": 3}, "12 = 4 x dp (dp=3): the other side was not repeated"),
        (4, 4, {"n": 1}, ""),
        (13, 4, {"n": 3}, ""),
        (0, 4, {"n": 3}, ""),
        (4, 0, {"n": 3}, ""),
        (-4, 4, {"n": 3}, ""),
        (1, 4, {"n": 4}, "4 = 1 x n (n=4): not repeated"),
    ],
)
def test_the_factor_that_explains_a_size(actual, expected, factors, story):
    assert factor_story(actual, expected, factors) == story


@pytest.mark.parametrize(
    ("relation", "sizes", "rows"),
    [(SAME, {}, 6), (PERMUTE, {}, 6), (EXPAND_N, {"n": 3}, 18), (EXPAND_N, {}, None),
     (Rows("drop"), {"n": 3}, None), (Rows("pad"), {}, None)],
)  # fmt: skip
def test_rows_after_a_stage(relation, sizes, rows):
    assert expected_rows(relation, 6, sizes) == rows
