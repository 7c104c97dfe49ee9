"""Checksums of what lies in a trace: what was changed afterwards is not taken for the record."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.trace import Trace, write_step


def exchanged(folder: Path, name: str) -> None:
    """Exchange the first two rows of a stored tensor, as an edit by hand would."""
    [path] = [p for p in folder.rglob("tensors.safetensors") if name in load_file(p)]
    held = load_file(path)
    held[name] = held[name][[1, 0, *range(2, len(held[name]))]].contiguous()
    save_file(held, path)


def test_exchanged_rows_are_seen_where_a_field_is_read_whole(tmp_path: Path) -> None:
    batch = {"batch": {"old_log_probs": torch.arange(12.0).reshape(4, 3)}}
    write_step(tmp_path, 1, [("old_log_prob", batch, {})])
    exchanged(tmp_path, "old_log_probs")
    [boundary] = Trace(tmp_path).step(1).boundaries
    assert boundary.tensor("old_log_probs", [3]).tolist() == [[9.0, 10.0, 11.0]]
    with pytest.raises(UsageError, match=r"cannot be read .it is not what was recorded"):
        boundary.view()
    with pytest.raises(UsageError, match="DPA820"):
        read_batches(tmp_path)


def test_objects_that_were_edited_are_seen(tmp_path: Path) -> None:
    batch = {"non_tensor_batch": {"uid": np.array(["a", "b"], object)}}
    write_step(tmp_path, 1, [("rollout", batch, {})])
    [path] = tmp_path.rglob("objects.json")
    path.write_text(path.read_text().replace('"a"', '"c"'))
    [boundary] = Trace(tmp_path).step(1).boundaries
    with pytest.raises(UsageError, match=r"objects\.json: it cannot be read .it is not what"):
        boundary.array("uid")


def test_a_trace_without_sums_is_read_and_its_fields_are_compared(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    batch = {"batch": {"old_log_probs": torch.arange(12.0).reshape(4, 3)}}
    write_step(tmp_path, 1, [("old_log_prob", batch, {})])
    [path] = tmp_path.rglob("boundary.json")
    head = json.loads(path.read_text())
    assert set(head.pop("sums")) == {"old_log_probs", "objects.json"}
    path.write_text(json.dumps(head))
    [saved] = read_batches(tmp_path)
    assert torch.equal(saved.tensors["old_log_probs"], batch["batch"]["old_log_probs"])
    [tensors] = tmp_path.rglob("tensors.safetensors")
    save_file({"old_log_probs": torch.ones(4, 3)}, tensors)
    with pytest.raises(UsageError, match="old_log_probs is not what was recorded"):
        read_batches(tmp_path)
