"""Which files of a folder are looked into."""

import pickle

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import is_folder, read_folder
from dataproto_audit.dump.readers.walk import data_files, is_run_folder

PICKLE = pickle.dumps({"x": torch.zeros(1)})


def written(root, *names, data=PICKLE):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(root):
    return [file.relative_to(root).as_posix() for file in data_files(root)]


def test_batches_are_known_by_name_or_by_their_first_bytes(tmp_path):
    written(tmp_path, "b.pkl", "sub/a.pt", "sub/c.jsonl", "batch", "batch.dump")
    written(tmp_path, "run", "x.cfg", data=b"#!/bin/sh\n")
    written(tmp_path, "zip.whl", data=b"PK\x03\x04")
    written(tmp_path, "torch", data=b"PK\x03\x04")
    written(tmp_path, "m.safetensors", "package.json", "notes.md", ".hidden.pkl", "pytorch.bin")
    assert names(tmp_path) == ["b.pkl", "batch", "batch.dump", "sub/a.pt", "sub/c.jsonl", "torch"]


def test_a_name_of_a_batch_is_looked_into_though_it_is_empty(tmp_path):
    written(tmp_path, "a.pkl", "_SUCCESS", data=b"")
    assert names(tmp_path) == ["a.pkl"]


@pytest.mark.parametrize("folder", [".venv", ".git", "node_modules", "lib/site-packages", "env"])
def test_folders_of_other_things_are_passed_over(folder, tmp_path):
    written(tmp_path, f"{folder}/deep/a.pkl", "mine/a.pkl")
    if folder == "env":
        (tmp_path / "env/pyvenv.cfg").touch()
    assert names(tmp_path) == ["mine/a.pkl"]


def test_a_hidden_folder_that_is_named_is_read(tmp_path):
    written(tmp_path, ".dumps/a.pkl")
    assert names(tmp_path / ".dumps") == ["a.pkl"]


def test_a_run_folder_is_named_as_such(tmp_path):
    run = tmp_path / "reports/run1"
    written(run, "tables/rows.parquet", "model/model.safetensors", "config.yaml")
    written(tmp_path, "a.pkl")
    assert is_run_folder(run)
    assert not is_run_folder(tmp_path)
    assert names(tmp_path) == ["a.pkl"]
    with pytest.raises(UsageError, match=r"run1 is a run folder.*no batches.*report"):
        read_folder(run)


def test_what_can_be_no_path_is_a_usage_error(tmp_path):
    assert is_folder(tmp_path)
    assert not is_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"DPA810 .*cannot be read: File name too long"):
        is_folder(tmp_path / ("x" * 5000))
