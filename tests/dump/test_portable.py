"""A batch as safetensors and JSON: equal when read again, and explained where it is broken."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.portable import is_safetensors, write_portable
from dataproto_audit.dump.readers import read_batches, read_folder
from dataproto_audit.testing.healthy import Options, boundaries
from dataproto_audit.testing.layouts import jagged


def objects(*values):
    out = np.empty(len(values), object)
    out[:] = values
    return out


def batch():
    return {
        "batch": {
            "old_log_probs": torch.tensor([[-0.5, float("nan")], [0.0, float("-inf")]]),
            "response_mask": torch.tensor([[True, False], [True, True]]),
            "half": torch.ones(2, 3, dtype=torch.bfloat16),
            "responses": torch.nested.as_nested_tensor(
                [torch.tensor([1, 2, 3]), torch.tensor([4])], layout=torch.jagged
            ),
        },
        "non_tensor_batch": {
            "uid": objects("a", "b"), "raw_prompt": objects([{"role": "user"}], (1, 2.5)),
            "text": np.array(["x", "yy"]), "tensors": objects(torch.ones(2), {"n": np.int64(3)}),
        },
        "meta_info": {"temperature": 0.7, "big": 10**30, "nan": float("nan"), "set": {1, 2}},
    }  # fmt: skip


def test_everything_comes_back(tmp_path):
    given = batch()
    assert write_portable(tmp_path / "b.safetensors", given) == ()
    for name in ("b.safetensors", "b.json"):
        [saved] = read_batches(tmp_path / name)
        assert (saved.kind, saved.rows) == ("safetensors", 2)
        for field, tensor in given["batch"].items():
            found = saved.tensors[field]
            assert (found.dtype, found.is_nested) == (tensor.dtype, tensor.is_nested)
            pairs = zip(found.unbind(), tensor.unbind(), strict=True)
            assert all(torch.allclose(a, b, equal_nan=True) for a, b in pairs), field
        assert saved.arrays["uid"].tolist() == ["a", "b"]
        assert saved.arrays["raw_prompt"].tolist() == [[{"role": "user"}], (1, 2.5)]
        assert saved.arrays["text"].tolist() == ["x", "yy"]
        assert torch.equal(saved.arrays["tensors"][0], torch.ones(2))
        assert saved.meta["big"] == 10**30
        assert np.isnan(saved.meta["nan"])
        assert saved.meta["set"] == {1, 2}
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["b.json", "b.safetensors"]
    assert len(read_folder(tmp_path).saved) == 1


def test_what_cannot_be_stored_is_named(tmp_path):
    given = {"batch": {}, "non_tensor_batch": {}, "meta_info": {"x": object()}}
    assert write_portable(tmp_path / "b.safetensors", given) == ("builtins.object",)
    [saved] = read_batches(tmp_path / "b.safetensors")
    assert saved.opaque == ("builtins.object",)


def test_tensors_without_a_json_of_ours_are_fields(tmp_path):
    save_file({"old_log_probs": torch.zeros(2, 3)}, tmp_path / "t.safetensors")
    (tmp_path / "t.json").write_text("{}")
    assert read_batches(tmp_path / "t.safetensors")[0].rows == 2
    with pytest.raises(UsageError, match="no file of batches"):  # it may be a model
        read_folder(tmp_path)


def change(path, **said):
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, **said}))


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"schema": 99}, "DPA821"),
        ({"schema": "x"}, "DPA821"),
        ({"fields": {"gone": {"kind": "padded"}}}, "DPA810"),
        ({"fields": 3}, "DPA810"),
        ({"meta_info": {"$": "mystery"}}, "DPA810"),
        ({"non_tensor_batch": {"uid": 3}}, "DPA810"),
    ],
)
def test_what_is_wrong_is_explained(said, code, tmp_path):
    write_portable(tmp_path / "b.safetensors", batch())
    change(tmp_path / "b.json", **said)
    with pytest.raises(UsageError, match=code) as error:
        read_batches(tmp_path / "b.safetensors")
    assert "\n" not in str(error.value)


def test_cut_off_tensors(tmp_path):
    write_portable(tmp_path / "b.safetensors", batch())
    data = (tmp_path / "b.safetensors").read_bytes()
    assert is_safetensors(data)
    (tmp_path / "b.safetensors").write_bytes(data[:-7])
    with pytest.raises(UsageError, match="DPA810"):
        read_batches(tmp_path / "b.safetensors")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="DPA802"):
        write_portable(tmp_path / "no" / "b.safetensors", batch())
    assert not os.listdir(tmp_path)


def test_a_jagged_step(tmp_path):
    made = jagged(list(boundaries(Options(prompts=2, n=2)))[8].batch)
    write_portable(tmp_path / "b.safetensors", made)
    [saved] = read_batches(tmp_path / "b.safetensors")
    assert saved.tensors["responses"].is_nested
