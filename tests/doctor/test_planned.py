"""Reading a configuration: overrides, defaults, bad input."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor.planned import is_ours, planned


def test_overrides_win_and_what_is_missing_is_verls_default(plan):
    made = plan("data.train_batch_size=256", "+new.key=3", "++trainer.logger=[console]", "~critic")
    assert made.count("data.train_batch_size") == 256
    assert made.get("new.key") == 3
    assert made.get("critic.ppo_micro_batch_size_per_gpu") is None
    assert made.get("trainer.n_gpus_per_node") == 8
    assert made.get("critic.ppo_mini_batch_size") == 128  # follows the actor


def test_an_interpolation_without_its_target_is_unknown(plan):
    made = plan("data.max_prompt_length=${oc.env:NOT_THERE}", "data.x=${nowhere.y}")
    assert made.get("data.x") is None
    assert made.get("data.max_prompt_length") == 512


@pytest.mark.parametrize(
    ("override", "version"),
    [("trainer.use_legacy_worker_impl=auto", "0.7.1"), ("trainer.use_v1=False", "0.9.1"),
     ("data.shuffle=False", "0.9.1")],
)  # fmt: skip
def test_keys_tell_the_version(file, override, version):
    assert planned(file, [override]).version == version


@pytest.mark.parametrize(
    "override", ["data", "=3", "a..b=1", "a b=1", "--seed=1 x", "a=[1", ".a=1"]
)
def test_another_form_of_override_is_refused(file, override):
    with pytest.raises(UsageError, match="DPA851") as refused:
        planned(file, [override])
    assert override in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [1", "not YAML"), ("- 1\n- 2", "not a mapping"), ("words", "not a mapping"),
     ("a: b: c", "not YAML"), ("a: \x00", "not YAML"), ("a: ${b", "not YAML")],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as refused:
        planned(path)
    assert "\n" not in str(refused.value)


def test_missing_files_folders_and_bytes(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        planned(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        planned(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(UsageError, match="not YAML"):
        planned(tmp_path / "b.yaml")


def test_a_count_that_is_none_is_refused(plan):
    for value in ("abc", "-1", "1.5", "true"):
        with pytest.raises(UsageError, match="no whole number"):
            plan(f"trainer.nnodes={value}").count("trainer.nnodes")


def test_our_own_configuration_is_told_apart(file, tmp_path):
    assert not is_ours(file)
    (tmp_path / "own.yaml").write_text("audit: {level: full}")
    assert is_ours(tmp_path / "own.yaml")


def test_a_key_that_is_no_text_is_named(tmp_path):
    (tmp_path / "x.yaml").write_text("trainer:\n  nnodes: 1\n1: 2\n")
    with pytest.raises(UsageError, match="the key 1 is no text"):
        planned(tmp_path / "x.yaml")
