"""A run that is refused leaves everything as it was; what may start has all it is made of."""

import copy
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
from dataproto_audit.trainer.lineage import lineage
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
        ("actor_rollout_ref.model.tiny.head_dim=20", "DPA851"),
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


def resumable(folder, extra_data, **more):
    """The folder of a finished run of one step with a checkpoint."""
    place = folder / "checkpoints" / "step_000001"
    files = [
        checkpoint.write_rank_file(place, rank=rank, tensors={"a": torch.zeros(4)})
        for rank in range(2)
    ]
    extra = {"data": extra_data, "rewards": [0.5], **more}
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


MODEL = "actor_rollout_ref.model"
OTHER = [
    ([f"{MODEL}.tiny.hidden_size=96"], "hidden_size was 64, now 96"),
    ([f"{MODEL}.tiny.num_hidden_layers=3"], "num_hidden_layers was 2, now 3"),
    ([f"{MODEL}.tiny.tie_word_embeddings=true"], "tie_word_embeddings"),
    ([f"{MODEL}.tiny.charset=digits"], "vocab_size"),
    # as many characters, other ones
    ([f"{MODEL}.tiny.charset=+-*/=(){chr(32)}0123456789abcdefghijklmnopqrstuvwxyZ"], "tokenizer"),
    ([f"{MODEL}.tiny.seed=5"], "model.tiny.seed was 2, now 5"),
    (["actor_rollout_ref.actor.optim.name=sgd"], "optimizer of the actor was adamw, now sgd"),
    ([f"{MODEL}.dtype=bfloat16"], "model.dtype was float32"),
]


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """What the quickstart is made of."""
    scratch = tmp_path_factory.mktemp("scratch")
    config = configured(scratch / "none", f"{MODEL}.tiny.charset=arithmetic")
    return config, prepare(config, scratch / "model").inputs


@pytest.mark.parametrize(("overrides", "fragment"), OTHER)
def test_a_resume_with_another_model_is_refused_and_changes_nothing(
    tmp_path, earlier, overrides, fragment
):
    config, inputs = earlier
    folder = tmp_path / "run"
    resumable(folder, inputs.prompts.identity(), model=lineage(config, inputs.model))
    settle_model(config, copy.copy(inputs), folder)
    before = files_of(folder)
    resumed = [f"{MODEL}.tiny.charset=arithmetic", "trainer.resume_mode=auto", *overrides]
    for start in (runs.plan, runs.run):
        with pytest.raises(UsageError) as caught:
            start(configured(folder, *resumed))
        assert caught.value.code == "DPA804"
        assert fragment in str(caught.value)
        assert files_of(folder) == before


@pytest.mark.parametrize(
    "override",
    [
        f"{MODEL}.tiny.max_position_embeddings=2048",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "trainer.n_gpus_per_node=4",
    ],
)
def test_a_resume_with_the_same_model_goes_on(tmp_path, earlier, override):
    config, inputs = earlier
    folder = tmp_path / "run"
    saved = json.loads(json.dumps(lineage(config, inputs.model)))  # as an index brings it back
    resumable(folder, inputs.prompts.identity(), model=saved)
    same = [f"{MODEL}.tiny.charset=arithmetic", "trainer.resume_mode=auto", override]
    planned = runs.plan(configured(folder, *same))
    assert planned["resumes_after"] == 1
    assert planned["resumes_from"].endswith("step_000001")
    assert planned["checkpoints_passed_over"] == []
    with pytest.raises(Reached):
        runs.run(configured(folder, *same))


def test_a_checkpoint_that_says_nothing_of_its_model_is_held_against_the_model_beside_it(
    tmp_path, earlier
):
    config, inputs = earlier
    folder = tmp_path / "run"
    resumable(folder, inputs.prompts.identity())
    settle_model(config, copy.copy(inputs), folder)
    before = files_of(folder)
    same = [f"{MODEL}.tiny.charset=arithmetic", "trainer.resume_mode=auto"]
    with pytest.raises(UsageError, match=r"DPA804.*differ in config\.json"):
        runs.run(configured(folder, *same, f"{MODEL}.tiny.hidden_size=96"))
    assert files_of(folder) == before
    assert runs.plan(configured(folder, *same))["resumes_after"] == 1


def test_the_plan_names_a_checkpoint_that_is_passed_over(tmp_path, earlier):
    config, inputs = earlier
    folder = tmp_path / "run"
    resumable(folder, inputs.prompts.identity(), model=lineage(config, inputs.model))
    newer = folder / "checkpoints" / "step_000002"
    newer.mkdir()
    (newer / checkpoint.INDEX).write_text('{"schema"')
    same = [f"{MODEL}.tiny.charset=arithmetic", "trainer.resume_mode=auto"]
    planned = runs.plan(configured(folder, *same))
    assert planned["resumes_after"] == 1
    [passed] = planned["checkpoints_passed_over"]
    assert "step_000002" in passed
    assert "damaged" in passed


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
