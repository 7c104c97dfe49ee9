"""Settings from a configuration and from meta entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dataproto_audit.checker import check
from dataproto_audit.checker.config import NAMES, settings_from
from dataproto_audit.codes import UsageError
from dataproto_audit.probes import Settings
from dataproto_audit.testing.recipes import cook

NESTED = {
    "algorithm": {"adv_estimator": "gae", "gamma": 0.99, "lam": 1, "use_kl_in_reward": False},
    "data": {"max_response_length": 512, "train_files": ["a.parquet"]},
    "actor_rollout_ref": {
        "actor": {
            "clip_ratio": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean",
            "use_kl_loss": True, "ppo_epochs": 2, "ppo_micro_batch_size_per_gpu": 8,
            "ulysses_sequence_parallel_size": 2,
        },
        "rollout": {"n": 8, "temperature": 0.7, "top_p": 1, "multi_turn": {"enable": True},
                    "log_prob_micro_batch_size_per_gpu": 16},
    },
}  # fmt: skip
WANT = Settings(
    adv_estimator="gae", gamma=0.99, lam=1.0, use_kl_in_reward=False, max_response_length=512,
    clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean", use_kl_loss=True,
    ppo_epochs=2, actor_micro_batch_size=8, sp_size=2, n=8, temperature=0.7, top_p=1.0,
    multi_turn=True, micro_batch_size=16,
)  # fmt: skip
META = {"n": 3, "temperature": 1.0, "eos_token_id": 9, "dp_size": 2}


def flat(config: Any, before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return out


def read(config: Any, meta: dict[str, Any] | None = None) -> Settings:
    settings, wrong = settings_from(config, meta or {})
    assert wrong == {}
    return settings


def test_verls_names_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(NESTED)))
    for config in (NESTED, flat(NESTED), OmegaConf.create(NESTED), path, str(path)):
        assert read(config) == WANT


def test_our_own_names() -> None:
    config = {"n": 8, "stop_ids": [2, 7], "trainer_dtype": "bfloat16", "on_policy": False}
    assert read(config) == Settings(n=8, stop_ids=(2, 7), trainer_dtype="bfloat16", on_policy=False)


def test_pairs_in_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("adv_estimator=grpo n=8") == Settings(adv_estimator="grpo", n=8)
    nested = "algorithm.adv_estimator=gae stop_ids=[2,7] gamma=1.0"
    assert read(nested) == Settings(adv_estimator="gae", stop_ids=(2, 7), gamma=1.0)
    monkeypatch.chdir(tmp_path)
    Path("n=4").write_text("n: 5")  # a file of that name is a file
    assert read("n=4") == Settings(n=5)
    for text, said in (("=3", "cannot be read"), ("adv_estimater=grpo", "adv_estimator"),
                       ("n=three", "no whole number"), ("n=[", "not YAML"),
                       ("runs/lr=1e-6/config.yaml", "cannot be read"),
                       ("lr=1e-6/config.yml", "cannot be read"),
                       ("runs/lr=1e-6", "cannot be read"), ("lr=1e-6", "no setting is read"),
                       ("n=4 actor.lr=1", "no setting is read")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            read(text)


def test_settings_are_taken_as_they_are() -> None:
    assert read(Settings(n=8)) == Settings(n=8)


def test_our_name_counts_before_verls() -> None:
    assert read({"n": 2, "actor_rollout_ref": {"rollout": {"n": 8}}}).n == 2


@pytest.mark.parametrize(
    "config", [{"n": 8}, Settings(n=8), {"actor_rollout_ref": {"rollout": {"n": 8}}}]
)
def test_the_configuration_counts_before_meta_entries(config: Any) -> None:
    settings = read(config, META)
    assert settings.n == 8
    assert (settings.temperature, settings.stop_ids, settings.world_size) == (1.0, (9,), 2)


def test_what_neither_says_stays_unknown() -> None:
    assert read(None) == Settings()
    assert read({}, {"n": None}) == Settings()
    assert read({"n": None}, {"n": 3}).n == 3


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("n", 3.0, 3), ("n", np.int64(3), 3), ("n", torch.tensor(3), 3),
        ("temperature", 1, 1.0), ("temperature", np.float32(0.5), 0.5),
        ("multi_turn", 1, True), ("multi_turn", False, False), ("multi_turn", np.bool_(True), True),
        ("stop_ids", 9, (9,)), ("stop_ids", [9, 10], (9, 10)), ("stop_ids", {9}, (9,)),
        ("stop_ids", np.array([9, 10]), (9, 10)), ("stop_ids", torch.tensor([9]), (9,)),
        ("stop_ids", [np.int64(9)], (9,)), ("adv_estimator", "grpo", "grpo"),
    ],
)  # fmt: skip
def test_kinds_that_mean_the_same(name: str, value: Any, want: Any) -> None:
    for settings in (read({name: value}), read(None, {name: value})):
        assert getattr(settings, name) == want
        assert type(getattr(settings, name)) is type(want)


WRONG = [
    ("n", "three", "which is no whole number"),
    ("n", 2.5, "which is no whole number"),
    ("n", True, "which is no whole number"),
    ("n", float("nan"), "which is no whole number"),
    ("n", [3], "which is no whole number"),
    ("temperature", "hot", "which is no number"),
    ("temperature", True, "which is no number"),
    ("temperature", float("nan"), "which is not finite"),
    ("temperature", -0.5, "which is below 0"),
    ("log_prob_mean", float("nan"), "which is not finite"),
    ("log_prob_mean", float("inf"), "which is not finite"),
    ("log_prob_token", -1, "which is below 0"),
    ("gamma", 10**400, "which is not finite"),
    ("n", 0, "which is below 1"),
    ("n", -1, "which is below 1"),
    ("world_size", -3, "which is below 1"),
    ("max_token_len", -1, "which is below 1"),
    ("stop_ids", -1, "which is below 0"),
    ("stop_ids", [9, -1], "which is below 0"),
    ("multi_turn", "yes", "which is neither true nor false"),
    ("multi_turn", 2, "which is neither true nor false"),
    ("multi_turn", np.array([1, 0]), "which is neither true nor false"),
    ("adv_estimator", 3, "which is no text"),
    ("stop_ids", "9", "which is no list of ids"),
    ("stop_ids", [9, "x"], "which is no list of ids"),
    ("stop_ids", [True], "which is no list of ids"),
    ("stop_ids", np.array([0.5]), "which is no list of ids"),
]


@pytest.mark.parametrize(("name", "value", "problem"), WRONG)
def test_a_wrong_kind_in_the_configuration_is_a_usage_error(
    name: str, value: Any, problem: str
) -> None:
    with pytest.raises(UsageError, match="DPA851") as caught:
        settings_from({name: value}, {})
    assert f"the configuration says {name}=" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(("name", "value", "problem"), WRONG)
def test_a_wrong_kind_among_meta_entries_is_a_finding(name: str, value: Any, problem: str) -> None:
    settings, wrong = settings_from(None, {name: value})
    assert (getattr(settings, name), wrong) == (None, {name: problem})
    report = check(cook("T", []) | {"meta_info": {name: value}})
    [finding] = [f for f in report if f.code == "DPA112"]
    assert (finding.stage, finding.field, finding.severity, finding.actual) == (
        "prompts", f"meta_info.{name}", "fail", problem,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", -1), ("pad_id", -1), ("temperature", 0), ("stop_ids", [])]
)
def test_small_values_that_mean_something(name: str, value: Any) -> None:
    assert getattr(read({name: value}), name) in (value, ())


def test_a_wrong_meta_entry_that_the_configuration_replaces_is_not_looked_at() -> None:
    assert read({"n": 8}, {"n": "three"}).n == 8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (3, "not int"),
        ([1], "not list"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read"),
        (Path("nowhere.yaml"), "cannot be read"),
        (OmegaConf.create([1]), "not list"),
    ],
)
def test_a_configuration_that_is_none(config: Any, said: str) -> None:
    with pytest.raises(UsageError, match="DPA851") as caught:
        settings_from(config, {})
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "- 1\n- 2", "\tx: 1", "? !!x"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="DPA851"):
        settings_from(path, {})


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        settings_from(path, {})


def test_references_in_a_file_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("n: 8\nother: ${oc.env:HOME}\n")
    assert read(path).n == 8


def test_every_other_name_belongs_to_a_setting() -> None:
    assert set(NAMES) <= set(get_type_hints(Settings))
    listed = [name for names in NAMES.values() for name in set(names)]
    shared = {name for name in listed if listed.count(name) > 1}
    assert {name.rpartition(".")[2] for name in shared} <= {"clip_ratio"}


@pytest.mark.parametrize(
    ("typo", "meant"), [("temprature", "temperature"), ("adv_estimatr", "adv_estimator")]
)
def test_a_mistyped_plain_key_is_refused(typo: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{typo}.*{meant}"):
        settings_from({typo: 1}, {})


def test_keys_of_verls_sections_that_we_do_not_read_are_left_alone() -> None:
    settings_from({"actor_rollout_ref": {"rollout": {"temperatures": 1}}, "seed": 3}, {})
