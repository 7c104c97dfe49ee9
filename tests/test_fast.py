import numpy as np
import pytest
import torch

from dataproto_audit import fast
from dataproto_audit.batch import BatchView
from dataproto_audit.fingerprint import row_hash
from dataproto_audit.probes.scan import masked_gap, scan


@pytest.fixture
def compiled(monkeypatch):
    """Compiled loops from the first value on; calling it switches back to numpy."""
    monkeypatch.setattr(fast, "SMALL", 0)
    monkeypatch.setattr(fast, "PAYS_AFTER", 0)
    return lambda: monkeypatch.setattr(fast, "SMALL", 1 << 60)


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "uint8", "bool", "float32", "float64", "float16"]
)
def test_fingerprints_are_the_same_bit_for_bit(compiled, dtype):
    rng = np.random.default_rng(0)
    array = (rng.normal(size=(37, 11)) * 50).astype(dtype)
    if array.dtype.kind == "f":
        array[3, 4], array[5, 6], array[7, 8] = np.nan, -0.0, np.inf
    quick = row_hash(array)
    strided = row_hash(np.asfortranarray(array))
    compiled()
    assert np.array_equal(quick, row_hash(array))
    assert np.array_equal(quick, strided)


def test_gaps_are_the_same_within_rounding(compiled):
    rng = np.random.default_rng(1)
    left = rng.normal(size=(40, 13)).astype(np.float32)
    right = left + rng.normal(size=left.shape).astype(np.float32) * 5
    left[0, 0], right[1, 1], left[2, 2] = np.nan, -np.inf, 100.0
    mask = torch.from_numpy(rng.integers(0, 2, left.shape))
    fields = {"a": torch.from_numpy(left), "b": torch.from_numpy(right), "response_mask": mask}
    stat = masked_gap("a", "b")

    def measured():
        return scan(BatchView.of({"batch": fields, "meta_info": {}}), [stat], rows=16)[stat.name]

    quick = measured()
    compiled()
    slow = measured()
    assert np.array_equal(quick.row_max, slow.row_max)
    assert quick.tokens == slow.tokens
    assert quick[2:] == pytest.approx(slow[2:], rel=1e-12)


def test_small_arrays_and_short_processes_stay_with_numpy(monkeypatch):
    monkeypatch.setattr(fast, "_seen", 0)
    assert fast.loops(fast.SMALL - 1) is None
    assert fast.loops(fast.SMALL) is None
    assert fast._seen == fast.SMALL


def test_without_numba_numpy_does_the_work(monkeypatch):
    monkeypatch.setattr(fast, "PAYS_AFTER", 0)
    monkeypatch.setattr(fast.importlib.util, "find_spec", lambda name: None)
    fast._compiled.cache_clear()
    try:
        assert fast.loops(fast.SMALL) is None
    finally:
        fast._compiled.cache_clear()
