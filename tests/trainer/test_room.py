"""What the machine and the engine can take, told before anything starts; both sides of each."""

import os

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer import room
from dataproto_audit.trainer.config import load_config

HF = "actor_rollout_ref.rollout.name=hf"


@pytest.mark.parametrize(
    ("size", "overrides", "gpus", "found"),
    [
        (20, [], 0, True),
        (8, [], 0, True),
        (48, [], 0, True),
        (32, [], 0, False),
        (80, [], 0, False),
        (20, [HF], 0, False),
        (20, [], 1, False),
    ],
)
def test_head_sizes_that_vllm_on_cpu_does_not_take(size, overrides, gpus, found):
    config = load_config("quickstart", overrides)
    if not found:
        room.check_head_size(config, {"head_dim": size}, gpus=gpus)
        return
    with pytest.raises(UsageError, match=rf"DPA851 .*head_dim is {size}.*32, 64, 80.*name=hf"):
        room.check_head_size(config, {"head_dim": size}, gpus=gpus)


def test_a_head_size_that_follows_from_the_width_counts_and_an_unknown_one_does_not():
    config = load_config("quickstart", ["actor_rollout_ref.model.path=/models/own"])
    with pytest.raises(UsageError, match=r"head_dim of /models/own is 16"):
        room.check_head_size(config, {"hidden_size": 64, "num_attention_heads": 4}, gpus=0)
    room.check_head_size(config, {"hidden_size": 128, "num_attention_heads": 4}, gpus=0)
    room.check_head_size(config, {"n_embd": 64}, gpus=0)


def test_more_ranks_than_gpus_are_refused_and_more_than_cores_warned_of(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    many = load_config("quickstart", ["trainer.n_gpus_per_node=64"])
    few = load_config("quickstart", ["trainer.n_gpus_per_node=8"])
    with pytest.raises(UsageError, match=r"DPA854 .*64 ranks, but this machine has 8 GPUs"):
        room.check_gpus(many, gpus=8)
    for config, gpus in ((few, 8), (many, 64), (many, 0)):
        room.check_gpus(config, gpus=gpus)
    [warning] = room.warnings_of(many, gpus=0)
    assert "64 ranks share 2 CPU cores" in warning
    assert not [*room.warnings_of(few, gpus=0), *room.warnings_of(many, gpus=64)]


def test_a_place_below_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run", file / "a" / "b"):
        with pytest.raises(UsageError, match=r"DPA801 .*a file of that name"):
            room.check_place(folder)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"DPA801"):
        room.check_place(tmp_path / "link" / "run")
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "run"):
        room.check_place(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the super-user may write anywhere
    with pytest.raises(UsageError, match=r"DPA801 .*cannot be written"):
        room.check_place(tmp_path / "run")
