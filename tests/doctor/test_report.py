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


ACTOR, MODEL = f"{ROLES}.actor", f"{ROLES}.model"


@pytest.mark.parametrize(
    ("version", "overrides", "said", "has", "lacks"),
    [
        ("0.7.1", (), "the legacy actor", {"501", "502", "701"}, {"503", "505", "704", "706"}),
        ("0.7.1", (f"{ACTOR}.use_dynamic_bsz=True",), "the legacy actor", {"704"}, {"707"}),
        ("0.7.1", ENGINE, "engine workers of the V0 trainer", {"503", "706"}, {"505", "707"}),
        ("0.9.1", (), "engine workers of the V1 trainer", {"503", "706"}, {"505", "707"}),
        ("0.9.1", ("algorithm.adv_estimator=gae", f"{MODEL}.use_remove_padding=False"),
         "actor and critic", {"505", "506", "707"}, {"706"}),
        ("0.7.1", (f"{ACTOR}.strategy=megatron",), "Megatron", {"701", "703"}, {"501", "502"}),
    ],
)  # fmt: skip
def test_advice_on_workers_names_what_those_workers_tell(
    file, version, overrides, said, has, lacks
):
    [one] = [a for a in examine(str(file), overrides, verl=version)["advice"]
             if a["setting"] == "DATAPROTO_AUDIT_WORKERS=1"]  # fmt: skip
    codes = {code.removeprefix("DPA") for code in one["codes"]}
    assert said in one["text"]
    assert has <= codes
    assert not lacks & codes


def test_advice_on_the_reference_names_what_it_needs(file):
    [one] = [
        a for a in examine(str(file), [f"~{ROLES}.ref"])["advice"] if "kl_loss" in a["setting"]
    ]
    assert "ref.log_prob_micro_batch_size_per_gpu is needed, too" in one["text"]
    [one] = [a for a in examine(str(file))["advice"] if "kl_loss" in a["setting"]]
    assert "needed" not in one["text"]


# -- what verl does not have -----------------------------------------------------------------------


def told(answer, level):
    return [p["text"] + " " + p["remedy"] for p in answer["problems"] if p["level"] == level]


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.adv_estimator=grpoo", "Did you mean grpo? There are gae, grpo,"),
        (f"{ACTOR}.loss_agg_mode=token_mean", "Did you mean token-mean?"),
        (f"{ACTOR}.policy_loss.loss_mode=gsp", "Did you mean gspo?"),
        (f"{ACTOR}.kl_loss_type=k4", "There are kl, k1,"),
        ("algorithm.kl_penalty=full", "There are kl, k1,"),
        (f"{ROLES}.rolout.n=8", f"has no key {ROLES}.rolout, and refuses to override it. Did you "
         f"mean {ROLES}.rollout?"),
        ("data.train_batchsize=8", "Did you mean data.train_batch_size?"),
        ("rollout.n=8", "no key rollout, "),
        ("zzz=1", "One that is meant is added with +zzz=..."),
    ],
)  # fmt: skip
def test_what_verl_does_not_have_is_refused_with_the_nearest(file, version, override, said):
    answer = examine(str(file), [override], verl=version)
    [text] = [text for text in told(answer, "fail") if override.partition("=")[2] in text or
              said in text]  # fmt: skip
    assert said in text
    assert not answer["ok"]


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
@pytest.mark.parametrize(
    "override",
    ["+zzz=1", "++data.mine=1", f"+{ROLES}.model.override_config.x.y=1", "ray_kwargs.any.thing=1",
     f"{ROLES}.model.override_config.attn=sdpa", "algorithm.adv_estimator=opo",
     f"{ACTOR}.kl_loss_type=k3", "trainer.logger=[console]", "~critic",
     "data.apply_chat_template_kwargs.enable_thinking=false"],
)  # fmt: skip
def test_what_verl_has_or_is_given_on_purpose_is_let_through(file, version, override):
    assert examine(str(file), [override], verl=version)["ok"]
    assert not told(examine(str(file), [override], verl=version), "warn")


def test_unknown_keys_of_a_file_are_told_and_counted(tmp_path):
    path = tmp_path / "job.yaml"
    mine = "\n".join(f"  own_{i}: 1" for i in range(30))
    path.write_text(
        f"algorithm: {{adv_estimatr: grpo}}\ntrainer: {{use_v1: true}}\nmine:\n{mine}\n"
    )
    answer = examine(str(path), verl="0.7.1")
    first, second, third = told(answer, "warn")[:3]
    assert "no key algorithm.adv_estimatr. Did you mean algorithm.adv_estimator?" in first
    assert "no key trainer.use_v1; it is one of verl 0.9.1." in second
    assert "no key mine. Leave it where your own code reads it." in third
    path.write_text(f"data:\n{mine}\n")
    texts = [text for text in told(examine(str(path), verl="0.7.1"), "warn") if "DPA" not in text]
    assert "20 more keys are none of verl 0.7.1" in " ".join(texts)


def test_names_that_own_code_registers_are_a_warning(file):
    own = ["algorithm.adv_estimator=mine", f"{MODEL}.external_lib=my_lib"]
    answer = examine(str(file), own, verl="0.9.1")
    assert answer["ok"]
    assert "unless your external_lib registers it" in told(answer, "warn")[0]


def test_a_file_that_is_not_composed_is_said(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 1}\n")
    [text] = [t for t in told(examine(str(path), verl="0.9.1"), "warn") if "defaults: list" in t]
    assert "2 entries, which are not read" in text
    assert "--cfg job > job.yaml" in text
    path.write_text("defaults: {a: 1}\ntrainer: {nnodes: 1}\n")
    assert not any("defaults: list" in t for t in told(examine(str(path)), "warn"))


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n---\n", "  # a\n"])
def test_an_empty_file_is_refused_with_how_to_get_a_full_one(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    for overrides in ([], ["trainer.nnodes=1"]):
        with pytest.raises(UsageError, match="the file is empty") as refused:
            examine(str(path), overrides)
        assert "--cfg job" in str(refused.value)


def test_an_empty_mapping_is_refused_without_overrides(empty):
    with pytest.raises(UsageError, match="the file is empty"):
        examine(empty)


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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("LEVEL", "max", "Choose from off, shape, full"), ("EVRY_N_STEPS", "2", "every_n_steps"),
     ("ROWS", "-1", "whole number"), ("TRACE", "lst:1", "TRACE"), ("CONFIG", "gone.yaml", "gone"),
     ("POLICY", "gone.yaml", "gone.yaml")],
)  # fmt: skip
def test_a_wrong_setting_is_said_before_the_run(name, value, said):
    answer = environment(installed(verl="0.9.1"), PLUGIN | {f"DATAPROTO_AUDIT_{name}": value})
    assert said in answer["attach"]["wrong"]
    assert f"DATAPROTO_AUDIT_{name}" in answer["attach"]["wrong"] or name in ("CONFIG", "POLICY")
    assert not answer["attach"]["will_attach"]


def test_a_settings_file_with_a_key_that_is_no_text_is_said(tmp_path):
    (tmp_path / "audit.yaml").write_text("1: x")
    named = PLUGIN | {"DATAPROTO_AUDIT_CONFIG": str(tmp_path / "audit.yaml")}
    answer = environment(installed(verl="0.9.1"), named)["attach"]
    assert "1: no such setting" in answer["wrong"]
    assert not answer["will_attach"]


@pytest.mark.parametrize(
    ("verl", "attaches"),
    [("0.5.0", False), ("0.6.1", False), ("0.7.0", False), ("0.8.0", False), ("0.8.1.dev0", False),
     ("0.9.0", True), ("0.9.1", True), ("0.10.0", True), ("1.0.0", True), ("1", True),
     ("main", False)],
)  # fmt: skip
def test_the_entry_point_counts_from_the_release_that_loads_it(verl, attaches):
    attach = environment(installed(verl=verl), {"DATAPROTO_AUDIT": "1"})["attach"]
    assert attach["will_attach"] is attaches
    assert ("not known to look for the entry point" in attach["remedy"]) is not attaches
    assert environment(installed(verl=verl), PLUGIN)["attach"]["will_attach"]


def test_empty_settings_count_as_not_set():
    empty = {f"DATAPROTO_AUDIT_{name}": "" for name in ("LEVEL", "ROWS", "CONFIG")}
    attach = environment(installed(verl="0.9.1"), PLUGIN | empty | {"DATAPROTO_AUDIT": ""})[
        "attach"
    ]
    assert attach["wrong"] == ""
    assert attach["will_attach"]


@pytest.mark.parametrize(
    ("verl", "environ", "remedy"),
    [
        ("0.7.1", {"DATAPROTO_AUDIT": "1"},
         "To attach it, set VERL_USE_EXTERNAL_MODULES=dataproto_audit.verl_plugin (verl 0.7.1 does "
         "not look for the entry point)."),
        ("0.9.1", {}, "To attach it, set VERL_USE_EXTERNAL_MODULES=dataproto_audit.verl_plugin or "
         "DATAPROTO_AUDIT=1."),
        ("0.9.1", PLUGIN | {"DATAPROTO_AUDIT": "0"}, "Unset DATAPROTO_AUDIT, which is off, or set "
         "it to 1."),
        ("0.9.1", PLUGIN | {"DATAPROTO_AUDIT_LEVEL": "off"}, "Unset DATAPROTO_AUDIT_LEVEL, which "
         "is off, or choose shape or full."),
        ("0.9.1", PLUGIN, ""),
        (None, {}, ""),
    ],
)  # fmt: skip
def test_how_to_attach_is_said_where_nothing_is(verl, environ, remedy):
    attach = environment(installed(verl=verl), environ)["attach"]
    assert attach["remedy"] == remedy
    assert attach["will_attach"] is (verl is not None and not remedy)


@pytest.mark.parametrize(
    ("verl", "said"),
    [("0.7.1", "RayPPOTrainer, structure and values; legacy and engine workers"),
     ("0.9.1", "PPOTrainer (V1) and RayPPOTrainer (V0), structure and values; workers of both")],
)  # fmt: skip
def test_what_can_be_checked_is_that_of_the_version(verl, said):
    assert said in environment(installed(verl=verl), {})["checkable"]


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
