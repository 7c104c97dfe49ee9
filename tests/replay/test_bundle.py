"""A bundle tells nothing of the data, and still shows the finding."""

import json
import runpy
import zipfile

import numpy as np
import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.probes import Settings
from dataproto_audit.replay.anonymous import Renamer, texts_of
from dataproto_audit.replay.bundle import _zip, renamed_of, write_bundle
from dataproto_audit.replay.recording import Piece, Recording, audit
from dataproto_audit.replay.shrink import shrink

from ._recorded import healthy, lone, sides

SECRET = "the customer's secret"


def told(batch, **settings):
    return Recording((Piece("rollout", "after", batch),), Settings(**settings))


def objects(*values):
    out = np.empty(len(values), object)
    out[:] = values
    return out


def test_ids_are_renamed_one_to_one():
    recording = healthy(prompts=4, n=2, step=2)
    renamer = Renamer(recording.settings)
    made = renamer.recording(recording)
    old, new = (r.pieces[8].batch["batch"] for r in (recording, made))
    pairs = set()
    for name in ("prompts", "responses", "input_ids"):
        pairs |= set(
            zip(old[name].reshape(-1).tolist(), new[name].reshape(-1).tolist(), strict=True)
        )
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    assert torch.equal(new["rollout_log_probs"], old["rollout_log_probs"])
    pad, [stop] = recording.settings.pad_id, recording.settings.stop_ids
    assert (made.settings.pad_id, made.settings.stop_ids) == (0, (1,))
    assert {(pad, 0), (stop, 1)} <= pairs
    assert not [s for s in audit(made) if s.finding.severity != "info"]


def test_ids_out_of_the_vocabulary_stay_out():
    batch = {"batch": {"responses": torch.tensor([[5, -100, 40]])}, "non_tensor_batch": {},
             "meta_info": {}}  # fmt: skip
    made = Renamer(Settings(vocab_size=32)).recording(told(batch, vocab_size=32))
    assert made.pieces[0].batch["batch"]["responses"].tolist() == [[0, -100, 40]]


def test_text_is_taken_out_and_equal_things_stay_equal():
    batch = {
        "batch": {},
        "non_tensor_batch": {
            "uid": objects("customer-7", "customer-7", "b"),
            "raw_prompt": objects(SECRET, SECRET, [{"role": "user", "content": SECRET}]),
            "prompt_ids": objects([7, 8], [7, 8], [9]),
            "finish_reason": objects("stop", "length", "stop"),
            "score": objects(1.0, 0.0, 0.5),
            "extra_info": objects({"index": 3}, {"index": 4}, {"path": SECRET}),
        },
        "meta_info": {"temperature": 0.7, "note": SECRET, "sampling": {"n": 4, "who": SECRET}},
    }  # fmt: skip
    renamer = Renamer(Settings())
    made = renamer.recording(told(batch)).pieces[0].batch
    assert not [t for t in texts_of([made]) if "secret" in t or "customer" in t]
    arrays = made["non_tensor_batch"]
    assert arrays["uid"].tolist() == ["u0", "u0", "u1"]
    assert arrays["raw_prompt"][0] == arrays["raw_prompt"][1] != arrays["raw_prompt"][2]
    assert arrays["prompt_ids"].tolist() == [[0, 1], [0, 1], [2]]
    assert arrays["finish_reason"].tolist() == ["stop", "length", "stop"]
    assert arrays["score"].tolist() == [1.0, 0.0, 0.5]
    assert arrays["extra_info"][0] == {"index": 3}
    assert made["meta_info"]["temperature"] == 0.7
    assert made["meta_info"]["sampling"]["n"] == 4
    assert "meta_info.note" in renamer.removed
    kept = Renamer(Settings(), keep_text=True).recording(told(batch)).pieces[0].batch
    assert kept["meta_info"]["note"] == SECRET


@pytest.mark.parametrize("packed", [True, False])
def test_a_bundle_is_complete_and_shows_the_finding(packed, tmp_path):
    bad, _, _ = sides("uid_per_row")
    out = tmp_path / ("b.zip" if packed else "b")
    answer = write_bundle(bad, out, code="DPA404")
    assert answer["verified"] is True
    if packed:
        with zipfile.ZipFile(out) as file:
            file.extractall(tmp_path / "open")
    folder = tmp_path / "open" if packed else out
    names = {p.relative_to(folder).parts[0] for p in folder.rglob("*")}
    assert names >= {"ISSUE.md", "config.json", "environment.json", "shrink.json", "trace",
                     answer["test_file"]}  # fmt: skip
    [test] = [v for n, v in runpy.run_path(str(folder / answer["test_file"])).items()
              if n.startswith("test_")]  # fmt: skip
    test()
    issue = (folder / "ISSUE.md").read_text()
    assert issue.startswith("# DPA404: ")
    assert "python" in json.loads((folder / "environment.json").read_text())
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes()
    uids = {u for p in bad.pieces for u in p.batch["non_tensor_batch"].get("uid", ())}
    for path in (folder / answer["test_file"], folder / "shrink.json"):
        assert not any(str(uid) in path.read_text() for uid in uids if len(str(uid)) > 8)


def test_a_finding_that_needs_its_text_is_refused(monkeypatch):
    bad, _, _ = sides("probabilities")
    shrunk = shrink(lone(bad, "advantage"), code="DPA302")
    monkeypatch.setattr("dataproto_audit.replay.bundle.audit", lambda recording: [])
    with pytest.raises(UsageError, match="gone once ids are renamed"):
        renamed_of(shrunk, keep_text=False)


def test_a_file_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "b.zip").write_text("mine")
    bad, _, _ = sides("probabilities")
    with pytest.raises(UsageError, match="there already"):
        write_bundle(bad, tmp_path / "b.zip", code="DPA302")
    assert (tmp_path / "b.zip").read_text() == "mine"


def test_a_failed_bundle_leaves_nothing(tmp_path, monkeypatch):
    bad, _, _ = sides("probabilities")
    with pytest.raises(UsageError):
        write_bundle(lone(bad, "advantage"), tmp_path / "b", code="DPA999")
    assert not list(tmp_path.iterdir())
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "x").write_text("x")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space"):
        _zip(tmp_path / "from", tmp_path / "b.zip")
    assert [p.name for p in tmp_path.iterdir()] == ["from"]


def test_ids_of_every_name_are_renamed_alike():
    batch = {
        "batch": {"responses": torch.tensor([[700, 701, 9]]),
                  "teacher_input_ids": torch.tensor([[701, 700]]),
                  "image_features": torch.tensor([[0.5]])},
        "non_tensor_batch": {"raw_prompt_ids": objects([700, 702]),
                             "tool_tokens": objects(np.array([701])),
                             "customer_number": np.array([4711])},
        "meta_info": {"eos_token_id": 9, "pad_token_id": 703, "customer": 4711,
                      "sampling": {"stop_token_ids": [9, 701], "n": 2, "4711": 4711},
                      "metrics": {"actor/lr": 0.1, "val-core/secret-set": 0.5}},
    }  # fmt: skip
    renamer = Renamer(Settings())
    made = renamer.recording(told(batch)).pieces[0].batch
    stop = made["batch"]["responses"][0, 2].item()
    assert made["batch"]["responses"].tolist() == [[0, 1, 2]]
    assert made["batch"]["teacher_input_ids"].tolist() == [[1, 0]]
    assert made["non_tensor_batch"]["raw_prompt_ids"][0] == [0, 3]
    assert made["non_tensor_batch"]["tool_tokens"][0].tolist() == [1]
    assert made["meta_info"] == {"eos_token_id": stop, "pad_token_id": 4,
                                 "sampling": {"stop_token_ids": [stop, 1], "n": 2},
                                 "metrics": {"actor/lr": 0.1}}  # fmt: skip
    assert set(made["non_tensor_batch"]) == {"raw_prompt_ids", "tool_tokens"}
    assert "image_features" not in made["batch"]
    assert not any("4711" in line or "secret" in line for line in renamer.removed)


def test_pixels_and_names_in_cells_are_taken_out():
    grid = torch.tensor([[1, 2, 2]])
    batch = {
        "batch": {},
        "non_tensor_batch": {
            "multi_modal_inputs": objects(
                {"pixel_values": torch.full((4, 3), 0.37), "image_grid_thw": grid, SECRET: grid},
                {"pixel_values": torch.full((4, 3), 0.38)},
            ),
            "extra_info": objects({SECRET: 1}, {"index": 2}),
            "reward_model": objects({"ground_truth": 42}, [{SECRET: np.ones(3)}]),
            "score": objects(np.full(2, 0.37), 1.0),
        },
        "meta_info": {"losses": [{"pg_loss": 0.5, SECRET: 1.0}]},
    }  # fmt: skip
    made = Renamer(Settings()).recording(told(batch)).pieces[0].batch
    first, second = made["non_tensor_batch"]["multi_modal_inputs"]
    assert first.keys() == {"pixel_values", "image_grid_thw"}
    assert torch.equal(first["pixel_values"], torch.zeros(4, 3))
    assert torch.equal(second["pixel_values"], torch.ones(4, 3))
    assert torch.equal(first["image_grid_thw"], grid)
    assert made["non_tensor_batch"]["extra_info"][1] == {"index": 2}
    assert all(isinstance(v, str) for v in made["non_tensor_batch"]["reward_model"])
    assert 0.37 not in made["non_tensor_batch"]["score"][0]
    assert made["meta_info"] == {"losses": [{"pg_loss": 0.5}]}
    assert not [t for t in texts_of([made]) if "secret" in t]
