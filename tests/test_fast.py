import numpy as np
import pytest
import torch

from dataproto_audit import fast
from dataproto_audit.batch import BatchView
from dataproto_audit.fingerprint import row_hash
from dataproto_audit.probes.registry import PROBES
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


def _healthy(rows=24, prompt=5, response=7):
    """Left-padded prompts and right-padded responses of int64, with positions and log-probs."""
    rng = np.random.default_rng(2)
    shown = np.arange(prompt) >= rng.integers(0, prompt, (rows, 1))
    mask = np.arange(response) < rng.integers(0, response + 1, (rows, 1))
    on = np.concatenate([shown, mask], 1).astype(np.int64)
    ids = rng.integers(3, 90, on.shape) * on
    fields = {
        "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids,
        "attention_mask": on, "position_ids": np.maximum(on.cumsum(1) - 1, 0),
        "response_mask": on[:, prompt:],
        "old_log_probs": np.where(mask, -rng.random(mask.shape), 0.0).astype(np.float32),
    }  # fmt: skip
    return {name: np.ascontiguousarray(array) for name, array in fields.items()}


def _spoiled(name, row, column, value):
    def spoil(fields):
        fields[name][row, column] = value

    return spoil


def _hole(fields):
    row = int(fields["response_mask"].sum(1).argmax())
    fields["attention_mask"][row, 6] = 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fields: None,
        _hole,
        _spoiled("position_ids", 3, 11, 99),
        _spoiled("position_ids", 4, 4, 77),
        _spoiled("input_ids", 5, 1, 91),
        _spoiled("input_ids", 6, 9, 91),
        _spoiled("responses", 7, 6, 55),
        _spoiled("attention_mask", 8, 4, 2),
        _spoiled("response_mask", 9, 0, -1),
        _spoiled("old_log_probs", 10, 0, np.nan),
        _spoiled("old_log_probs", 11, 0, np.inf),
        _spoiled("old_log_probs", 11, 0, -np.inf),
        lambda fields: fields["response_mask"].fill(0),
        lambda fields: fields["attention_mask"].fill(1),
        lambda fields: fields["attention_mask"].fill(0),
    ],
)
def test_every_statistic_of_a_batch_is_the_same(compiled, spoil):
    fields = _healthy()
    spoil(fields)
    batch = {name: torch.from_numpy(array) for name, array in fields.items()}
    batch["advantages"] = batch["old_log_probs"].double()
    stats = {stat.name: stat for probe in PROBES.values() for stat in probe.stats}
    ready = [stat for stat in stats.values() if set(stat.needs) <= set(batch)]
    assert {"positions", "ids_layout", "padding", "unattended_ids", "advantage_range"} <= {
        stat.name for stat in ready
    }

    def measured():
        return scan(BatchView.of({"batch": batch, "meta_info": {}}), ready, rows=9)

    quick = measured()
    compiled()
    slow = measured()
    assert quick.keys() == slow.keys()
    for name, value in quick.items():
        if "gap:" not in name:
            np.testing.assert_array_equal(value, slow[name], err_msg=name)


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
