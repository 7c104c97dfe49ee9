"""How far two healthy log-probs may lie apart."""

from __future__ import annotations

import numpy as np
import pytest

from dataproto_audit.probes.noise import FP32, HALF_NOISE, UNKNOWN, Noise, noise_between


@pytest.mark.parametrize(
    ("left", "right", "noise"),
    [
        ("float32", "float32", FP32),
        ("torch.float32", "fp32", FP32),
        ("float64", "double", FP32),
        ("bfloat16", "float32", HALF_NOISE),
        ("float32", "torch.float16", HALF_NOISE),
        ("fp8", "fp8", HALF_NOISE),
        (None, "float32", UNKNOWN),
        ("float32", None, UNKNOWN),
        ("", "", UNKNOWN),
    ],
)
def test_the_coarser_side_decides(left: str | None, right: str | None, noise: Noise) -> None:
    assert noise_between(left, right) is noise


def test_full_precision_bounds_every_token() -> None:
    gap = np.array([[0.9e-3, 1.2e-3], [1.2e-3, np.nan]])
    size = np.array([[-1.0, -1.0], [-10.0, -1.0]])  # large logits round more
    bad = FP32.exceeded(gap, size, np.ones((2, 2), bool))
    assert bad is not None
    assert bad.tolist() == [[False, True], [False, False]]


def test_masked_cells_do_not_count() -> None:
    gap = np.full((1, 2), 9.0)
    assert FP32.exceeded(gap, gap, np.zeros((1, 2), bool)) is None
    assert HALF_NOISE.exceeded(gap, gap, np.zeros((1, 2), bool)) is None


def test_half_precision_bounds_the_mean() -> None:
    gap = np.full((10, 100), 0.01)
    gap[3, 7] = 5.0
    mask = np.ones(gap.shape, bool)
    assert HALF_NOISE.exceeded(gap, -gap, mask) is None
    gap += 0.1
    bad = HALF_NOISE.exceeded(gap, -gap, mask)
    assert bad is not None
    assert bad.all()


def test_the_mean_of_few_tokens_scatters() -> None:
    assert HALF_NOISE.mean_of(1) == pytest.approx(0.25)
    assert HALF_NOISE.mean_of(0) == HALF_NOISE.mean_of(1)
    assert HALF_NOISE.mean_of(10**6) == pytest.approx(0.0502)


def test_a_bound_that_is_no_number_names_no_cell() -> None:
    gap = np.ones((1, 2))
    noise = Noise("told", None, 0.0, float("nan"), 0.1)
    assert noise.exceeded(gap, gap, np.ones((1, 2), bool)) is None


def test_bounds_themselves_are_still_within() -> None:
    """Of a token in full precision, and of the mean in half precision."""
    size = np.full((1, 1), -4.0)
    most = FP32.token + FP32.relative * 4.0
    one = np.ones((1, 1), bool)
    assert FP32.exceeded(np.full((1, 1), most), size, one) is None
    assert FP32.exceeded(np.full((1, 1), most * 1.001), size, one) is not None
    many = np.ones((10, 10), bool)
    bound = HALF_NOISE.mean_of(100)
    assert bound == 0.05 + 0.02
    assert HALF_NOISE.exceeded(np.full((10, 10), bound - 1e-9), size, many) is None
    above = HALF_NOISE.exceeded(np.full((10, 10), bound + 1e-6), size, many)
    assert above is not None
    assert above.all()


def test_only_cells_above_the_mean_are_named() -> None:
    gap = np.full((1, 100), 0.2)
    gap[0, :10] = 0.049
    gap[0, 10] = np.nan
    bad = HALF_NOISE.exceeded(gap, -gap, np.ones(gap.shape, bool))
    assert bad is not None
    assert np.flatnonzero(~bad[0]).tolist() == list(range(11))


def test_the_noise_models_as_documented() -> None:
    assert (FP32.token, FP32.relative, FP32.mean, FP32.above_zero) == (1e-3, 1e-4, 1e-4, 1e-4)
    for noise in (HALF_NOISE, UNKNOWN):
        assert (noise.token, noise.relative, noise.mean, noise.above_zero) == (None, 0.0, 0.05, 0.1)
