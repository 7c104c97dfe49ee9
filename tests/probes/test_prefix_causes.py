"""Why a field contradicts itself over shared prefixes: each cause is tested on the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.probes.prefix_causes import zeros
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
