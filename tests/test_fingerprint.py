"""Fingerprints of rows: equal for equal rows whatever carries them, other for any one change."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dataproto_audit.fingerprint import frozen, object_hash, row_hash


@dataclass
class Turn:
    text: str
    score: float


class Opaque:
    """Compares by identity, as most classes do."""


def test_integers_count_by_value_whatever_their_width() -> None:
    ids = np.array([[3, 0, 7], [3, 0, 8]])
    wanted = row_hash(ids)
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        assert np.array_equal(row_hash(ids.astype(dtype)), wanted)
    assert wanted[0] != wanted[1]
    assert np.array_equal(row_hash(ids > 0), row_hash((ids > 0).astype(np.int64)))
    negative = np.array([[-1, 5]])
    assert np.array_equal(row_hash(negative), row_hash(negative.astype(np.int16)))


def test_a_nan_equals_itself_and_zero_rows_and_columns_are_fine() -> None:
    values = np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)
    assert np.array_equal(row_hash(values), row_hash(values.copy()))
    assert len(row_hash(np.zeros((0, 4)))) == 0
    assert len(row_hash(np.zeros((3, 0)))) == 3
    assert len(row_hash(np.zeros(5))) == 5


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_floats_of_every_width(dtype: type) -> None:
    values = np.array([[0.5, -1.25], [0.5, -1.5]], dtype)
    first, second = row_hash(values)
    assert first != second


def test_large_and_non_contiguous_arrays_hash_like_their_rows() -> None:
    values = np.random.default_rng(0).normal(size=(900, 400))
    whole = row_hash(values)
    assert np.array_equal(whole[300:310], row_hash(values[300:310]))
    assert np.array_equal(row_hash(values.T), row_hash(np.ascontiguousarray(values.T)))


@given(
    hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)),
    st.integers(0, 1000),
    st.integers(min_value=1, max_value=2**62),
)
def test_one_other_cell_changes_one_fingerprint(array: np.ndarray, at: int, by: int) -> None:
    other = array.copy()
    other.flat[at % array.size] ^= by
    changed = row_hash(array) != row_hash(other)
    assert changed.tolist() == [bool((a != b).any()) for a, b in zip(array, other, strict=True)]


OBJECTS = [
    "text",
    b"bytes",
    None,
    True,
    3,
    2.5,
    float("nan"),
    np.float32("nan"),
    np.int64(4),
    [1, [2, "x"]],
    (1, 2),
    {"b": 1, "a": [None]},
    {3, 1},
    np.arange(3),
    np.eye(2),
    torch.ones(2, 3).bfloat16(),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    torch.eye(2).to_sparse(),
    Turn("hello", float("nan")),
    Opaque(),
]


@pytest.mark.parametrize("value", OBJECTS, ids=[type(o).__name__ for o in OBJECTS])
def test_copies_from_another_process_are_equal(value: object) -> None:
    travelled = pickle.loads(pickle.dumps(value))
    assert frozen(value) == frozen(travelled)
    assert np.array_equal(object_hash([value]), object_hash([travelled]))


def test_different_objects_differ() -> None:
    values = ["a", "b", 1, 2, [1], [2], {"a": 1}, {"a": 2}, Turn("a", 1.0), Turn("a", 2.0), None]
    assert len({hash(frozen(value)) for value in values}) == len(values)
    assert frozen(np.array([[1.0, 2.0]])) != frozen(np.array([[1.0, 3.0]]))
    assert frozen(torch.ones(2)) != frozen(torch.zeros(2))


def test_lists_and_arrays_of_one_axis_are_alike() -> None:
    assert frozen([1, 2]) == frozen(np.array([1, 2])) == frozen((1, 2))


def test_a_structure_without_end_has_an_end() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert hash(frozen(endless)) == hash(frozen(endless))


def test_texts_of_any_array_type_are_alike() -> None:
    texts = ["a", "bc"]
    assert np.array_equal(row_hash(np.array(texts)), row_hash(np.array(texts, object)))
    assert np.array_equal(object_hash([*texts, 3])[:2], object_hash(texts))
