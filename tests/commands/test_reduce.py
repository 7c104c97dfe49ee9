"""shrink, bundle and convert from the command line: exit codes, keys, errors as one paragraph."""

import json

import pytest
import torch

from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.healthy import Options, boundaries

KEYS = {"code", "rows", "groups", "tokens", "predicate_calls", "out_dir", "test_file"}


@pytest.fixture
def batch(tmp_path):
    """A saved batch, one log-prob of which is positive."""
    made = list(boundaries(Options(prompts=4, n=4, step=2)))
    [after] = [b for b in made if (b.stage, b.when) == ("advantage", "after")]
    found = after.batch
    found.batch["old_log_probs"] = found.batch["old_log_probs"].clone()
    found.batch["old_log_probs"][5, 0] = 0.75
    path = tmp_path / "batch.pkl"
    assert isinstance(found, DataProto)
    found.save_to_disk(path)
    return path


def test_shrink_writes_a_batch_and_a_test(call, batch, tmp_path):
    done = call("shrink", batch, "--code", "DPA302", "-o", tmp_path / "out", "--json")
    answer = json.loads(done.stdout)
    assert answer.keys() >= KEYS
    assert (answer["code"], answer["rows"], answer["stage"]) == ("DPA302", 1, "old_log_prob")
    assert answer["out_dir"] == str(tmp_path / "out")
    # what it wrote is a finding for the other commands
    checked = call("check", tmp_path / "out" / "batch.safetensors", "--json", check=1)
    assert "DPA302" in {f["code"] for f in json.loads(checked.stdout)["findings"]}
    text = call("shrink", batch, "-o", tmp_path / "again").stdout
    assert "16 rows" in text
    assert "test_" in text


def test_shrink_with_a_predicate(call, batch, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def positive(batch):\n    return bool((batch['batch']['old_log_probs'] > 0).any())\n"
    )
    monkeypatch.chdir(tmp_path)
    done = call("shrink", batch, "--predicate", "mine:positive", "-o", tmp_path / "out", "--json")
    answer = json.loads(done.stdout)
    assert (answer["code"], answer["rows"], answer["test_file"]) == (None, 1, None)


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (("--code", "DPA999"), "has no finding DPA999"),
        (("--predicate", "nothing"), "no module:function"),
        (("--predicate", "json:nothing"), "has no attribute"),
        (("--predicate", "no_such_module:f"), "No module named"),
        (("--predicate", "json:__doc__"), "is no function"),
        (("--predicate", "a:b", "--code", "DPA302"), "both"),
        (("--predicate", "a:b", "--stage", "rollout"), "--predicate and --stage"),
        (("--predicate", "a:b", "--before", "x"), "--predicate and --before"),
    ],
)
def test_usage_errors_of_shrink(call, batch, tmp_path, args, fragment):
    done = call("shrink", batch, "-o", tmp_path / "out", *args, check=2)
    assert fragment in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_inputs_of_another_number_of_batches(call, batch, tmp_path, monkeypatch):
    from dataproto_audit.replay import loading

    one = list(loading.recordings(batch))
    for found, fragment in (([], "holds no batch"), (one * 2, "holds several batches")):
        monkeypatch.setattr(
            loading, "recordings", lambda path, found=found, **_: iter(
                found if "before" in str(path) else one
            )
        )  # fmt: skip
        said = call("shrink", batch, "--before", "before", "-o", tmp_path / "out", check=2).stderr
        assert "DPA851" in said
        assert fragment in said
    monkeypatch.setattr(loading, "recordings", lambda path, **_: iter(()))
    args = ("--predicate", "json:dumps", "-o", tmp_path / "out")
    assert "holds no batch" in call("shrink", batch, *args, check=2).stderr


def test_targets_that_are_there(call, batch, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert "not empty" in call("shrink", batch, "-o", tmp_path / "full", check=2).stderr
    (tmp_path / "b.zip").write_text("")
    assert "there already" in call("bundle", batch, "-o", tmp_path / "b.zip", check=2).stderr
    assert "there already" in call("convert", batch, tmp_path / "b.zip", check=2).stderr
    (tmp_path / "sealed").write_text("a file")
    said = call("shrink", batch, "-o", tmp_path / "sealed" / "out", check=3).stderr
    assert "DPA802" in said


def test_bundle_is_one_file_for_an_issue(call, batch, tmp_path):
    done = call("bundle", batch, "--code", "DPA302", "-o", tmp_path / "b.zip", "--json")
    answer = json.loads(done.stdout)
    assert answer["verified"] is True
    assert answer["code"] == "DPA302"
    assert (tmp_path / "b.zip").is_file()
    assert "1 row" in call("bundle", batch, "-o", tmp_path / "b").stdout


def test_convert_there_and_back(call, batch, tmp_path):
    answer = json.loads(call("convert", batch, tmp_path / "t", "--json").stdout)
    assert (answer["form"], answer["batches"]) == ("trace", 1)
    assert "1 batch" in call("convert", tmp_path / "t", tmp_path / "again.pkl").stdout
    again = DataProto.load_from_disk(tmp_path / "again.pkl")
    assert torch.equal(again.batch["old_log_probs"],
                       DataProto.load_from_disk(batch).batch["old_log_probs"])  # fmt: skip
    assert "--place 7" in call("convert", batch, tmp_path / "x.pkl", "--place", 7, check=2).stderr


def test_a_run_folder_and_a_trace_are_read_like_a_file(call, batch, tmp_path):
    call("convert", batch, tmp_path / "run" / "trace")
    for path in (tmp_path / "run", tmp_path / "run" / "trace"):
        out = call("show", path, "--json").stdout
        assert json.loads(out)["kind"] == "trace"
        assert call("check", path, check=1).stdout


@pytest.mark.parametrize("command", ["shrink", "bundle"])
def test_a_target_that_is_no_folder(call, batch, tmp_path, command):
    (tmp_path / "notes").write_text("mine")
    said = call(command, batch, "-o", tmp_path / "notes", check=2).stderr
    assert "notes is a file" in said
    assert (tmp_path / "notes").read_text() == "mine"
    said = call(command, batch, "-o", tmp_path / "small.pkl", check=2).stderr
    assert "small.pkl is the name of a file" in said
    assert not (tmp_path / "small.pkl").exists()


def test_codes_in_lower_case_and_one_row_in_the_singular(call, batch, tmp_path):
    done = call("shrink", batch, "--code", "dpa302", "-o", tmp_path / "out")
    assert done.stdout.startswith("DPA302: 16 rows and ")
    [test] = (tmp_path / "out").glob("test_*.py")
    assert "Shrunk to 1 of 16 rows, 2 of " in test.read_text()
    text = call("bundle", batch, "--code", "dpa302", "-o", tmp_path / "b").stdout
    assert text.startswith("DPA302 in 1 row and 2 tokens: ")
    issue = (tmp_path / "b" / "ISSUE.md").read_text()
    assert "to 1 row and 2 tokens. " in issue
    again = call("bundle", tmp_path / "out" / "batch.safetensors", "-o", tmp_path / "c")
    assert again.stdout.startswith("DPA302 in 1 row")
    assert "Shrunk from 1 row and " in (tmp_path / "c" / "ISSUE.md").read_text()
