"""What stands on stdout and what on stderr; errors as data."""

import json

import pytest
import torch

from dataproto_audit.codes import CODES
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.recipes import cook

KEYS = {"error", "code", "message", "remedy", "exit_code"}


@pytest.fixture
def saved(tmp_path):
    """A sound batch and one with a fault."""
    made = cook("T", [])
    tensors = {name: torch.from_numpy(array) for name, array in made["batch"].items()}
    batch = DataProto.from_dict(tensors, made["non_tensor_batch"], meta_info=made["meta_info"])
    batch.save_to_disk(tmp_path / "good.pkl")
    batch.batch["token_level_scores"] = batch.batch["token_level_scores"].roll(-1, 1)
    batch.save_to_disk(tmp_path / "bad.pkl")
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ("check", "{}/none.pkl"), ("show", "{}/none.pkl"), ("convert", "{}/none.pkl", "{}/x"),
        ("replay", "{}/none.pkl"), ("bisect", "{}/none.pkl"), ("report", "{}/none"),
        ("shrink", "{}/none.pkl", "-o", "{}/x"), ("bundle", "{}/none.pkl", "-o", "{}/x"),
        ("explain", "nothing_of_the_kind"), ("check", "--fail-on", "never", "{}/good.pkl"),
        ("check", "--no-such-option"), ("doctor", "--config", "{}/none.yaml"),
        ("train", "no_such_configuration"), ("compare-backends",), ("selftest", "--fault", "x"),
    ],
)  # fmt: skip
def test_an_error_is_one_document(call, tmp_path, args):
    done = call(*(arg.format(tmp_path) for arg in args), "--json", check=2)
    [line] = done.stdout.splitlines()
    told = json.loads(line)
    assert told.keys() >= KEYS
    assert told["code"] in CODES
    assert told["exit_code"] == 2
    assert told["message"] in done.stderr
    assert call(*(arg.format(tmp_path) for arg in args), check=2).stdout == ""


def test_a_fault_of_our_own_is_a_document_too(call, monkeypatch):
    from dataproto_audit.render import explain

    monkeypatch.setattr(explain, "explained", lambda name: 1 / 0)
    done = call("explain", "DPA101", "--json", check=4)
    assert json.loads(done.stdout)["code"] == "DPA901"


def test_a_bad_path_does_not_keep_the_others_from_their_answer(call, saved):
    for paths in (("none.pkl", "good.pkl", "bad.pkl"), ("bad.pkl", "good.pkl", "none.pkl")):
        given = [saved / path for path in paths]
        done = call("check", *given, "--json", check=2)
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["path"] for one in told] == [str(path) for path in given]
        assert {one["ok"] for one in told if "error" not in one} == {True, False}
        [error] = [one for one in told if "error" in one]
        assert (error["code"], error["exit_code"]) == ("DPA810", 2)
        assert done.stderr.count("DPA810") == 1
    text = call("check", saved / "none.pkl", saved / "good.pkl", check=2)
    assert "good.pkl" in text.stdout
    assert "none.pkl" in text.stderr
    call("check", saved / "good.pkl", saved / "bad.pkl", check=1)


def test_what_is_wrong_for_all_paths_is_said_once(call, saved):
    paths = (saved / "good.pkl", saved / "bad.pkl")
    done = call("check", *paths, "--config", saved / "none.yaml", "--json", check=2)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.count("DPA851") == 1


@pytest.mark.parametrize("name", ["DPA303", "old_log_probs", "update_actor"])
def test_explain_gives_what_is_declared_as_data(call, name):
    told = json.loads(call("explain", name, "--json").stdout)
    assert told["name"] == name
    assert told["text"] + "\n" == call("explain", name).stdout
    if told["kind"] == "code":
        code = CODES[name]
        assert told["meaning"] == code.meaning
        assert told["fix"] == code.fix
        assert [one["cause"] for one in told["causes"]] == list(code.causes)
        assert all(one["meaning"] for one in told["causes"])
        assert all(url.startswith("https://") for url in told["reports"])
    elif told["kind"] == "field":
        assert told["producer"] == FIELDS[name].producer
    else:
        assert told["reads"] == list(STAGES[name].reads)


def test_a_note_does_not_make_a_check_failed(call, saved):
    batch = DataProto.load_from_disk(saved / "good.pkl")
    batch.batch["old_log_probs"] = batch.batch["old_log_probs"].to(torch.bfloat16)
    batch.save_to_disk(saved / "half.pkl")
    [head] = [line for line in call("check", saved / "half.pkl").stdout.splitlines()
              if line.startswith("ok")]  # fmt: skip
    assert "info" in head
    assert "failed" not in head
    assert "with a finding" in head
    bad = call("check", saved / "bad.pkl", check=1).stdout
    assert "failed" in bad


def test_the_last_row_can_be_shown(call, saved):
    rows = json.loads(call("show", saved / "good.pkl", "--json").stdout)["rows"]
    last = json.loads(call("show", saved / "good.pkl", "--row", "-1", "--json").stdout)["tokens"]
    same = json.loads(
        call("show", saved / "good.pkl", "--row", rows - 1, "--json").stdout)["tokens"]  # fmt: skip
    assert last == same
    said = call("show", saved / "good.pkl", "--row", -rows - 1, check=2).stderr
    assert f"{rows} rows" in said


@pytest.mark.parametrize(
    "args",
    [("convert", "{}/good.pkl", "{}/no/x.pkl"), ("bundle", "{}/bad.pkl", "-o", "{}/no/x.zip")],
)
def test_a_folder_that_is_not_there_is_wrong_usage(call, saved, args):
    said = call(*(arg.format(saved) for arg in args), check=2).stderr
    assert "there is no folder" in said


@pytest.mark.parametrize("data", [b"hello, I am no pickle\n", b"he was here", b"[1, 2"])
def test_text_is_told_to_be_none_of_the_formats(call, tmp_path, data):
    (tmp_path / "x.pkl").write_bytes(data)
    said = call("check", tmp_path / "x.pkl", check=2).stderr
    assert "KeyError" not in said
    assert "IndexError" not in said
