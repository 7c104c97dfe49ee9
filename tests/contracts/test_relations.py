"""Row relations: which field is named when rows of one or several fields went astray."""

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.relations import (
    compare_expanded,
    compare_rows,
    compare_unchanged,
    permutation,
)
from dataproto_audit.contracts.rows import RowState
from dataproto_audit.contracts.stages import STAGES

ROWS, N = 12, 3
ORDER = np.array([3, 0, 1, 2, 7, 11, 4, 5, 6, 8, 10, 9])


def batch(rows=ROWS):
    random = torch.Generator().manual_seed(0)
    prompts = torch.arange(rows // N).repeat_interleave(N)[:, None] + torch.arange(2)
    responses = torch.randint(3, 90, (rows, 4), generator=random)
    return {
        "batch": {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "scores": torch.rand(rows, 4, generator=random),
        },
        "non_tensor_batch": {
            "uid": np.array([f"u{row // N}" for row in range(rows)], object),
            "raw_prompt": np.array([f"text {row // N}" for row in range(rows)], object),
            "score": np.array([row / 7 for row in range(rows)], object),
        },
    }


def reordered(parts, order, *, but=()):
    return {
        part: {name: value if name in but else value[order] for name, value in fields.items()}
        for part, fields in parts.items()
    }


def balance(after):
    before = RowState(BatchView.of(batch()))
    return compare_rows(STAGES["balance"], before, RowState(BatchView.of(after), before), sizes={})


def test_a_permutation_is_found_as_an_index():
    before, after = (RowState(BatchView.of(b)) for b in (batch(), reordered(batch(), ORDER)))
    assert permutation(before, after, before.view.names).tolist() == ORDER.tolist()
    assert permutation(before, after, ["prompts"]) is not None
    other = RowState(BatchView.of(batch(9)))
    assert permutation(before, other, ["prompts"]) is None


def test_whole_rows_may_move():
    assert balance(reordered(batch(), ORDER)) == []
    assert balance(batch()) == []


@pytest.mark.parametrize("name", ["scores", "responses", "input_ids", "uid", "score"])
def test_one_field_that_stayed_behind_is_named(name):
    after = reordered(batch(), ORDER, but=(name,))
    [violation] = balance(after)
    assert (violation.code, violation.field) == ("DPA106", name)
    assert violation.causes[0] == "row_permutation"
    part = "batch" if name in after["batch"] else "non_tensor_batch"
    found, right = after[part][name].tolist(), reordered(batch(), ORDER)[part][name].tolist()
    assert violation.rows == tuple(row for row in range(ROWS) if found[row] != right[row])


def test_all_non_tensor_fields_that_stayed_behind_are_one_violation():
    arrays = tuple(batch()["non_tensor_batch"])
    [violation] = balance(reordered(batch(), ORDER, but=arrays))
    assert (violation.code, violation.field) == ("DPA106", "uid")
    assert "score" in str(violation.evidence["also"])


def test_a_row_that_was_lost_and_another_doubled():
    order = ORDER.copy()
    order[0] = order[1]
    [violation] = balance(reordered(batch(), order))
    assert violation.code == "DPA105"
    assert violation.rows == (1,)
    assert "1 rows did not enter, 1 are missing" in violation.actual


def test_a_field_that_was_overwritten_on_the_way_is_no_permutation():
    after = reordered(batch(), ORDER)
    after["batch"]["scores"] = after["batch"]["scores"] + 1
    [violation] = balance(after)
    assert (violation.field, violation.causes[0]) == ("scores", "field_overwritten")
    assert len(violation.rows) == ROWS


def test_rows_that_are_alike_may_be_exchanged():
    parts = batch()
    for name in ("prompts", "responses", "input_ids", "scores"):
        parts["batch"][name] = parts["batch"][name][[0] * ROWS]
    before = RowState(BatchView.of(parts))
    after = RowState(BatchView.of(reordered(parts, ORDER)), before)
    assert compare_rows(STAGES["balance"], before, after, sizes={}) == []


def test_a_silent_reordering_is_one_violation_not_one_a_field():
    before = RowState(BatchView.of(batch()))
    after = RowState(BatchView.of(reordered(batch(), ORDER)), before)
    [violation] = compare_rows(STAGES["reward"], before, after, sizes={})
    assert (violation.code, violation.field) == ("DPA105", "")
    assert violation.rows == tuple(np.flatnonzero(np.arange(ROWS) != ORDER).tolist())


def test_a_changed_field_names_its_cells():
    before = RowState(BatchView.of(batch()))
    parts = batch()
    parts["batch"]["responses"][5, 2] += 1
    after = RowState(BatchView.of(parts), before)
    [violation] = compare_rows(STAGES["reward"], before, after, sizes={})
    assert (violation.code, violation.rows, violation.columns) == ("DPA106", (5,), {5: (2,)})


def test_a_field_that_became_another_kind_is_left_to_the_declaration():
    before = RowState(BatchView.of(batch()))
    parts = batch()
    parts["non_tensor_batch"]["scores"] = np.array(parts["batch"].pop("scores").tolist())
    after = RowState(BatchView.of(parts), before)
    assert compare_rows(STAGES["reward"], before, after, sizes={}) == []


def test_unchanged_allows_what_it_is_told():
    before = RowState(BatchView.of(batch()))
    fewer = batch()
    del fewer["batch"]["scores"]
    after = RowState(BatchView.of(fewer), before)
    [violation] = compare_unchanged("here", before, after)
    assert (violation.code, violation.field, violation.expected) == (
        "DPA107", "scores", "kept by here",
    )  # fmt: skip
    assert compare_unchanged("here", before, after, may_drop=("scores",)) == []
    assert compare_unchanged("here", before, after, may_drop=None) == []
    short = RowState(BatchView.of(batch(9)), before)
    [violation] = compare_unchanged("here", before, short)
    assert violation.code == "DPA104"


def expanded(order):
    origin = {
        "non_tensor_batch": {
            "uid": np.array(["a", "b", "c", "d"], object),
            "raw_prompt": np.array([["same"]] * 4, object),
            "reward_model": np.array([{"truth": row} for row in range(4)] + [None], object)[:4],
        }
    }
    rows = {
        "non_tensor_batch": {
            name: array[order] for name, array in origin["non_tensor_batch"].items()
        }
    }
    states = (RowState(BatchView.of(part)) for part in (origin, rows))
    return compare_expanded(*states, 3)


def test_the_repeat_keeps_copies_together():
    assert expanded(np.arange(12) // 3) == []
    assert expanded(np.arange(11) // 3) == []  # another number of rows is another violation


def test_a_tiled_repeat_is_called_by_its_name():
    [violation] = expanded(np.arange(12) % 4)
    assert (violation.code, violation.field) == ("DPA404", "uid")
    assert violation.causes[0] == "tiled_groups"
    assert violation.evidence["also"] == "reward_model"
    assert violation.rows == tuple(row for row in range(12) if row % 4 != row // 3)


def test_two_exchanged_rows_are_named_alone():
    order = np.arange(12) // 3
    order[[2, 3]] = order[[3, 2]]
    [violation] = expanded(order)
    assert violation.rows == (2, 3)
    assert violation.causes == ("row_permutation",)


def test_a_row_doubled_in_a_stage_that_keeps_the_order():
    before = RowState(BatchView.of(batch()))
    order = np.arange(ROWS)
    order[5] = 4
    after = RowState(BatchView.of(reordered(batch(), order)), before)
    [found] = compare_rows(STAGES["reward"], before, after, sizes={})
    assert (found.code, found.field, found.rows) == ("DPA105", "", (5,))
    assert found.causes[0] == "rows_lost"


def test_a_row_doubled_within_its_group_is_no_overwritten_field():
    order = ORDER.copy()
    order[1] = order[2]  # rows of one prompt: only the tokens tell them apart
    [found] = balance(reordered(batch(), order))
    assert (found.code, found.causes[0]) == ("DPA105", "rows_lost")
    assert found.actual == "1 rows did not enter, 1 are missing"


def test_cells_of_a_tensor_that_was_overwritten_while_rows_moved():
    after = reordered(batch(), ORDER)
    after["batch"]["scores"][2, 1] += 1.0
    [found] = balance(after)
    assert (found.code, found.field) == ("DPA106", "scores")
    assert found.columns == {2: (1,)}


@pytest.mark.parametrize(
    ("change", "causes"),
    [
        (lambda uid: [f"x{row}" for row in range(len(uid))], ("uid_after_repeat", "split_group")),
        (lambda uid: ["other", *uid[1:]], ("split_group", "uid_reused")),
        (lambda uid: [uid[-1], *uid[1:]], ("split_group", "uid_reused")),
        (lambda uid: [*uid[-1:], *uid[:-1]], ("row_permutation",)),
    ],
)
def test_uids_tell_why_rows_belong_to_another_prompt(change, causes):
    uid = np.array(["a", "b", "c", "d"], object)
    origin, after = (
        RowState(BatchView.of({"non_tensor_batch": {"uid": np.array(part, object)}}))
        for part in (uid, change(uid.repeat(3).tolist()))
    )
    [found] = compare_expanded(origin, after, 3)
    assert (found.code, found.causes) == ("DPA404", causes)


def _unchanged(change):
    """Violations where ``scores`` changes to what ``change`` makes of it, and nothing else."""
    before = RowState(BatchView.of(batch()))
    after = batch()
    for part, fields in before.view.tensors.items():
        after["batch"][part] = fields
    after["batch"]["scores"] = change(after["batch"]["scores"].clone())
    return compare_unchanged("here", before, RowState(BatchView.of(after), before), may_drop=())


def test_changed_cells_are_named_by_row_and_column():
    def two(scores):
        scores[2, 1] += 1
        scores[5, [0, 3]] += 1
        return scores

    [violation] = _unchanged(two)
    assert (violation.field, violation.rows) == ("scores", (2, 5))
    assert violation.columns == {2: (1,), 5: (0, 3)}
    assert violation.actual == f"2 of {ROWS} rows changed"


def test_cells_that_are_nan_on_both_sides_have_not_changed():
    before = batch()
    before["batch"]["scores"][1] = float("nan")
    after = {part: dict(fields) for part, fields in before.items()}
    after["batch"]["scores"] = before["batch"]["scores"].clone()
    after["batch"]["scores"][1, 2] = 0.5
    first = RowState(BatchView.of(before))
    [violation] = compare_unchanged("here", first, RowState(BatchView.of(after), first))
    assert violation.columns == {1: (2,)}


@pytest.mark.parametrize(
    "reshaped", [lambda s: s.unsqueeze(-1) + 1, lambda s: s[:, :3] + 1, lambda s: s.sum(1)]
)
def test_another_shape_has_no_columns_that_changed(reshaped):
    """Neither have fields of more than two axes, or of one."""
    [violation] = _unchanged(reshaped)
    assert violation.field == "scores"
    assert violation.columns == {}


def test_fields_of_three_axes_have_no_columns():
    before = batch()
    before["batch"]["scores"] = torch.rand(ROWS, 4, 2)
    after = {part: dict(fields) for part, fields in before.items()}
    after["batch"]["scores"] = before["batch"]["scores"].clone()
    after["batch"]["scores"][3, 1, 0] += 1
    first = RowState(BatchView.of(before))
    [violation] = compare_unchanged("here", first, RowState(BatchView.of(after), first))
    assert (violation.rows, violation.columns) == ((3,), {})


@pytest.mark.parametrize("rows", [3, 6])
def test_two_rows_and_more_may_be_reordered(rows):
    order = np.arange(rows)[::-1].copy()
    before = RowState(BatchView.of(batch(rows)))
    after = RowState(BatchView.of(reordered(batch(rows), order)), before)
    assert compare_rows(STAGES["balance"], before, after, sizes={}) == []
    but = reordered(batch(rows), order, but=("score",))
    after = RowState(BatchView.of(but), before)
    [violation] = compare_rows(STAGES["balance"], before, after, sizes={})
    assert violation.field == "score"
