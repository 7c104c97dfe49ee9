"""The configuration: names, overrides, unknown keys, wrong types, missing values."""

import pytest
from omegaconf import OmegaConf

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config import load_config, ready_configs
from dataproto_audit.trainer.schema import Config
from dataproto_audit.trainer.validate import validate


@pytest.mark.parametrize("name", ready_configs())
def test_every_ready_config_loads_and_is_valid(name):
    config = load_config(name)
    validate(config)
    assert config.trainer.experiment_name == name


def test_overrides_win_over_the_file_and_are_typed(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {total_training_steps: 3}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    config = load_config(str(file), ["actor_rollout_ref.rollout.n=6", "data.seed=9"])
    assert config.actor_rollout_ref.rollout.n == 6
    assert config.trainer.total_training_steps == 3
    assert config.data.seed == 9


def test_generator_arguments_are_free():
    config = load_config("quickstart", ["data.generator_args.min_digits=2"])
    assert config.data.generator_args["min_digits"] == 2


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("actor_rollout_ref.rolout.n=4", "actor_rollout_ref.rollout"),
        ("trainer.total_steps=3", "trainer.total_training_steps"),
        ("audit.levl=off", "audit.level"),
        ("rollout.n=4", "actor_rollout_ref.rollout.n?"),
        ("lr=1", "actor_rollout_ref.actor.optim.lr or "),
    ],
)
def test_an_unknown_key_names_the_nearest(override, near):
    with pytest.raises(UsageError, match="DPA850") as caught:
        load_config("quickstart", [override])
    assert f"Did you mean {near}" in str(caught.value)


def test_an_unknown_key_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {steps: 3}\n")
    with pytest.raises(UsageError, match=r"trainer\.steps in .*mine\.yaml"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("actor_rollout_ref.rollout.n=many", "but takes a whole number"),
        ("trainer.overwrite=perhaps", "trainer.overwrite"),
        ("no_equals_sign", "Write key=value"),
        ("=3", "Write key=value"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(override, fragment):
    with pytest.raises(UsageError, match="DPA851") as caught:
        load_config("quickstart", [override])
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("a: [1", "no valid YAML"),
        ("- 1\n- 2\n", "not a mapping"),
        ("data: {seed: 1}\n", "does not set"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, fragment):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=fragment):
        load_config(str(file))


def test_a_missing_file_and_a_wrong_name_are_refused():
    with pytest.raises(UsageError, match="no file"):
        load_config("nowhere.yaml")
    with pytest.raises(UsageError, match="Did you mean 'quickstart'"):
        load_config("quickstrat")


def test_every_section_has_a_docstring():
    sections = [Config]
    while sections:
        section = sections.pop()
        assert section.__doc__
        node = OmegaConf.structured(section)
        for name in node:
            kind = OmegaConf.get_type(node, name) if not OmegaConf.is_missing(node, name) else None
            if kind is not None and kind.__module__.endswith("trainer.config"):
                sections.append(kind)


@pytest.mark.parametrize("level", ["off", "shape", "full"])
def test_every_audit_level_can_be_given_on_the_command_line(level, tmp_path):
    assert load_config("quickstart", [f"audit.level={level}"]).audit.level == level
    file = tmp_path / "mine.yaml"
    file.write_text(f"trainer: {{total_training_steps: 3}}\naudit: {{level: {level}}}\n")
    assert load_config(str(file)).audit.level == level


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("a=[", "a=["),
        ("data.generator_args=${foo}", "foo"),
        ("trainer.seed=${data.nothing}", "data.nothing"),
        ("data=5", "data"),
        ("data=null", "data"),
        ("data=${nowhere}", "nowhere"),
        ("data.generator_args.size=" + "[" * 3000, "is no override"),
    ],
)
def test_a_typo_that_only_a_library_sees_is_told_with_its_override(override, fragment):
    with pytest.raises(UsageError) as caught:
        load_config("quickstart", [override])
    assert caught.value.code in ("DPA850", "DPA851")
    assert fragment in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_value_may_refer_to_another_key():
    config = load_config("quickstart", ["data.seed=7", "trainer.seed=${data.seed}"])
    assert config.trainer.seed == 7


def test_a_file_of_bytes_or_of_endless_brackets_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    for content in (b"\xff\xfe\x00", b"a: " + b"[" * 3000):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="DPA851") as caught:
            load_config(str(file))
        assert len(str(caught.value)) < 700
