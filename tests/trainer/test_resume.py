"""Where a run writes and what it goes on from: nothing of a run is ever deleted unasked."""

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.layout import ENVIRONMENT, SUMMARY
from dataproto_audit.dump.run_folder import RunFolder
from dataproto_audit.trainer import run as whole_run
from dataproto_audit.trainer.backends import checkpoint
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.preflight import prepare
from dataproto_audit.trainer.resume import find_place


def configured(run_dir, *overrides, mode="auto"):
    given = [f"trainer.run_dir={run_dir}", f"trainer.resume_mode={mode}", *overrides]
    return load_config("quickstart", given)


def write_checkpoint(folder, *, step, ranks=2, extra=None):
    files = [
        checkpoint.write_rank_file(folder, rank=rank, tensors={"a": torch.zeros(4)})
        for rank in range(ranks)
    ]
    extra = {"data": {}, "rewards": [0.5] * step} if extra is None else extra
    checkpoint.write_index(folder, files, step=step, layout={"strategy": "fsdp2"}, extra=extra)


@pytest.fixture
def ended(tmp_path):
    """The folder of a run of three steps with a checkpoint after each."""
    folder = tmp_path / "run"
    for step in (1, 2, 3):
        write_checkpoint(folder / "checkpoints" / f"step_{step:06d}", step=step)
    (folder / ENVIRONMENT).write_text("{}")
    (folder / SUMMARY).write_text("{}")
    return folder


def tree(folder):
    return {str(path): path.stat().st_size for path in Path(folder).rglob("*")}


def refused(config, code, *fragments):
    before = tree(config.trainer.run_dir)
    with pytest.raises(UsageError) as caught:
        find_place(config)
    assert caught.value.code == code
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert tree(config.trainer.run_dir) == before


def test_auto_goes_on_from_the_newest(ended):
    place = find_place(configured(ended))
    assert place.existing == "resume"
    assert (place.checkpoint.step, place.checkpoint.path.name) == (3, "step_000003")
    assert place.checkpoint.extra["rewards"] == [0.5] * 3


def test_auto_starts_where_there_is_nothing(tmp_path):
    place = find_place(configured(tmp_path / "new"))
    assert (place.existing, place.checkpoint) == ("refuse", None)
    (tmp_path / "notes.txt").write_text("of others")
    assert find_place(configured(tmp_path)).existing == "refuse"


def test_auto_passes_over_a_checkpoint_that_was_not_finished(ended):
    (ended / "checkpoints" / "step_000003" / checkpoint.INDEX).unlink()
    assert find_place(configured(ended)).checkpoint.step == 2


def _cut(index):
    index.write_bytes(index.read_bytes()[:40])


def _empty(index):
    index.write_bytes(b"")


def _flip(index):
    index.write_bytes(index.read_bytes().replace(b"0.5", b"0.7", 1))


def _other_step(index):
    raw = json.loads(index.read_bytes())
    del raw["crc32"]  # as of an earlier version
    index.write_text(json.dumps({**raw, "step": 7}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_cut, "damaged"), (_empty, "damaged"), (_flip, "not the file that was written"),
        (_other_step, "says step 7"), (Path.unlink, "missing"),
    ],
)  # fmt: skip
def test_a_newer_checkpoint_that_is_passed_over_is_named_with_the_reason(ended, damage, why):
    damage(ended / "checkpoints" / "step_000003" / checkpoint.INDEX)
    found = find_place(configured(ended)).checkpoint
    assert found.step == 2
    [passed] = found.passed
    assert (passed.path.name, why in passed.why) == ("step_000003", True), passed
    assert "after step 2" in str(found)
    assert "passed over step_000003" in str(found)


def test_an_older_damaged_checkpoint_is_no_news(ended):
    _cut(ended / "checkpoints" / "step_000001" / checkpoint.INDEX)
    found = find_place(configured(ended)).checkpoint
    assert (found.step, found.passed) == (3, ())
    assert "passed" not in str(found)


def test_a_checkpoint_in_a_folder_of_another_name_is_gone_on_from(ended):
    own = ended / "checkpoints" / "step_000003"
    kept = own.rename(own.with_name("best"))
    config = configured(ended, f"trainer.resume_from_path={kept}", mode="path")
    assert find_place(config).checkpoint.step == 3
    assert find_place(configured(ended)).checkpoint.path == kept


def test_auto_refuses_where_no_index_can_be_read(ended):
    for index in ended.rglob(checkpoint.INDEX):
        index.write_bytes(index.read_bytes()[:20])
    refused(configured(ended), "DPA804", "step_000001", "nothing to go on from", "--overwrite")
    assert find_place(configured(ended, "trainer.overwrite=true")).existing == "overwrite"


@pytest.mark.parametrize("finished", [True, False])
def test_auto_refuses_a_run_without_checkpoints(tmp_path, finished):
    (tmp_path / ENVIRONMENT).write_text("{}")
    if finished:
        (tmp_path / SUMMARY).write_text("{}")
    refused(configured(tmp_path), "DPA801", "without a checkpoint", "--overwrite")


def test_without_resume_a_run_is_refused_or_overwritten_as_told(ended):
    refused(configured(ended, mode="disable"), "DPA801", "finished run")
    replaced = find_place(configured(ended, "trainer.overwrite=true", mode="disable"))
    assert (replaced.existing, replaced.checkpoint) == ("overwrite", None)


def test_a_path_goes_on_in_its_own_run_unless_another_is_named(ended, tmp_path):
    given = f"trainer.resume_from_path={ended / 'checkpoints' / 'step_000002'}"
    own = find_place(configured("null", given, mode="path"))
    assert (own.run_dir, own.existing, own.checkpoint.step) == (ended, "resume", 2)
    new = find_place(configured(tmp_path / "new", given, mode="path"))
    assert (new.run_dir, new.existing, new.checkpoint.step) == (tmp_path / "new", "refuse", 2)


def test_a_path_does_not_cut_into_another_run(ended, tmp_path):
    given = f"trainer.resume_from_path={ended / 'checkpoints' / 'step_000002'}"
    other = tmp_path / "other"
    other.mkdir()
    (other / ENVIRONMENT).write_text("{}")
    refused(configured(other, given, mode="path"), "DPA801", "did not finish")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    given = "trainer.resume_from_path=/nonexistent/step_000001"
    refused(configured(tmp_path, given, mode="path"), "DPA804", "/nonexistent")


def test_a_checkpoint_of_other_ranks_or_engine_is_gone_on_from(ended):
    for other in ("trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.strategy=megatron"):
        assert find_place(configured(ended, other)).checkpoint.step == 3


def test_a_damaged_rank_file_is_refused_before_anything_starts(ended):
    file = ended / "checkpoints" / "step_000003" / "rank_0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    refused(configured(ended), "DPA804", "rank_0001.safetensors", "an earlier one")


@pytest.mark.parametrize("steps", [2, 3])
def test_nothing_left_to_train_is_refused(ended, steps):
    config = configured(ended, f"trainer.total_training_steps={steps}")
    refused(config, "DPA851", f"is {steps}", "of step 3", "above 3")


@pytest.mark.parametrize("extra", [{}, {"data": 1, "rewards": []}])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, extra):
    write_checkpoint(tmp_path / "checkpoints" / "a", step=1, extra=extra)
    refused(configured(tmp_path), "DPA804", "not written by train")


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_needed(ended):
    config = configured(ended, "algorithm.adv_estimator=gae")
    refused(config, "DPA804", "holds no critic", "adv_estimator=gae")


@pytest.mark.parametrize("name", ["checkpoints/step_000001", "model/weights"])
def test_folders_of_our_names_without_a_run_are_not_written_over(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    refused(configured(tmp_path, mode="disable"), "DPA801", name.partition("/")[0])


def test_a_file_in_the_way_is_named(tmp_path):
    file = tmp_path / "run"
    file.write_text(json.dumps({}))
    refused(configured(file, mode="disable"), "DPA801", "a file of that name")


def test_a_resumed_run_that_fails_to_start_keeps_the_summary_of_the_one_before(
    tmp_path, monkeypatch
):
    folder, other = tmp_path / "run", f"trainer.run_dir={tmp_path / 'other'}"
    with tempfile.TemporaryDirectory() as scratch:
        opened = prepare(load_config("quickstart", [other]), Path(scratch)).inputs
    extra = {"data": opened.prompts.identity(), "rewards": [0.5] * 3}
    with RunFolder.create(folder, config="") as earlier:
        earlier.finish({"steps": 3})
    write_checkpoint(folder / "checkpoints" / "step_000003", step=3, extra=extra)

    def broken(*_):
        raise RunError("DPA863", "a rank did not start.", "Try again.")

    monkeypatch.setattr(whole_run, "cluster", lambda **_: nullcontext())
    monkeypatch.setattr(whole_run, "_start", broken)
    with pytest.raises(RunError, match="DPA863"):
        whole_run.run(configured(folder))
    assert json.loads((folder / SUMMARY).read_text()) == {"steps": 3}
    assert not list(folder.glob(".lock*"))
