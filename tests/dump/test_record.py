"""From a batch to rows of the tables: every kind of field, and rows whose fields are broken."""

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.dump import record
from dataproto_audit.dump.columns import from_tuples, make_block
from dataproto_audit.dump.schema import TABLES

ROWS, P, R = 3, 2, 4
LENGTHS = [4, 1, 3]


def batch(**other):
    response = torch.arange(R) < torch.tensor(LENGTHS)[:, None]
    tensors = {
        "prompts": torch.tensor([[0, 5], [6, 7], [0, 8]]),
        "responses": torch.where(response, torch.arange(10, 10 + ROWS * R).reshape(ROWS, R), 0),
        "attention_mask": torch.cat([torch.tensor([[0, 1], [1, 1], [0, 1]]), response.long()], 1),
        "response_mask": response.long(),
        "rollout_log_probs": -torch.ones(ROWS, R),
        "old_log_probs": -torch.ones(ROWS, R) + torch.tensor([0.0, 0.5, 0.0])[:, None],
        "token_level_scores": torch.tensor([[0, 0, 0, 1.0], [0.5, 0, 0, 0], [0, 0, 0, 0]]),
        "advantages": torch.tensor([[1.0], [-1.0], [0.5]]) * response,
    }
    arrays = {
        "uid": np.array(["a", "b", "a"], object),
        "score": np.array([1.0, 0.5, 0.0], object),
        "finish_reason": np.array(["length", "stop", None], object),
    }
    view = BatchView.of({"batch": tensors, "non_tensor_batch": arrays})
    view.tensors.update({n: t for n, t in other.items() if isinstance(t, torch.Tensor)})
    view.arrays.update({n: a for n, a in other.items() if isinstance(a, np.ndarray)})
    return view


def field(view, name):
    row = record.field_row(view, "rollout", "after", name, "ff")
    names = [column.name for column in TABLES["fields"].given]
    from_tuples(TABLES["fields"], [row])  # fits the table
    return dict(zip(names, row, strict=True))


def test_a_tensor_field():
    row = field(batch(), "response_mask")
    assert (row["dtype"], row["shape"], row["rows"]) == ("i64", "[3,4]", 3)
    assert (row["min"], row["max"], row["mean"]) == (0.0, 1.0, 8 / 12)
    assert row["mask_coverage"] == 8 / 12
    assert (row["nan"], row["inf"], row["fingerprint"]) == (0, 0, "ff")


def test_rows_in_another_order_are_not_measured_again():
    view, names = batch(), [column.name for column in TABLES["fields"].given]
    first = record.field_row(view, "rollout", "after", "advantages", "ff")
    marked = tuple(9.0 if n == "mean" else v for n, v in zip(names, first, strict=True))

    def mean(view, fingerprint):
        row = record.field_row(view, "balance", "after", "advantages", fingerprint, marked)
        assert row[:3] == ("balance", "after", "advantages")
        assert row[-1] == fingerprint
        return row[names.index("mean")]

    assert mean(view, "ff") == 9.0
    assert mean(view, "fe") == first[names.index("mean")]
    double = batch(advantages=view.tensors["advantages"].double())
    assert mean(double, "ff") == first[names.index("mean")]


def test_values_that_are_not_finite_are_counted_and_left_out():
    values = torch.tensor([[float("nan"), 1.0], [float("inf"), -3.0]])
    row = field(batch(x=values), "x")
    assert (row["nan"], row["inf"], row["min"], row["max"], row["mean"]) == (1, 1, -3.0, 1.0, -1.0)
    nothing = field(batch(x=torch.full((2, 2), float("nan"))), "x")
    assert (nothing["nan"], nothing["min"], nothing["mean"]) == (4, None, None)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (torch.zeros(3, 2).bfloat16(), "bf16", "[3,2]"),
        (torch.zeros(3, 0), "f32", "[3,0]"),
        (torch.zeros(()), "f32", "[]"),
        (torch.zeros(3, 2, dtype=torch.complex64), "complex64", "[3,2]"),
        (torch.ones(3, 2, dtype=torch.bool), "bool", "[3,2]"),
        (torch.nested.nested_tensor([torch.ones(n) for n in LENGTHS], layout=torch.jagged), "f32",
         "[3,*]"),
        (np.array(["x"] * 3, object), "object", "[3]"),
        (np.arange(3), "i64", "[3]"),
    ],
)  # fmt: skip
def test_fields_of_every_kind(value, dtype, shape):
    row = field(batch(x=value), "x")
    assert (row["dtype"], row["shape"]) == (dtype, shape)


def test_rows():
    reader = record.RowReader(batch(), {})
    columns = record.rows_columns(reader, ["k0", "k1", "k2"], {"k1": {"DPA405", "DPA303"}})
    make_block("rows", columns)
    assert columns["prompt_length"].tolist() == [1, 2, 1]
    assert columns["response_length"].tolist() == columns["trained_tokens"].tolist() == LENGTHS
    assert columns["score"].tolist() == [1.0, 0.5, 0.0]
    assert columns["advantage"].tolist() == [1.0, -1.0, 0.5]
    assert columns["rollout_old_gap_max"].tolist() == [0.0, 0.5, 0.0]
    assert columns["old_ref_gap_max"] is None
    assert columns["flags"] == ["", "DPA303 DPA405", ""]
    assert columns["finish_reason"] == ["length", "stop", None]


def test_groups():
    reader = record.RowReader(batch(), {})
    columns = record.groups_columns(reader, np.array([0, 1, 0]), ["a", "b"])
    make_block("groups", columns)
    assert columns["rows"].tolist() == [2, 1]
    assert columns["score_mean"].tolist() == [0.5, 0.5]
    assert columns["score_std"][0] == pytest.approx(np.sqrt(0.5))
    assert np.isnan(columns["score_std"][1])
    assert columns["degenerate"].tolist() == [False, True]
    assert columns["length_mean"].tolist() == [3.5, 1.0]


def test_scores_that_are_no_numbers_give_way_to_the_token_level_ones():
    view = batch(score=np.array(["good", "bad", {}], object))
    assert record.RowReader(view, {}).scores.tolist() == [1.0, 0.5, 0.0]
    del view.tensors["token_level_scores"]
    assert record.RowReader(view, {}).scores is None
    assert record.groups_columns(record.RowReader(view, {}), np.zeros(3, int), ["a"]) is None


def test_broken_fields_are_not_read():
    broken = dict.fromkeys(("old_log_probs", "advantages", "uid", "score"), "is wrong")
    columns = record.rows_columns(record.RowReader(batch(), broken), ["a", "b", "c"], {})
    assert columns["rollout_old_gap_max"] is None
    assert columns["advantage"] is None
    assert columns["uid"] == ["-", "-", "-"]
    assert columns["flags"] == ""
    assert record.can_tell_rows(batch(), broken)
    assert not record.can_tell_rows(batch(), {"response_mask": "is wrong"})
    assert not record.can_tell_rows(BatchView.of(None), {})


def test_tokens_of_named_rows_and_a_sample():
    reader = record.RowReader(batch(), {})
    columns = record.tokens_columns(reader, ["k0", "k1", "k2"], {2: "DPA303"})
    make_block("tokens", columns)
    assert columns["row"].tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert columns["flag"] == [""] * 5 + ["DPA303"] * 3
    assert columns["token_id"].tolist()[:4] == [10, 11, 12, 13]
    assert columns["ref_log_prob"] is None
    assert columns["mask"].all()


def test_masked_padding_is_shown_too():
    mask = batch().tensors["response_mask"].clone()
    mask[1, 3] = 1
    columns = record.tokens_columns(record.RowReader(batch(response_mask=mask), {}), "abc", {})
    assert [1, 3] in np.stack([columns["row"], columns["column"]], 1).tolist()


def test_a_step_with_many_named_rows_writes_a_bounded_number_of_tokens(monkeypatch):
    monkeypatch.setattr(record, "MAX_TOKENS", 5)
    named = dict.fromkeys(range(ROWS), "DPA303")
    columns = record.tokens_columns(record.RowReader(batch(), {}), "abc", named)
    assert set(columns["row"].tolist()) == {0, 1}
    monkeypatch.setattr(record, "MAX_TOKENS", 1)
    columns = record.tokens_columns(record.RowReader(batch(), {}), "abc", named)
    assert set(columns["row"].tolist()) == {0}


def test_rank_and_loss_rows_fit_their_tables():
    notes = [
        {"rank": 0, "rows": 4, "tokens": 9, "micro_batches": [5, 4], "peak_token_sum": 5,
         "wall_s": 2.0, "cpu_s": 1.0},
        {"rank": 1, "rows": 4, "tokens": 8, "micro_batches": [8], "peak_token_sum": 8,
         "wall_s": 1.5},
        {"rows": 2},
    ]  # fmt: skip
    rows = record.rank_rows("update_actor", notes)
    from_tuples(TABLES["ranks"], rows)
    assert [row[6] for row in rows] == [0.0, 0.25, None]
    assert rows[2] == ("update_actor", 2, 2, 0, 0, 0, None, None)
    told = record.rank_rows("update_actor", [{**notes[0], "bubble": 0.2}, notes[1]])
    assert [row[6] for row in told] == [0.2, 0.25], "what a rank noted comes first"
    loss = record.loss_rows([(0, "pg_loss", 1.0, 7.0, 1.5), (0, "total", 2.0, None, 2.0)])
    from_tuples(TABLES["loss"], loss)
    assert [(row[1], row[5]) for row in loss] == [("pg", 0.5), ("total", 0.0)]
