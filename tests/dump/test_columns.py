"""Values on their way into arrow: copied, checked, never bent."""

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import InternalError
from dataproto_audit.dump.columns import from_tuples, make_block
from dataproto_audit.dump.schema import TABLES

_STEPS = TABLES["steps"]


def _column(table: str, name: str, columns: dict[str, object]) -> pa.Array:
    at = [column.name for column in TABLES[table].given].index(name)
    return make_block(table, columns).arrays[at]


def _loss(**columns: object) -> dict[str, object]:
    return {"mini_batch": [0, 1], "term": "pg", "value": 0.0, **columns}


def test_arrays_are_copied() -> None:
    values = np.array([1.0, 2.0])
    array = _column("loss", "value", _loss(value=values))
    values[:] = 0
    assert array.to_pylist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "given_as",
    [
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        np.array([1.0, 2.0]),
        np.array([1, 2], object),
        [np.int64(1), np.int32(2)],
    ],
    ids=repr,
)
def test_every_kind_of_sequence_fits(given_as: object) -> None:
    array = _column("loss", "mini_batch", _loss(mini_batch=given_as))
    assert array.type == pa.int32()
    assert array.to_pylist() == [1, 2]


def test_scalars_are_repeated_and_missing_columns_are_empty() -> None:
    block = make_block("loss", _loss(normaliser=np.float32(2)))
    values = dict(zip([c.name for c in TABLES["loss"].given], block.arrays, strict=True))
    assert values["term"].to_pylist() == ["pg", "pg"]
    assert values["normaliser"].to_pylist() == [2.0, 2.0]
    assert values["recomputed"].to_pylist() == [None, None]


def test_only_scalars_make_one_row() -> None:
    assert make_block("steps", {"metric": "lr", "value": 1e-3}).rows == 1


def test_equal_scalars_of_different_kinds_are_not_confused() -> None:
    columns = {"metric": [1, True, 1.0], "value": 0.0}
    assert _column("steps", "metric", columns).to_pylist() == ["1", "True", "1.0"]
    for value, text in ((1, "1"), (True, "True"), (1.0, "1.0")):
        assert _column("steps", "metric", {"metric": value, "value": [0.0]}).to_pylist() == [text]


@pytest.mark.parametrize(
    ("columns", "fragment"),
    [
        ({"mini_batch": [0.5, 1]}, "mini_batch of loss takes i32"),
        ({"mini_batch": np.array([0.5, 1])}, "mini_batch of loss takes i32"),
        ({"mini_batch": np.array([np.nan, 1])}, "mini_batch of loss takes i32"),
        ({"mini_batch": np.array([1 << 40, 1])}, "mini_batch of loss takes i32"),
        ({"mini_batch": [1 << 40, 1]}, "mini_batch of loss takes i32"),
        ({"mini_batch": ["a", "b"]}, "mini_batch of loss takes i32"),
        ({"mini_batch": ["1", "2"]}, "mini_batch of loss takes i32"),
        ({"mini_batch": [0.5, None]}, "mini_batch of loss takes i32"),
        ({"mini_batch": np.zeros((2, 2))}, "one axis expected"),
        ({"mini_batch": [None, 1]}, "has empty cells"),
        ({"value": ["x", "y"]}, "value of loss takes f64"),
        ({"term": None}, "loss.term has empty cells"),
        ({"term": ["a"]}, "different lengths"),
        ({"wrong": [1, 2]}, "takes no column wrong"),
        ({"step": [1, 2]}, "takes no column step"),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, object], fragment: str) -> None:
    with pytest.raises(InternalError, match=fragment) as caught:
        make_block("loss", _loss(**columns))
    assert caught.value.code == "DPA903"


@pytest.mark.parametrize("rows", [[("a",)], [("a", 1.0, 2)], [("a", 1.0), ("b",)]])
def test_tuples_of_the_wrong_length_are_refused(rows: list[tuple[object, ...]]) -> None:
    with pytest.raises(InternalError, match="takes a tuple of 2 values"):
        from_tuples(_STEPS, rows)


def test_text_that_utf8_cannot_hold_is_escaped() -> None:
    columns = {"metric": ["ok", "bad \ud800"], "value": 0.0}
    assert _column("steps", "metric", columns).to_pylist() == ["ok", "bad \\ud800"]
    one = _column("steps", "metric", {"metric": "\udfff", "value": [1.0]})
    assert one.to_pylist() == ["\\udfff"]


@given(st.lists(st.tuples(st.text(), st.floats(allow_nan=True, width=64)), min_size=1))
def test_any_text_and_float_survive(rows: list[tuple[str, float]]) -> None:
    metric, value = (array.to_pylist() for array in from_tuples(_STEPS, rows).arrays)
    assert metric == [text for text, _ in rows]
    for stored, (_, number) in zip(value, rows, strict=True):
        assert stored == number or (math.isnan(stored) and math.isnan(number))


@given(st.lists(st.integers(-(1 << 70), 1 << 70), min_size=1))
def test_integers_survive_or_are_refused(numbers: list[int]) -> None:
    fits = all(-(1 << 31) <= number < 1 << 31 for number in numbers)
    columns = {"mini_batch": numbers, "term": "pg", "value": 0.0}
    if fits:
        assert _column("loss", "mini_batch", columns).to_pylist() == numbers
    else:
        with pytest.raises(InternalError):
            make_block("loss", columns)


def test_writing_tables_does_not_import_pandas(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from dataproto_audit.dump.tables import TableWriter\n"
        f"with TableWriter({str(tmp_path / 'tables')!r}) as tables:\n"
        "    tables.append('steps', {'metric': ['a', 'b'], 'value': np.ones(2)})\n"
        "    tables.append_rows('ranks', [('rollout', 0, 1, 2, 3, 4, None, 0.5)])\n"
        "    tables.flush_step(1)\n"
        "sys.exit('pandas' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
