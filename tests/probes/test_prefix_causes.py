"""Why a field contradicts itself over shared prefixes: each cause is tested on the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.noise import FP32, Noise
from dataproto_audit.probes.prefix_causes import causes_of, zeros
from dataproto_audit.probes.trie import contradictions, shared_cells
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import audit, own, own_array

ROLLOUT = "rollout_log_probs"
SHARED = Options(prompts=3, n=12, vocab=6, response_width=6, truncated=0, one_token=0, ranks=1)
"""Few tokens and many samples: rows share long prefixes."""


def causes(change: Any, options: Options = SHARED) -> list[tuple[str, ...]]:
    ran = audit(options, {"rollout": change}, until="rollout")
    names = (f"{ROLLOUT}_same_prefix", f"{ROLLOUT}_prefix_sum")
    return [f.causes for name in names for f in ran.findings(name, "rollout")]


def test_sums_of_sequences() -> None:
    def summed(b: Boundary) -> None:
        values, mask = own(b, ROLLOUT), b.batch.batch["response_mask"]
        values[:] = (values * mask).sum(1, keepdim=True) * mask

    assert causes(summed)[0][0] == "sum_not_per_token"


def test_zeros_at_some_ends() -> None:
    def stops(b: Boundary) -> None:
        values, mask = own(b, ROLLOUT), b.batch.batch["response_mask"]
        rows = torch.nonzero(mask.sum(1) < 6).squeeze(1)[::2]
        values[rows, mask.sum(1)[rows] - 1] = 0.0

    found = causes(stops)
    assert found
    assert all(listed[0] == "placeholder_log_prob" for listed in found)


def test_a_shift_by_one_column() -> None:
    def late(b: Boundary) -> None:
        values = own(b, ROLLOUT)
        values[:] = torch.roll(values, 1, 1)

    found = causes(late)
    assert found
    assert all("shift" in listed[:2] for listed in found)


def test_rows_of_two_weight_versions() -> None:
    def stale(b: Boundary) -> None:
        versions = own_array(b, "weight_version")
        values, ids = own(b, ROLLOUT), b.batch.batch["responses"]
        for row in range(0, len(versions), 2):
            versions[row] -= 1
            values[row] -= 0.2 + 0.01 * (ids[row] % 2)

    recorded = Options(prompts=3, n=12, vocab=9, recorded=True, micro_rows=6, ranks=1)
    found = causes(stale, recorded)
    assert found
    assert found[0][:2] == ("stale_rollout_weights", "stale_prefix_cache")


def test_one_row_among_many() -> None:
    def odd(b: Boundary) -> None:
        own(b, ROLLOUT)[3] -= 0.7

    assert causes(odd)[0][0] == "row_outlier"


def test_values_that_end_where_other_rows_end() -> None:
    def rolled(b: Boundary) -> None:
        values = own(b, ROLLOUT)
        values[:] = torch.roll(values, 1, 0)

    assert "row_permutation" in causes(rolled)[0][:2]


def test_healthy_rows_need_no_cause() -> None:
    assert causes(lambda b: None) == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["1110", "1100", "1110"], ("placeholder_log_prob", "shift")),
        (["1110", "1110", "1110"], ("shift", "placeholder_log_prob")),
        (["1001", "1001", "1111"], ("mask_on_tool", "placeholder_log_prob")),
        (["0111", "0111", "1111"], ("shift", "placeholder_log_prob")),
        (["1011", "1111", "1111"], ("placeholder_log_prob", "mask_on_tool")),
        (["0000", "1111", "1111"], ("placeholder_log_prob", "mask_on_tool")),
    ],
)
def test_the_place_of_zeros_tells(rows: list[str], expected: tuple[str, ...]) -> None:
    values = np.array([[int(cell) for cell in row] for row in rows])
    mask = np.ones(values.shape, bool)
    if rows[1] == "1100":
        mask[1, 3] = False  # a shorter row, whose last token is among the zeros
        values[2, 3] = 1
    assert zeros((values == 0) & mask, mask) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["1110", "1110"], ("shift", "placeholder_log_prob")),  # two rows are enough
        (["1110"], ("placeholder_log_prob", "shift")),
        (["0111", "0111"], ("shift", "placeholder_log_prob")),
        (["0111"], ("placeholder_log_prob", "mask_on_tool")),
        (["10011111", "10101011"], ("placeholder_log_prob", "mask_on_tool")),  # 2 of 5 in runs
        (["10001111", "10101111"], ("mask_on_tool", "placeholder_log_prob")),  # 3 of 5
        (["10011111", "10101111"], ("placeholder_log_prob", "mask_on_tool")),  # half of them
        (["100111", "000000"], ("placeholder_log_prob", "mask_on_tool")),  # no run within a row
    ],
)
def test_the_place_of_few_zeros_tells(rows: list[str], expected: tuple[str, ...]) -> None:
    values = np.array([[int(cell) for cell in row] for row in rows])
    assert zeros(values == 0, np.ones(values.shape, bool)) == expected


# -- rows of hand-made batches ---------------------------------------------------------------------


def tried(values: Any, responses: Any, *, bad: Any = None, noise: Noise = FP32,
          **more: Any) -> dict[str, str]:  # fmt: skip
    """Causes of a field of rows with one prompt, all tokens attended unless ``more`` says."""
    responses = torch.tensor(responses)
    rows, width = responses.shape
    whole = torch.ones(rows, width + 1, dtype=torch.int64)
    tensors = {
        "prompts": whole[:, :1],
        "responses": responses,
        "attention_mask": whole,
        "response_mask": whole[:, 1:],
        "mine": torch.tensor(values, dtype=torch.float32),
    }
    view = BatchView.of({"batch": tensors | more.pop("tensors", {}),
                         "non_tensor_batch": more.pop("arrays", {})})  # fmt: skip
    ctx = Context(1, "rollout", "after", Settings())
    cells = shared_cells(view, ctx)
    wrong = more.pop("wrong", contradictions(view, ctx, "mine", noise) or 0)
    bad = np.ones((rows, width), bool) if bad is None else bad
    return dict(causes_of(view, cells, "mine", noise, bad=bad, wrong=wrong, odd=True, **more))


SAME = [[5, 6, 7, 8]] * 4
RIGHT = [-0.5, -1.0, -1.5, -2.0]


def test_zeros_are_counted_and_are_the_cause_where_nothing_else_is_wrong() -> None:
    values = [list(RIGHT) for _ in range(4)]
    values[1][1] = values[2][2] = 0.0
    found = tried(values, SAME)
    assert found["placeholder_log_prob"] == "nothing wrong without 2 zeros"
    values[3][3] = -5.0
    assert "placeholder_log_prob" not in tried(values, SAME)


@pytest.mark.parametrize(("rows", "found"), [(3, True), (2, False)])
def test_one_value_all_along_is_told_from_three_rows_on(rows: int, found: bool) -> None:
    values = [[-4.0 - row] * 4 for row in range(rows)]
    said = tried(values, SAME[:rows])
    assert ("sum_not_per_token" in said) is found
    if found:
        assert said["sum_not_per_token"] == "one value on all tokens of each of 3 rows"
        values[1][2] += 1e-5
        assert "sum_not_per_token" not in tried(values, SAME[:rows])


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_is_named_by_what_undoes_it(by: int) -> None:
    """Three distinct third tokens follow each of two prefixes; each row is one column off."""
    random = np.random.default_rng(0)
    responses = [[5 + 4 * (row // 3), 6, 10 + row, 20 + row, 30 + row] for row in range(6)]
    values = np.tile([-0.8, -1.0, -2.0, -0.3, -0.4], (6, 1))
    moved = np.roll(values, by, 1)
    moved[:, 0 if by > 0 else -1] = -0.1 * random.random(6) - 0.01
    found = tried(moved.tolist(), responses)
    assert found.get("shift") == f"nothing wrong after a shift by {-by:+d}"
    assert "shift" not in tried(values.tolist(), responses)


@pytest.mark.parametrize(("column", "found"), [(0, False), (1, False), (3, True)])
def test_what_a_shift_leaves_wrong_is_not_explained_by_it(column: int, found: bool) -> None:
    """The last column goes, whatever it holds; the first one moves along."""
    values = np.tile(RIGHT, (4, 1))
    values[0, [3, column]] -= 2.0
    values[1, 3] -= 1.0
    bad = np.ones((4, 4), bool)
    said = tried(values.tolist(), SAME, bad=bad, wrong=2)
    assert ("shift" in said) is found
    bad[:, 1:] = False  # no bad cell has a source then
    assert "shift" not in tried(values.tolist(), SAME, bad=bad, wrong=2)


def test_few_rows_that_differ_are_outliers() -> None:
    for rows, found in ((2, True), (3, False)):
        values = [list(RIGHT) for _ in range(8)]
        bad = np.zeros((8, 4), bool)
        for row in range(rows):
            values[row][1] -= 0.5 + row
            bad[row, 1] = True
        said = tried(values, SAME * 2, bad=bad)
        assert ("row_outlier" in said) is found
        assert not found or said["row_outlier"] == "2 rows take part"


@pytest.mark.parametrize(("rows", "found"), [(3, True), (2, False)])
def test_rows_that_end_where_others_do(rows: int, found: bool) -> None:
    """Values are 0 behind the end of another row, of three rows or more."""
    lengths = np.array([4, 3, 2, 1][:rows] + [4] * (6 - rows))
    order = np.roll(np.arange(rows), 1).tolist() + list(range(rows, 6))
    on = torch.from_numpy(np.arange(4)[None] < lengths[:, None]).long()
    there = np.arange(4)[None] < lengths[order][:, None]
    values = np.where(there, -1.0 - np.arange(4), 0.0)
    tensors = {"response_mask": on, "attention_mask": torch.cat([torch.ones(6, 1).long(), on], 1)}
    said = tried(values.tolist(), [[5, 6, 7, 8]] * 6, tensors=tensors)
    assert ("row_permutation" in said) is found


def test_versions_that_agree_with_themselves_are_stale() -> None:
    versions = np.array([1, 1, 2, 2])
    values = np.tile(RIGHT, (4, 1))
    values[2:] -= 0.3
    said = tried(values.tolist(), SAME, arrays={"weight_version": versions})
    assert said["stale_rollout_weights"] == "rows of one weight version agree with each other"
    assert "stale_prefix_cache" in said
    values[3, 1] -= 0.4  # the second version contradicts itself
    assert "stale_rollout_weights" not in tried(
        values.tolist(), SAME, arrays={"weight_version": versions}
    )
    alone = np.ones(4, np.int64)
    assert "stale_rollout_weights" not in tried(
        np.tile(RIGHT, (4, 1)).tolist(), SAME, arrays={"weight_version": alone}
    )


def test_the_first_column_has_no_source_after_a_shift_to_the_right() -> None:
    """It held what belongs to the distinct tokens of the second, and holds nothing then."""
    responses = [[5, 10 + row, 20 + row] for row in range(6)]
    second = -2.2 - 0.1 * np.arange(6)
    moved = np.stack([second, 5 * second, 5 * second], 1)
    found = tried(moved.tolist(), responses, wrong=2)
    assert found.get("shift") == "nothing wrong after a shift by +1"
