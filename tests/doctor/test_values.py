"""Values with which no run starts are told, and those of healthy configurations are not."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor import examine
from dataproto_audit.doctor.values import VARIABLES, impossible

ROLES = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{ROLES}.actor", f"{ROLES}.rollout"


def test_a_healthy_configuration_is_quiet(plan):
    for version in ("0.7.1", "0.9.1"):
        assert list(impossible(plan(version=version))) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm=grpo", "algorithm is a section, and 'grpo' takes its place"),
        ("trainer=3", "trainer is a section, and 3 takes its place"),
        ("data=null", "data is a section, and null takes its place"),
        (f"{ACTOR}.strategy=fsdp3", f"{ACTOR}.strategy is 'fsdp3'"),
        ("trainer.use_legacy_worker_impl=enabled", "use_legacy_worker_impl is 'enabled'"),
        (f"{ROLLOUT}.name=vllmm", "name is 'vllmm'"),
        (f"{ROLLOUT}.n=0", f"{ROLLOUT}.n is 0"),
        (f"{ACTOR}.ppo_epochs=0", "ppo_epochs is 0"),
        ("trainer.nnodes=0", "trainer.nnodes is 0"),
        ("critic.enable=maybe", "critic.enable is 'maybe', neither true nor false"),
        (f"{ACTOR}.use_dynamic_bsz=maybe", "use_dynamic_bsz is 'maybe'"),
        ("data.train_batch_size=${oc.env:DPA_NO_SUCH_VARIABLE}", "cannot be resolved here"),
        ("trainer.nnodes=${trainer.nnodes}", "cannot be resolved here"),
    ],
)
def test_what_cannot_run_fails(file, override, said):
    answer = examine(str(file), [override], verl="0.7.1")
    assert not answer["ok"]
    assert any(said in p["text"] and p["level"] == "fail" for p in answer["problems"])


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.strategy=veomni",
        "trainer.use_legacy_worker_impl=auto",
        f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name=tiny", f"{ACTOR}.ppo_epochs=1",
        "critic.enable=False", "critic.enable=null", "algorithm.rollout_correction=null",
        "data.train_batch_size=${data.nowhere}", "data.train_files=${oc.env:HOME}/x.parquet",
        f"{ROLES}.model.override_config=null",
    ],
)  # fmt: skip
def test_what_can_run_does_not(plan, override):
    assert list(impossible(plan(override))) == []


def test_an_interpolation_that_nothing_here_rests_on_only_warns(plan):
    [problem] = impossible(plan("data.train_files=${oc.env:DPA_NO_SUCH_VARIABLE}"))
    assert problem.level == "warn"


@pytest.mark.parametrize(("value", "shown"), [("1", "1"), ("True", "True"), ("0.5", "0.5")])
def test_ray_takes_variables_as_text_only(plan, value, shown):
    """The quoted form that the remedy gives is fine."""
    [problem] = impossible(plan(f"+{VARIABLES}.DATAPROTO_AUDIT={value}"))
    assert problem.level == "fail"
    assert f"DATAPROTO_AUDIT is {shown}, and Ray takes text only" in problem.text
    quoted = problem.remedy.split("'")[1]
    assert quoted == f'+{VARIABLES}.DATAPROTO_AUDIT="{shown.lower()}"'
    assert list(impossible(plan(quoted))) == []
    assert list(impossible(plan(f"+{VARIABLES}.VERL_USE_EXTERNAL_MODULES=a.b"))) == []


@pytest.mark.parametrize("text", ["defaults: ppo\n", "defaults:\n  a: b\n"])
def test_defaults_that_are_no_list_are_told(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}trainer:\n  nnodes: 1\n")
    assert any("hydra takes a list only" in p["text"] for p in examine(str(path))["problems"])


def test_a_file_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("{a: " * 400 + "1" + "}" * 400)
    with pytest.raises(UsageError, match="not YAML") as caught:
        examine(str(path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "what"),
    [("data: {response_key: r}\n", "evaluation"), ("checkpoint: {}\ntrainer: {}\n", "SFT")],
)
def test_configurations_of_other_programs_are_refused(tmp_path, text, what):
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"a configuration of verl's {what}"):
        examine(str(path))
