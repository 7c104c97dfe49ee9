"""From where on a row, or a token, stands out (DPA305, DPA310 to DPA312)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Truth, audit, own, own_array, row_of, where

OLD, ROLLOUT, REF = "old_log_probs", "rollout_log_probs", "ref_log_prob"
AT = "old_log_prob"
HALF = Options(dtype="bfloat16", prompts=8, balanced=False)
WIDE = Options(rollout_dtype="bfloat16", prompts=8, balanced=False, response_width=8, truncated=32)
"""Rows of eight trained tokens each; old log-probs are float32, and so may be anything."""
RECORDED = Options(recorded=True, micro_rows=4, balanced=False)
STILL = Options(exact=True, step=2, step_drift=0.0, balanced=False)


def gaps(of_cells: Any, usual: float = 0.001) -> Any:
    """Old log-probs that lie ``usual`` nats from the engine's, and some cells further."""

    def change(b: Boundary) -> Truth:
        old, rollout = own(b, OLD), b.batch.batch[ROLLOUT]
        mask = b.batch.batch["response_mask"] != 0
        assert bool(mask.all())
        old[:] = rollout.float() - usual
        for (row, column), by in of_cells.items():
            old[row, column] = rollout[row, column].float() - by
        return Truth("")

    return change


def rows_alike(of_cells: Any, usual: float = 0.001) -> list[Any]:
    ran = audit(WIDE, {AT: gaps(of_cells, usual)}, until=AT)
    return ran.findings("rows_alike", AT)


def whole_row(row: int, by: float, tokens: int = 8) -> dict[tuple[int, int], float]:
    return {(row, column): by for column in range(tokens)}


@pytest.mark.parametrize(("by", "severity"), [(0.09, "info"), (0.12, "fail")])
def test_a_row_stands_out_from_a_tenth_of_a_nat_on(by: float, severity: str) -> None:
    [finding] = rows_alike(whole_row(5, by))
    assert finding.severity == severity
    assert finding.rows == (5,)


@pytest.mark.parametrize(("by", "severity"), [(0.38, "info"), (0.42, "fail")])
def test_and_from_twenty_times_the_median_on(by: float, severity: str) -> None:
    [finding] = rows_alike(whole_row(5, by), usual=0.02)
    assert finding.severity == severity


def test_gaps_that_half_precision_has_are_not_told() -> None:
    assert rows_alike({(3, 2): 0.029}) == []
    [finding] = rows_alike({(3, 2): 0.032, (4, 4): 0.04})
    assert (finding.severity, finding.columns) == ("info", {3: (2,), 4: (4,)})
    assert finding.actual == "up to 0.04 on 2 tokens"


@pytest.mark.parametrize(("tokens", "severity"), [(2, "info"), (3, "fail")])
def test_three_tokens_of_a_row_are_no_single_ones(tokens: int, severity: str) -> None:
    [finding] = rows_alike(whole_row(5, 0.5, tokens))
    assert finding.severity == severity


def test_cells_of_the_row_count_from_twice_the_rest_on() -> None:
    cells = {**whole_row(5, 0.5), (5, 2): 0.0019, (5, 6): 0.0022, (7, 0): 0.001}
    [finding] = rows_alike(cells)
    assert finding.columns == {5: (0, 1, 3, 4, 5, 6, 7)}
    assert finding.evidence["rows"] == 1
    assert finding.evidence["largest gap of the others"] == pytest.approx(0.001, rel=0.01)
    assert finding.actual == "up to 0.5 nats on 7 tokens"
    multiple = (6 * np.exp(0.5) + 250 * np.exp(0.001)) / (32 * 8)
    assert finding.evidence["token_mult_prob_error"] == pytest.approx(multiple, rel=1e-4)
    assert finding.field == OLD


def test_far_tokens_make_rows_where_the_batch_is_far_off_as_a_whole() -> None:
    """A mean of exp(gap) above 1.05: 256 tokens, of which one is 2.6 or 2.7 nats off."""
    [near] = rows_alike({(5, 0): 2.6})
    [far] = rows_alike({(5, 0): 2.8})
    assert (near.severity, far.severity) == ("info", "fail")


def _two_versions(**gap_of: float) -> Any:
    def change(b: Boundary) -> Truth:
        versions = own_array(b, "weight_version")
        versions[:] = 3
        versions[[2, 7]] = 2
        old, rollout = own(b, OLD), b.batch.batch[ROLLOUT]
        old[:] = rollout
        old[2, 0] -= gap_of["older"]
        old[7, 0] -= gap_of.get("other", 0.0)
        old[4, 0] -= gap_of.get("newest", 0.0)
        return Truth("")

    return change


@pytest.mark.parametrize(
    ("gap_of", "rows"),
    [
        ({"older": 0.09}, None), ({"older": 0.11}, (2,)),
        ({"older": 0.39, "newest": 0.02}, None), ({"older": 0.41, "newest": 0.02}, (2,)),
        ({"older": 0.5, "other": 0.11}, (2, 7)), ({"older": 0.5, "other": 0.09}, (2,)),
        ({"older": 5.0, "other": 0.29, "newest": 0.15}, (2,)),
        ({"older": 5.0, "other": 0.31, "newest": 0.15}, (2, 7)),
    ],
)  # fmt: skip
def test_rows_of_older_weights_stand_out_against_the_newest(
    gap_of: dict[str, float], rows: tuple[int, ...] | None
) -> None:
    ran = audit(RECORDED, {AT: _two_versions(**gap_of)}, until=AT)
    found = ran.findings("one_weight_version", AT)
    assert [f.rows for f in found] == ([] if rows is None else [rows])
    if found:
        assert found[0].actual == f"up to {gap_of['older']:.4g} nats in rows of older versions"
        assert found[0].expected.endswith("as rows of version 3")


def test_a_version_that_sampled_some_rows_may_score_them_all() -> None:
    def scored(b: Boundary) -> Truth:
        _two_versions(older=0.0)(b)
        b.batch.meta_info["old_log_prob_version"] = 2
        return Truth("")

    assert audit(RECORDED, {AT: scored}, until=AT).outcome("one_weight_version", AT).kind == (
        "passed"
    )


def test_bits_that_differ_are_counted() -> None:
    def two(b: Boundary) -> Truth:
        values = own(b, OLD)
        for cell in ((3, 0), (6, 0)):
            values[cell] = torch.nextafter(values[cell], torch.tensor(-100.0))
        return Truth("")

    [finding] = audit(Options(exact=True), {AT: two}, until=AT).findings("exactly_equal", AT)
    assert finding.actual == "2 tokens differ"
    assert finding.columns == {3: (0,), 6: (0,)}


# -- the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("moved", "kind"), [(8, "failed"), (9, "not_applicable")])
def test_half_of_the_rows_have_to_be_equal(moved: int, kind: str) -> None:
    def change(b: Boundary) -> Truth:
        own(b, REF)[:moved, 0] -= 0.3
        return Truth("")

    ran = audit(STILL, {"ref_log_prob": change}, until="ref_log_prob")
    assert ran.outcome("ref_equal_elsewhere", "ref_log_prob").kind == kind


def test_rows_without_a_trained_token_are_not_equal() -> None:
    def change(b: Boundary) -> Truth:
        mask = own(b, "response_mask")
        mask[4:] = 0
        mask[:4] = (b.batch.batch["attention_mask"][:4, -mask.shape[1] :] != 0).long()
        own(b, REF)[:2, 0] -= 0.3
        return Truth("")

    ran = audit(STILL, {"ref_log_prob": change}, until="ref_log_prob")
    outcome = ran.outcome("ref_equal_elsewhere", "ref_log_prob")
    assert outcome.kind == "not_applicable"  # two rows are too few


@pytest.mark.parametrize("by", [(-0.3, -0.2), (0.02, 0.3)])
def test_gaps_in_one_direction_are_a_row_and_no_dropout(by: tuple[float, float]) -> None:
    def change(b: Boundary) -> Truth:
        row = row_of(b, 4)
        own(b, REF)[row, :2] += torch.tensor(by)
        return where(REF, np.arange(16)[:, None] + 0 * np.arange(4)[None] < 0)

    ran = audit(STILL, {"ref_log_prob": change}, until="ref_log_prob")
    [finding] = ran.findings("ref_equal_elsewhere", "ref_log_prob")
    assert finding.causes == ("row_outlier", "dropout_on")
    assert list(finding.columns.values()) == [(0, 1)]
    assert finding.evidence == {"both directions": False}
    first = 0 if abs(by[0]) > 0.1 else 1
    assert finding.actual.startswith(f"0.3 nats apart, first at row {finding.rows[0]}")
    assert finding.actual.endswith(f"column {first}")


# -- the first mini-batch --------------------------------------------------------------------------


def _updated(of_row: dict[int, float], usual: float, options: Options | None = None) -> Any:
    def change(b: Boundary) -> Truth:
        new, old = own(b, "update_log_probs"), b.batch.batch[OLD]
        new[:] = old - usual
        for row, by in of_row.items():
            new[row] = old[row] - by
        return Truth("")

    options = options or Options(balanced=False)
    ran = audit(options, {"update_actor": change}, until="update_actor")
    return ran.findings("update_rows_alike", "update_actor")


@pytest.mark.parametrize(("by", "found"), [(1.9e-4, False), (2.2e-4, True)])
def test_a_row_of_the_update_stands_out_above_the_floor(by: float, found: bool) -> None:
    assert bool(_updated({3: by}, 0.0)) is found


@pytest.mark.parametrize(("by", "found"), [(3.8e-4, False), (4.3e-4, True)])
def test_and_above_twenty_times_the_usual_row(by: float, found: bool) -> None:
    findings = _updated({3: by}, 2e-5)
    assert bool(findings) is found
    if found:
        assert findings[0].rows == (3,)
        assert findings[0].evidence["median of the rows"] == pytest.approx(2e-5, rel=0.1)
        assert findings[0].actual == f"up to {by:.3g} nats in 1 rows"


def test_of_three_rows_none_is_usual() -> None:
    for prompts, found in ((1, False), (2, True)):
        options = replace(Options(balanced=False), prompts=prompts, n=3 if prompts == 1 else 2,
                          ranks=1, truncated=0, one_token=0)  # fmt: skip
        assert bool(_updated({1: 8e-4}, 0.0, options)) is found
