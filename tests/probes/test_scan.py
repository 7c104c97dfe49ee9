"""One pass in row blocks gives what a pass over everything gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit import fast
from dataproto_audit.batch import BatchView
from dataproto_audit.probes.scan import (
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    any_of,
    masked_gap,
    masked_range,
    scan,
    sum_of,
)


def _view(seed: int, rows: int = 7, prompt: int = 3, width: int = 5) -> BatchView:
    random = np.random.default_rng(seed)
    attention = (random.random((rows, prompt + width)) < 0.7).astype(np.int64)
    fields = {
        "responses": random.integers(0, 9, (rows, width)),
        "attention_mask": attention,
        "response_mask": attention[:, prompt:] * (random.random((rows, width)) < 0.8),
        "old_log_probs": -random.random((rows, width)).astype(np.float32),
        "rollout_log_probs": -random.random((rows, width)).astype(np.float32),
    }
    return BatchView.of({name: torch.from_numpy(value) for name, value in fields.items()})


STATS = (
    RESPONSE_LENGTH,
    PROMPT_LENGTH,
    masked_range("old_log_probs"),
    masked_gap("old_log_probs", "rollout_log_probs"),
    any_of("any", ("responses",), lambda block: bool((block["responses"] == 8).any())),
    sum_of("sum", ("responses",), lambda block: block["responses"].sum()),
)


def _flat(value: Any) -> list[float]:
    parts = value if isinstance(value, tuple) else [value]
    return np.concatenate([np.atleast_1d(np.asarray(part, float)) for part in parts]).tolist()


@given(seed=st.integers(0, 1000), rows=st.integers(1, 8))
def test_blocks_of_any_size_give_the_same(seed: int, rows: int) -> None:
    view = _view(seed)
    view.tensors["response_mask"][:, 0] = 1  # a block without tokens has the range 0..0
    whole, blocked = scan(view, STATS, rows=7), scan(view, STATS, rows=rows)
    assert list(whole) == list(blocked) == [stat.name for stat in STATS]
    for name in whole:
        assert _flat(blocked[name]) == pytest.approx(_flat(whole[name]), rel=1e-12, abs=1e-12)


def test_lengths_are_counts_of_the_attention() -> None:
    view = _view(1)
    stats, attention = scan(view, STATS), view.numpy("attention_mask")
    assert stats["prompt_length"].tolist() == attention[:, :3].sum(1).tolist()
    assert stats["response_length"].tolist() == attention[:, 3:].sum(1).tolist()


def test_the_gap_by_hand() -> None:
    view = _view(2)
    gap = scan(view, STATS)["gap:old_log_probs:rollout_log_probs"]
    diff = (view.numpy("old_log_probs") - view.numpy("rollout_log_probs")).astype(np.float64)
    used = view.numpy("response_mask") != 0
    assert gap.tokens == used.sum()
    assert gap.largest == pytest.approx(np.abs(diff)[used].max(), rel=1e-6)
    assert gap.mean(gap.absolute) == pytest.approx(np.abs(diff)[used].mean(), rel=1e-6)
    assert gap.mean(gap.signed) == pytest.approx(diff[used].mean(), rel=1e-6)
    assert gap.k3 == pytest.approx((np.expm1(diff) - diff)[used].sum(), rel=1e-5)


def test_cells_that_are_not_finite_are_left_out_of_the_gap_and_kept_in_the_range() -> None:
    view = _view(3)
    view.tensors["response_mask"][:] = 1
    view.tensors["old_log_probs"][2, 1] = float("nan")
    stats = scan(view, STATS, rows=2)
    gap = stats["gap:old_log_probs:rollout_log_probs"]
    assert gap.tokens == 34
    assert np.isfinite([gap.largest, gap.absolute, gap.signed, gap.k3]).all()
    assert np.isnan(stats["range:old_log_probs"]).all()


def test_an_empty_mask_has_no_gap() -> None:
    view = _view(4)
    view.tensors["response_mask"][:] = 0
    stats = scan(view, STATS)
    gap = stats["gap:old_log_probs:rollout_log_probs"]
    assert (gap.tokens, gap.largest, gap.mean(gap.absolute)) == (0, 0.0, 0.0)
    assert stats["range:old_log_probs"].tolist() == [0.0, 0.0]


def test_a_batch_without_rows_has_no_statistics() -> None:
    view = BatchView.of({"responses": torch.zeros((0, 3), dtype=torch.int64)})
    assert scan(view, [RESPONSE_LENGTH]) == {}


def test_a_statistic_that_two_probes_need_is_computed_once() -> None:
    calls = []
    stat = sum_of("counted", ("responses",), lambda block: calls.append(1) or 1)
    assert scan(_view(5), [stat, stat], rows=7) == {"counted": 1}
    assert len(calls) == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_the_range_is_that_of_the_trained_cells(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the compiled loops, and where a block has no trained cell."""
    monkeypatch.setattr(fast, "SMALL", 0 if compiled else 1 << 60)
    monkeypatch.setattr(fast, "PAYS_AFTER", 0)
    view = _view(6)
    view.tensors["response_mask"][:3] = 0
    values, used = view.numpy("old_log_probs"), view.numpy("response_mask") != 0
    assert used.any()
    found = scan(view, STATS, rows=3)["range:old_log_probs"]
    assert found.tolist() == [values[used].min(), values[used].max()]
