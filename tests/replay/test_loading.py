"""What a file has that no smaller one could."""

import json

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.replay.convert import convert
from dataproto_audit.replay.loading import recording_with


def completions(path, *, odd):
    """A file of TRL: two prompts with four completions each; one advantage may be another's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = [1.0, -1.0, 1.0, -1.0] * 2
    told = [-1.0, *made[1:]] if odd else made
    table = {"step": [1] * 8, "prompt": ["a"] * 4 + ["b"] * 4, "completion": list("cdefghij"),
             "score": made, "advantage": told}  # fmt: skip
    pq.write_table(pa.table(table), path)
    return path


def test_what_is_wrong_with_a_file_as_a_whole_is_named(tmp_path):
    path = completions(tmp_path / "completions_00001.parquet", odd=True)
    for code in (None, "DPA408"):
        with pytest.raises(UsageError, match="DPA408, which is of the file as a whole") as error:
            recording_with(path, code=code, stage=None)
        assert error.value.code == "DPA851"
    with pytest.raises(UsageError, match="no finding DPA304"):
        recording_with(path, code="DPA304", stage=None)


def test_a_healthy_one_has_no_finding(tmp_path):
    path = completions(tmp_path / "completions_00001.parquet", odd=False)
    with pytest.raises(UsageError, match="The checks find nothing in it"):
        recording_with(path, code=None, stage=None)


def test_a_folder_may_be_called_by_a_version(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "a", "output": "b", "score": 1.0, "step": 1}) + "\n")
    assert convert(path, tmp_path / "run.v2")["form"] == "trace"
    with pytest.raises(UsageError, match="no such form"):
        convert(path, tmp_path / "run.safetensor")


def test_a_file_that_cannot_be_read_does_not_keep_the_others_from_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "empty.pkl").touch()
    with pytest.raises(UsageError):
        convert(folder, tmp_path / "none")
    completions(folder / "completions_00001.parquet", odd=False)
    answer = convert(folder, tmp_path / "t")
    assert answer["batches"] == 1
    assert answer["left_out"][0].startswith("unreadable: ")
    assert "empty.pkl" in answer["left_out"][0]
