"""The whole answer: configurations of real runs are quiet, ours are read by their own rules."""

import sys

import pytest

from dataproto_audit import cli
from dataproto_audit.codes import UsageError
from dataproto_audit.doctor import examine, examine_environment
from dataproto_audit.doctor.environment import environment
from dataproto_audit.doctor.report import environment_text
from dataproto_audit.probes import PROBES
from dataproto_audit.trainer.config import ready_configs
from tests.verl.runs import COMMON, ROLES

ENGINE = ("trainer.use_legacy_worker_impl=disable", f"{ROLES}.model.use_remove_padding=True")
GAE = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True",
       "critic.ppo_micro_batch_size_per_gpu=4")  # fmt: skip


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "none.yaml"
    path.write_text("{}")
    return str(path)


@pytest.mark.parametrize(
    ("version", "overrides"),
    [("0.7.1", ()), ("0.7.1", ENGINE), ("0.7.1", GAE),
     ("0.9.1", ("trainer.use_v1=False", f"{ROLES}.model.use_remove_padding=True")),
     ("0.9.1", ("trainer.use_v1=True", f"{ROLES}.model.use_remove_padding=True", *GAE))],
)  # fmt: skip
def test_real_runs_that_went_well_are_quiet(empty, version, overrides):
    answer = examine(empty, [*COMMON, *overrides], verl=version)
    assert answer["problems"] == []
    assert answer["ok"]


def test_the_real_run_that_crashed_is_not(empty):
    answer = examine(empty, [*COMMON, "algorithm.adv_estimator=remax"], verl="0.7.1")
    assert "D15" in {problem["defect"] for problem in answer["problems"]}
    assert not answer["ok"]


def test_a_warning_alone_is_ok(file):
    answer = examine(str(file), ["trainer.critic_warmup=2"], verl="0.7.1")
    assert [p["level"] for p in answer["problems"]] == ["warn"]
    assert answer["ok"]


@pytest.mark.parametrize("name", ready_configs())
def test_ready_configurations_are_fine(name):
    assert examine(name)["ok"]
    answer = examine(name, ["trainer.n_gpus_per_node=7"])
    assert [problem["code"] for problem in answer["problems"]] == ["DPA854"]


def test_advice_names_keys_and_checks_that_exist(file):
    advice = examine(str(file), verl="0.7.1")["advice"]
    assert advice[0]["setting"] == f"{ROLES}.rollout.calculate_log_probs=True"
    codes = {probe.code for probe in PROBES.values()}
    assert all(one["codes"] and set(one["codes"]) <= codes for one in advice)
    on = examine(str(file), [advice[0]["setting"]], verl="0.7.1")["advice"]
    assert advice[0]["setting"] not in {one["setting"] for one in on}


def test_an_unknown_version_is_refused(file):
    with pytest.raises(UsageError, match=r"Known: 0\.7\.1, 0\.9\.1"):
        examine(str(file), verl="0.5")


def installed(**versions):
    return lambda name: versions.get(name.replace("-", "_"))


PLUGIN = {"VERL_USE_EXTERNAL_MODULES": "mine,dataproto_audit.verl_plugin"}


@pytest.mark.parametrize(
    ("verl", "environ", "attaches"),
    [(None, PLUGIN, False), ("0.7.1", PLUGIN, True), ("0.7.1", {}, False),
     ("0.7.1", {"DATAPROTO_AUDIT": "1"}, False), ("0.9.1", {"DATAPROTO_AUDIT": "1"}, True),
     ("0.9.1", PLUGIN | {"DATAPROTO_AUDIT": "0"}, False), ("0.9.1", {}, False)],
)  # fmt: skip
def test_it_tells_whether_the_audit_will_be_attached(verl, environ, attaches):
    assert environment(installed(verl=verl), environ)["attach"]["will_attach"] is attaches


def test_a_wrong_switch_is_said():
    attach = environment(installed(verl="0.9.1"), {"DATAPROTO_AUDIT": "maybe"})["attach"]
    assert "maybe" in attach["wrong"]
    assert not attach["will_attach"]


def test_what_is_missing_comes_with_its_remedy():
    parts = {p["part"]: p for p in environment(installed(ray="2"), {})["parts"]}
    assert parts["Megatron backend"]["install"] == "pip install 'dataproto-audit[megatron]'"
    assert parts["trainer loop (Ray, FSDP2)"]["missing"] == ["transformers"]
    assert "not tried" in environment(installed(verl="0.8.0"), {})["checkable"]


def test_the_environment_in_words(monkeypatch):
    for name in ("DATAPROTO_AUDIT", "VERL_USE_EXTERNAL_MODULES"):
        monkeypatch.delenv(name, raising=False)
    answer = examine_environment()
    text = environment_text(answer)
    assert set(answer) >= {"versions", "trainer", "attach", "checkable", "parts", "defects", "ok"}
    assert "attached: no" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 0), (("trainer.nnodes=7",), 1), (("trainer.nnodes",), 2), (("--verl", "1"), 2)],
)
def test_exit_codes(file, monkeypatch, capsys, arguments, code):
    command = ["dataproto-audit", "doctor", "--json", "--config", str(file), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    left = 0
    try:
        cli.main()
    except SystemExit as stopped:
        left = stopped.code
    out, err = capsys.readouterr()
    assert left == code, err
    assert out.count("\n") == 1  # the answer, or what was wrong
    assert err.count("\n") == (code == 2)


def test_overrides_without_a_configuration_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dataproto-audit", "doctor", "a.b=c"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
