"""``compare-backends``: what it refuses, what it answers, and its exit codes."""

import json
from functools import partial

import pytest
import torch

from dataproto_audit.commands import compare_backends as command
from dataproto_audit.commands import output
from dataproto_audit.trainer.compare.batches import demo_batch
from dataproto_audit.trainer.models import TinyModel, write_tiny_model


@pytest.fixture
def call(call):
    """``call(*args, check=CODE)`` runs the command in this process."""
    return partial(call, "compare-backends")


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(
        tmp_path / "model", TinyModel(charset="arithmetic", initializer_range=0.2)
    )


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        ((), "name a batch, or use --demo"),
        (("batch.pt", "--demo"), "One of the two"),
        (("batch.pt",), "Add --model FOLDER"),
        (("--demo", "--temperature", "0"), "must be positive"),
        (("--demo", "--layouts", "ddp:2"), "unknown layout 'ddp:2'"),
        (("--demo", "--layouts", ","), "names none"),
        (("--demo", "--layouts", "fsdp:2+ulysses=2"), "packed is off"),
        (("--demo", "--layouts", "megatron:tp=3"), "heads"),
        (("--demo", "--layouts", "fsdp:3", "--rows", "2"), "cuts them into 3 parts"),
        (("--demo", "--layouts", "fsdp:2+tokens=3", "--rows", "8"), "row cannot be split"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(call, monkeypatch, args, fragment):
    monkeypatch.setattr("dataproto_audit.trainer.compare.pool.Pool.start", None)
    assert fragment in call(*args, check=2).stderr


def test_a_file_without_a_batch_to_score_is_refused(call, tmp_path, model):
    torch.save({"rewards": torch.zeros(2, 3)}, tmp_path / "batch.pt")
    said = call(str(tmp_path / "batch.pt"), "--model", str(model), check=2).stderr
    assert "no batch with responses" in said


def test_a_model_of_another_vocabulary_or_without_weights_is_refused(call, tmp_path, model):
    batch = demo_batch(vocab_size=13, rows=4)
    tensors = dict(batch.batch.items())
    tensors["input_ids"] = tensors["input_ids"].clone()
    tensors["input_ids"][2, -1] = 99
    torch.save(tensors, tmp_path / "batch.pt")
    asked = (str(tmp_path / "batch.pt"), "--model", str(model), "--layouts", "fsdp:1")
    said = call(*asked, check=2).stderr
    assert "DPA851 input_ids holds 99 at row 2, column" in said
    (model / "model.safetensors").unlink()
    assert "DPA852" in call(*asked, check=2).stderr


def test_a_layout_that_differs_sets_the_exit_code(call, monkeypatch):
    entry = {
        "name": "fsdp:2", "agree": False, "wrong": ["max_abs_grad_diff"], "worst_term": "total",
        "max_abs_logprob_diff": 1e-7, "worst_logprob": [3, 1], "max_abs_entropy_diff": 1e-7,
        "rel_loss_diff": 1e-7, "max_abs_grad_diff": 0.5, "worst_gradient": "model.norm.weight",
        "rel_update_diff": 0.1, "peak_bytes": 2**20, "comm_bytes": 2**21, "startup_s": 1.0,
        "step_cpu_s": 0.5, "ranks": [{}], "first_wrong": "gradient model.norm.weight",
        "wrong_gradients": ["model.norm.weight", "lm_head.weight"], "gradient_factor": 0.125,
        "tolerance": {"max_abs_grad_diff": 1e-6},
    }  # fmt: skip
    answer = {"rows": 4, "tokens": 40, "model": "tiny", "layouts": [entry]}
    monkeypatch.setattr(command, "_answer", lambda *_: answer)
    said = call("--demo", check=1).stdout
    assert "fsdp:2: DIFFERS: max_abs_grad_diff" in said
    assert "row 3, column 1" in said
    assert "gradient 5.0e-01 of 1.0e-06 (model.norm.weight)" in said
    assert "; first in gradient model.norm.weight and 1 more, all 0.125 times" in said
    documents = len(output.printed)
    assert json.loads(call("--demo", "--json", check=1).stdout) == answer
    assert len(output.printed) == documents + 1, "an error after it must not be a second document"
    failed = {"name": "fsdp:2", "agree": False, "wrong": ["DPA864 gone."], "ranks": []}
    answer["layouts"] = [failed, entry]
    assert "fsdp:2: COULD NOT RUN: DPA864 gone." in call("--demo", check=1).stdout
    answer["layouts"] = [entry]
    gap = {
        "name": "model.layers.1", "max_abs_diff": 0.5, "worst": [2, 7], "rank": 1, "bound": 1e-3,
    }  # fmt: skip
    entry |= {"first_wrong": "model.layers.1", "layers": [gap]}
    said = call("--demo", "--layers", check=1).stdout
    assert "; first in model.layers.1 (rank 1, row 2, column 7: 5.0e-01)" in said
    entry |= {"max_abs_value_diff": 1e-7, "max_abs_value_grad_diff": 2e-7}
    assert "value 1.0e-07 (gradient 2.0e-07)" in call("--demo", check=1).stdout
    entry |= {"agree": True, "first_wrong": None}
    said = call("--demo", check=0).stdout
    assert "fsdp:2: agrees; 1 layers, worst model.layers.1 5.0e-01 of 1.0e-03" in said


@pytest.mark.engine
def test_a_saved_batch_is_compared_and_answered_in_json(call, tmp_path, model):
    tensors = dict(demo_batch(vocab_size=42, rows=5).batch.items())
    torch.save(tensors, tmp_path / "batch.pt")
    said = call(
        str(tmp_path / "batch.pt"), "--model", str(model), "--layouts", "fsdp:1+packed+fused",
        "--rows", "4", "--layers", "--json", check=0,
    )  # fmt: skip
    answer = json.loads(said.stdout)
    assert (answer["rows"], answer["made_fields"]) == (
        4, ["old_log_probs", "ref_log_prob", "advantages", "values", "returns"],
    )  # fmt: skip
    (layout,) = answer["layouts"]
    assert set(layout) >= {
        "name", "max_abs_logprob_diff", "max_abs_entropy_diff", "rel_loss_diff",
        "max_abs_grad_diff", "peak_bytes", "comm_bytes", "startup_s", "step_cpu_s", "agree",
        "max_abs_value_diff", "layers", "first_wrong",
    }  # fmt: skip
    assert layout["agree"] is True
    assert layout["ranks"][0]["held_bytes"]["parameters"] > 0
