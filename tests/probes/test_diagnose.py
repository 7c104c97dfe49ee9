"""Differential diagnosis: the cause whose repair silences the gap comes first, with its numbers."""

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.diagnose import explain_gap
from dataproto_audit.probes.noise import FP32, HALF_NOISE

ROWS, WIDTH = 24, 6


def log_probs(seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(2.0, (ROWS, WIDTH)).astype(np.float32)


def explained(old: np.ndarray, rollout: np.ndarray, **options: Any) -> Finding:
    mask = options.pop("mask", np.ones((ROWS, WIDTH), np.int64))
    fields = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}
    fields |= options.pop("fields", {})
    view = BatchView.of({"batch": {n: torch.from_numpy(v.copy()) for n, v in fields.items()}})
    context = Context(1, "old_log_prob", "after", Settings(), check="probe", code="DPA303")
    bad = (np.abs(old - rollout) > 1e-3) & (mask != 0)
    [finding] = explain_gap(
        view, context, bad, suspect="old_log_probs", witness="rollout_log_probs",
        noise=options.pop("noise", FP32), **options,
    )  # fmt: skip
    return finding


@pytest.mark.parametrize("columns", [1, -1, 2, -2])
def test_a_shift_is_undone(columns: int) -> None:
    right = log_probs()
    finding = explained(np.roll(right, columns, 1), right)
    assert (finding.code, finding.causes[0]) == ("DPA304", "shift")
    assert f"shift by {-columns:+d}" in finding.evidence
    assert "-> 0" in str(finding.evidence[f"shift by {-columns:+d}"])
    assert finding.rows == tuple(range(ROWS))
    assert "must score responses[:, t]" in finding.hint


def test_all_cells_that_a_shift_moved_are_named_also_those_that_look_right() -> None:
    right = log_probs()
    right[3] = -1.0  # a row in which the shift changes nothing; its first cell cannot be told
    right[5, 2:4] = [-0.7, -0.7004]
    finding = explained(np.roll(right, -1, 1), right)
    assert finding.columns[5] == tuple(range(WIDTH))
    assert finding.columns[3] == (0,)


def test_exchanged_rows_are_matched_anew() -> None:
    right = log_probs()
    old = right.copy()
    old[[2, 7, 11]] = old[[7, 11, 2]]
    finding = explained(old, right)
    assert (finding.code, finding.causes[0]) == ("DPA303", "row_permutation")
    assert finding.rows == (2, 7, 11)


def test_rows_of_few_tokens_fit_others_by_chance_and_do_not_count() -> None:
    right, mask = log_probs(), np.zeros((ROWS, WIDTH), np.int64)
    mask[:, :2] = 1
    finding = explained(right + np.float32(0.3), right, mask=mask)
    assert finding.causes[0] == "stale_rollout_weights"


def test_another_slope_points_to_a_temperature() -> None:
    finding = explained(0.7 * log_probs(), log_probs())
    assert finding.causes[0] == "temperature_mismatch"
    assert finding.evidence["slope"] == pytest.approx(1 / 0.7, rel=1e-4)


def test_a_gap_without_a_shape_is_stale_weights_first() -> None:
    noise = np.random.default_rng(1).normal(0, 0.2, (ROWS, WIDTH)).astype(np.float32)
    finding = explained(log_probs() + noise, log_probs())
    assert finding.causes[0] == "stale_rollout_weights"
    assert finding.severity == "fail"
    assert finding.evidence["bound per token"] == FP32.token


def test_what_is_unknown_makes_an_unexplained_gap_information() -> None:
    right = log_probs()
    gap = explained(right - np.float32(0.4), right, unknown=["top_p", "on_policy"])
    assert gap.severity == "info"
    assert "tell top_p, on_policy" in gap.hint
    shift = explained(np.roll(right, 1, 1), right, unknown=["top_p"])
    assert shift.severity == "fail"


def test_half_precision_is_named_as_such() -> None:
    finding = explained(log_probs() - np.float32(0.5), log_probs(), noise=HALF_NOISE)
    assert finding.evidence["noise model"] == HALF_NOISE.name


def test_cells_that_are_not_finite_do_not_spoil_the_numbers() -> None:
    old, right = log_probs() - np.float32(0.5), log_probs()
    old[0, 0], old[1, 1] = np.nan, -np.inf
    finding = explained(old, right)
    assert finding.evidence["max gap"] == pytest.approx(0.5, rel=1e-4)


def test_a_batch_of_one_token_has_no_shift_and_no_slope() -> None:
    mask = np.zeros((ROWS, WIDTH), np.int64)
    mask[4, 0] = 1
    finding = explained(log_probs() - 1, log_probs(), mask=mask)
    assert finding.rows == (4,)
    assert finding.evidence["slope"] == 1.0


def test_one_outlier_of_a_hundred_nats_is_no_shift() -> None:
    right = log_probs()
    old = right.copy()
    old[5, 2] = -101.0
    finding = explained(old, right)
    assert (finding.code, finding.causes[0]) == ("DPA303", "row_outlier")
    assert finding.columns == {5: (2,)}


def test_only_the_rows_that_were_shifted_are_named() -> None:
    right = log_probs()
    old = right.copy()
    old[:9] = np.roll(old[:9], 1, 1)
    finding = explained(old, right)
    assert (finding.code, finding.causes[0]) == ("DPA304", "shift")
    assert finding.rows == tuple(range(9))


def test_rows_of_other_lengths_are_matched_anew() -> None:
    lengths = np.arange(ROWS) % WIDTH + 1
    mask = (np.arange(WIDTH)[None] < lengths[:, None]).astype(np.int64)
    right = log_probs() * mask
    finding = explained(right[np.argsort(-lengths, kind="stable")], right, mask=mask)
    assert finding.causes[0] == "row_permutation"
    assert "rows fit another one" in str(finding.evidence["rows matched anew"])


def test_zeros_where_nothing_was_computed() -> None:
    old = log_probs()
    old[-3:] = 0.0
    finding = explained(old, log_probs())
    assert finding.causes[0] == "placeholder_log_prob"
    assert finding.rows == (21, 22, 23)


def test_rows_of_older_weights_are_told_by_their_version() -> None:
    old, right = log_probs(), log_probs()
    noise = np.random.default_rng(1).normal(0, 0.2, (12, WIDTH))
    right[12:] += noise.astype(np.float32)
    versions = {"weight_version": np.where(np.arange(ROWS) < 12, 5, 4)}
    assert explained(old, right, fields=versions).causes[0] == "stale_rollout_weights"
    turned = {"weight_version": np.where(np.arange(ROWS) < 12, 4, 5)}
    assert explained(old, right, fields=turned).causes[0] == "cross_row_leakage"


def test_one_offset_of_a_cast_is_precision() -> None:
    finding = explained(log_probs() - np.float32(0.0125), log_probs())
    assert finding.causes[0] == "precision"
    wide = explained(log_probs() + np.float32(0.3), log_probs())
    assert wide.causes[0] == "stale_rollout_weights"


def test_a_rollout_above_on_all_tokens_was_filtered() -> None:
    up = np.random.default_rng(2).uniform(0.0, 0.2, (ROWS, WIDTH)).astype(np.float32)
    right = log_probs() - np.float32(0.5)
    assert explained(right, right + up).causes[0] == "sampling_filter"
    assert "sampling_filter" not in explained(right + up, right).causes[:1]


def test_update_log_probs_of_later_mini_batches_say_nothing() -> None:
    right = log_probs()
    mini = (np.arange(ROWS) >= 12).astype(np.int64)
    new = right + np.where(mini[:, None] == 1, 9.0, 0.01).astype(np.float32)
    bad = (np.abs(new - right) > 1e-3) & (mini[:, None] == 0)
    fields = {"old_log_probs": right, "update_log_probs": new, "mini_batch": mini,
              "response_mask": np.ones((ROWS, WIDTH), np.int64)}  # fmt: skip
    view = BatchView.of({"batch": {n: torch.from_numpy(v.copy()) for n, v in fields.items()}})
    context = Context(1, "update_actor", "after", Settings(), check="probe", code="DPA501")
    [finding] = explain_gap(
        view, context, bad, suspect="old_log_probs", witness="update_log_probs", noise=FP32
    )
    assert finding.causes[0] == "precision"
    assert finding.evidence["max gap"] == pytest.approx(0.01, rel=1e-3)
