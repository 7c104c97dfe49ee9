"""Values that do not fit their keys: the key, the value and what is taken, nothing of a library."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config import load_config

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("override", "says", "remedy"),
    [
        (f"{ACTOR}=3", f"{ACTOR} is 3, but takes keys of its own", f"{ACTOR}.NAME=value"),
        (f"{ACTOR}.optim=[1]", "takes keys of its own", f"{ACTOR}.optim.NAME=value"),
        (f"{ACTOR}.optim.betas=3", "betas is 3, but takes a list", "betas=[FIRST,SECOND]"),
        ("reward=null", "reward is null, but takes keys", "reward.NAME=value"),
        ("data.seed=null", "data.seed is null, but takes a whole number", "Correct"),
        ("data.seed=[1,2]", "data.seed is [1,2], but takes a whole number", "Correct"),
        ("data.train_batch_size=many", "is many, but takes a whole number", "Correct"),
        ("data.shuffle=5x", "data.shuffle is 5x, but takes true or false", "Correct"),
        (f"{ACTOR}.grad_clip=big", "grad_clip is big, but takes a number", "Correct"),
        ("trainer.run_dir=[1]", "takes text or null", "Correct"),
        ("data.generator_args=3", "takes a mapping", "data.generator_args.NAME=value"),
        ("data.seed=${foo}", "'foo' not found", "a key that is there"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_plain_words(override, says, remedy):
    with pytest.raises(UsageError) as caught:
        load_config("quickstart", [override])
    assert caught.value.code == "DPA851"
    assert says in caught.value.message
    assert remedy in caught.value.remedy
    for leaked in ("Merge error", "AnyNode", "subclass", "ListConfig", "Optional", "converted"):
        assert leaked not in str(caught.value)


def test_a_value_of_another_kind_in_a_file_is_named_by_key_and_file(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("data: {seed: [1, 2]}\n")
    with pytest.raises(UsageError, match=r"data\.seed in .*own\.yaml, but takes a whole number"):
        load_config(str(file))


@pytest.mark.parametrize("override", ["+data.seed=1", "++data.seed=1", "~data.seed=1"])
def test_hydra_s_signs_are_explained(override):
    with pytest.raises(UsageError, match=r"DPA851 .*no override.*'data\.seed=1'"):
        load_config("quickstart", [override])


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("foo.bar.baz=1", "See docs/configuration.md."),
        ("trainer.blance_batch=true", "Did you mean trainer.balance_batch?"),
        ("data.sead=1", "Did you mean data.seed?"),
        ("train_batch_size=1", "Did you mean data.train_batch_size?"),
    ],
)
def test_a_section_is_no_answer_to_a_key_in_it(override, near):
    with pytest.raises(UsageError) as caught:
        load_config("quickstart", [override])
    assert (caught.value.code, caught.value.remedy) == ("DPA850", near)


@pytest.mark.parametrize("key", ["data.foo", "actor_rollout_ref.actor.optim.learning_rate"])
def test_a_key_like_no_other_is_told_what_its_section_takes(key):
    with pytest.raises(UsageError) as caught:
        load_config("quickstart", [f"{key}=1"])
    section = key.rpartition(".")[0]
    assert caught.value.remedy.startswith(f"{section} takes ")
    assert ("lr" if "optim" in key else "train_batch_size") in caught.value.remedy


PATH, NAME = (f"reward.custom_reward_function.{name}" for name in ("path", "name"))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "exact_with_eos"),
        ([f"{PATH}=my.py"], "compute_score"),
        ([f"{PATH}=my.py", f"{NAME}=mine"], "mine"),
        ([f"{NAME}=mine", f"{PATH}=my.py"], "mine"),
        (["reward.custom_reward_function={path: my.py, name: mine}"], "mine"),
        ([f"{NAME}=exact"], "exact"),
    ],
)
def test_another_file_starts_with_the_default_name_of_its_function(overrides, name):
    assert load_config("quickstart", overrides).reward.custom_reward_function.name == name
