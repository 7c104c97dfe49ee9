"""A run that is refused leaves everything as it was; what may start has all it is made of."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.dump.layout import ENVIRONMENT, SUMMARY
from dataproto_audit.trainer import run as runs
from dataproto_audit.trainer.backends import checkpoint
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.preflight import prepare, settle_model

SMALL = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]


class Reached(Exception):
    """The run would have started Ray."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    @contextmanager
    def cluster(**_):
        raise Reached
        yield

    monkeypatch.setattr(runs, "cluster", cluster)


def configured(run_dir, *overrides):
    return load_config("quickstart", [*SMALL, f"trainer.run_dir={run_dir}", *overrides])


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("audit.policy=/nonexistent.yaml", "DPA851"),
        ("data.generator=chain_sun", "DPA851"),
        ("data.max_prompt_length=2", "DPA853"),
        ("actor_rollout_ref.model.path=/nonexistent", "DPA852"),
        ("reward.custom_reward_function.path=/nonexistent.py", "DPA851"),
        ("trainer.seed=-1", "DPA851"),
    ],
)
def test_a_refused_run_leaves_no_folder_so_the_corrected_one_starts(tmp_path, override, code):
    folder = tmp_path / "run"
    with pytest.raises(CodedError) as caught:
        runs.run(configured(folder, override))
    assert caught.value.code == code
    assert not folder.exists()
    with pytest.raises(Reached):
        runs.run(configured(folder))
    assert (folder / ENVIRONMENT).exists()


def resumable(folder, extra_data):
    """The folder of a finished run of one step with a checkpoint."""
    place = folder / "checkpoints" / "step_000001"
    files = [
        checkpoint.write_rank_file(place, rank=rank, tensors={"a": torch.zeros(4)})
        for rank in range(2)
    ]
    extra = {"data": extra_data, "rewards": [0.5]}
    checkpoint.write_index(place, files, step=1, layout={"strategy": "fsdp2"}, extra=extra)
    for name in (ENVIRONMENT, SUMMARY):
        (folder / name).write_text(json.dumps({"steps": 1}))


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("trainer.total_training_steps=1", "DPA851"),
        ("data.seed=77", "DPA804"),
        ("audit.policy=/nonexistent.yaml", "DPA851"),
    ],
)
def test_a_resume_that_is_refused_keeps_summary_and_checkpoints(tmp_path, override, code):
    scratch = tmp_path / "scratch"
    identity = prepare(configured(tmp_path / "none"), scratch).inputs.prompts.identity()
    folder = tmp_path / "run"
    resumable(folder, identity)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as caught:
        runs.run(configured(folder, "trainer.resume_mode=auto", override))
    assert caught.value.code == code
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    plan = runs.plan(configured(folder, "trainer.resume_mode=auto"))
    assert plan["resumes_after"] == 1
    assert (folder / SUMMARY).exists()


def test_the_tiny_model_is_made_aside_and_settled_in_the_run_folder(tmp_path):
    config = configured(tmp_path / "none")
    prepared = prepare(config, tmp_path / "scratch")
    assert prepared.place.run_dir == tmp_path / "none"
    assert not prepared.place.run_dir.exists()
    made = prepared.inputs.model.path
    content = {path.name: path.read_bytes() for path in made.iterdir()}
    (tmp_path / "run").mkdir()
    settle_model(config, prepared.inputs, tmp_path / "run")
    assert prepared.inputs.model.path == tmp_path / "run" / "model"
    assert prepared.inputs.prompts.tokenizer.folder == tmp_path / "run" / "model"
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()} == content


def test_a_model_of_the_user_s_stays_where_it_is(tmp_path, tiny_model):
    own = tiny_model()
    config = configured(
        tmp_path / "run", f"actor_rollout_ref.model.path={own}", "data.generator=null",
        f"data.train_files={_rows(tmp_path)}", "data.prompt_style=verbatim",
    )  # fmt: skip
    inputs = prepare(config, tmp_path / "scratch").inputs
    (tmp_path / "run").mkdir()
    settle_model(config, inputs, tmp_path / "run")
    assert inputs.model.path == Path(own)
    assert not (tmp_path / "run" / "model").exists()


def _rows(folder):
    file = folder / "rows.jsonl"
    row = {"prompt": "1+1=", "data_source": "sum", "reward_model": {"ground_truth": "2"}}
    file.write_text(f"{json.dumps(row)}\n" * 8)
    return file
