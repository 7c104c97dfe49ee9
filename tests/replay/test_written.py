"""What shrink writes opens again and shows the finding; the test file runs by itself."""

import ast
import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding
from dataproto_audit.probes import Settings
from dataproto_audit.replay.example import _literal
from dataproto_audit.replay.example import test_source as source_of
from dataproto_audit.replay.loading import recording_with, recordings
from dataproto_audit.replay.recording import Piece, Recording, audit
from dataproto_audit.replay.shrink import Shrunk, shrink
from dataproto_audit.replay.written import write_recording, write_shrunk

from ._recorded import lone, sides

KEYS = {"code", "rows", "groups", "tokens", "predicate_calls", "out_dir", "test_file"}


def run_tests(path):
    """Every test of a file, in a namespace of its own."""
    names = runpy.run_path(str(path))
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


@pytest.mark.parametrize(
    "name", ["rows_filtered_in_reward", "divided_by_padded_width", "uid_per_row"]
)
def test_boundaries_become_a_trace_and_a_test(name, tmp_path):
    bad, good, _ = sides(name)
    shrunk = shrink(bad, good=good)
    answer = write_shrunk(shrunk, tmp_path / "out")
    assert answer.keys() >= KEYS
    assert answer == {**json.loads((tmp_path / "out" / "shrink.json").read_text())}
    run_tests(answer["test_file"])
    again = recording_with(tmp_path / "out" / "trace", code=answer["code"], stage=answer["stage"])
    assert shrunk.finding.code in {s.finding.code for s in audit(again)}


def test_a_batch_alone_becomes_a_batch(tmp_path):
    bad, _, _ = sides("probabilities")
    shrunk = shrink(lone(bad, "advantage"), code="DPA302")
    answer = write_shrunk(shrunk, tmp_path / "out")
    run_tests(answer["test_file"])
    config = str(tmp_path / "out" / "config.json")
    [again] = recordings(tmp_path / "out" / "batch.safetensors", config=config)
    assert "DPA302" in {s.finding.code for s in audit(again)}


def test_the_example_reads_well(tmp_path):
    bad, _, _ = sides("probabilities")
    shrunk = shrink(lone(bad, "advantage"), code="DPA302")
    source = source_of(shrunk, name="test_x.py")
    assert source.startswith('"""DPA302: ')
    assert "1 of 48 rows" in source
    assert "torch.tensor([[" in source
    assert "NAN" not in source
    assert len(source.splitlines()) < 50
    assert all(len(line) <= 120 for line in source.splitlines())


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("x")
    bad, _, _ = sides("probabilities")
    with pytest.raises(UsageError, match="not empty: it holds kept"):
        write_shrunk(shrink(bad, code="DPA302"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    "value",
    [
        1, True, None, "a 'b' \"c\" \n é", [1, (2,), (3, 4), ()], {"a": {1: 2.5}}, 0.1, -7e-9, 1e30,
        float("inf"), float("-inf"), b"\x00x", float(np.float32(0.1)),
        torch.tensor([[1.5, float("inf")]]), torch.zeros(0, 3), torch.tensor([True, False]),
        torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.1], dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_literals_give_their_values_again(value):
    again = eval(_literal(value), {"torch": torch, "NAN": float("nan"), "INF": float("inf")})
    if isinstance(value, torch.Tensor):
        assert again.dtype == value.dtype
        assert again.shape == value.shape
        assert torch.equal(again, value)
    else:
        assert again == value
        assert type(again) is type(value)


def test_other_literals():
    assert _literal(float("nan")) == "NAN"
    assert _literal(np.array([1, "a"], dtype=object)) == '[1, "a"]'
    assert _literal(np.float32(0.5)) == "0.5"
    assert eval(_literal(object())).startswith("<object")


HOSTILE = 'x"""\nraise SystemExit("owned")\n"""\\'


def test_nothing_of_the_file_becomes_code(tmp_path):
    batch = {
        "batch": {HOSTILE: torch.ones(1, 1)},
        "non_tensor_batch": {"uid": np.array([HOSTILE], object)},
        "meta_info": {HOSTILE: HOSTILE},
    }
    piece = Piece(HOSTILE, "after", batch, {HOSTILE: HOSTILE}, 1)
    finding = Finding(
        "DPA302", "fail", HOSTILE, HOSTILE, HOSTILE, row_keys=(HOSTILE,), expected=HOSTILE,
        actual=HOSTILE,
    )  # fmt: skip
    sizes = {"rows": 1, "groups": 1, "tokens": 1}
    for lonely in (True, False):
        recording = Recording((piece,), Settings(adv_estimator=HOSTILE), {HOSTILE: 1.0}, lonely)
        shrunk = Shrunk(recording, None, finding, 1, 0.0, sizes, sizes, "")
        tree = ast.parse(source_of(shrunk, name=HOSTILE))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "SystemExit" not in names
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        assert HOSTILE in {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        answer = write_shrunk(shrunk, tmp_path / str(lonely))
        assert Path(answer["test_file"]).name == "test_dpa302_x_raise_systemexit_owned.py"


def test_metrics_are_kept_in_the_trace(tmp_path):
    bad, _, _ = sides("uid_per_row")
    write_recording(replace(bad, metrics={"actor/lr": 0.25}), tmp_path)
    assert list(recordings(tmp_path / "trace"))[-1].metrics["actor/lr"] == 0.25
