import pytest

from dataproto_audit import Auditor, check
from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding, Outcome, Report
from dataproto_audit.policy import Alias, Policy, load_policy
from dataproto_audit.testing.recipes import cook

SHIFTED = [{"op": "shift", "f": "old_log_probs", "by": 1}]
NAN = [{"op": "set", "f": "old_log_probs", "at": [1, 2], "v": "nan"}]


def written(tmp_path, text, name="policy.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def codes(report):
    return {finding.code for finding in report.findings if finding.severity != "info"}


def test_an_ignored_code_is_left_out_and_its_check_not_applicable():
    batch = cook("T", NAN)
    assert "DPA301" in codes(check(batch))
    report = check(batch, policy=Policy(ignore=("DPA301",)))
    assert "DPA301" not in codes(report)
    told = [o for o in report.outcomes if o.check == "old_log_probs_finite"]
    assert {(o.kind, o.reason) for o in told} == {("not_applicable", "ignored by configuration")}


def test_a_family_can_be_selected():
    batch = cook("T", [*NAN, {"op": "meta", "k": "dp_size", "v": 4}])
    assert codes(check(batch, policy=Policy(select=("DPA1",)))) == {"DPA117"}


def test_faults_of_the_package_are_always_told():
    policy = Policy(select=("DPA1",), ignore=("DPA",))
    assert policy.reports("DPA901")
    assert not policy.reports("DPA101")


def test_a_severity_decides_whether_a_report_is_ok():
    batch = cook("T", NAN)
    assert not check(batch).ok
    assert check(batch, policy=Policy(severities={"DPA301": "warn"})).ok


def test_totals_of_the_auditor_follow_the_policy():
    auditor = Auditor(policy=Policy(ignore=("DPA1",)), on_fail="raise")
    auditor.begin_step(1)
    auditor.boundary("reward", {"batch": {}, "meta_info": {}})
    assert auditor.severities["fail"] == 0
    assert auditor.outcomes["failed"] == 0


def test_a_report_without_rules_is_left_as_it_is():
    report = Report([Finding("DPA101", "fail", "reward", "x")], [Outcome("x", "DPA101", "failed")])
    Policy().apply(report)
    assert (len(report.findings), report.outcomes[0].kind) == (1, "failed")


def test_a_tolerance_replaces_the_noise_model():
    batch = cook("T", [{"op": "add", "f": "old_log_probs", "at": [0, 0], "v": 0.05}])
    batch["batch"]["ref_log_prob"] = batch["batch"]["old_log_probs"]
    strict = check(batch, policy=Policy(tolerances={"log_prob_token": 0.02}))
    [found] = [f for f in strict if f.code == "DPA303"]
    assert (found.rows, dict(found.columns)) == ((0,), {0: (0,)})
    assert found.evidence["noise model"] == "configured"
    assert not codes(check(batch, policy=Policy(tolerances={"log_prob_token": 0.1})))


def test_an_alias_with_its_shift_reads_a_field_of_another_convention():
    batch = cook("T", [])
    theirs = batch["batch"].pop("old_log_probs")
    batch["batch"]["logprobs_next"] = theirs.copy()
    batch["batch"]["logprobs_next"][:, 1:] = theirs[:, :-1]
    right = Policy(aliases={"old_log_probs": Alias("logprobs_next", -1)})
    wrong = Policy(aliases={"old_log_probs": Alias("logprobs_next")})
    told = [f for f in check(batch, policy=right) if f.severity != "info"]
    assert {tuple(f.columns.items()) for f in told} == {((3, (4,)),)}, "that cell had no source"
    assert any(len(f.rows) > 1 for f in check(batch, policy=wrong) if f.severity != "info")


def test_toml_and_yaml_say_the_same(tmp_path, monkeypatch):
    toml = """
        [tool.dataproto_audit]
        ignore = ["DPA702", "DPA6"]
        severities = { DPA208 = "warn" }
        tolerances = { log_prob_mean = 0.1 }
        aliases.old_log_probs = { name = "logprobs", shift = 1 }
    """
    yaml = """
        ignore: [DPA702, DPA6]
        severities: {DPA208: warn}
        tolerances: {log_prob_mean: 0.1}
        aliases: {old_log_probs: {name: logprobs, shift: 1}}
    """
    policy = load_policy(written(tmp_path, toml, "pyproject.toml"))
    assert policy == load_policy(written(tmp_path, yaml))
    assert policy.aliases == {"old_log_probs": Alias("logprobs", 1)}
    monkeypatch.chdir(tmp_path)
    assert load_policy() == policy
    (tmp_path / "pyproject.toml").unlink()
    assert load_policy() == Policy()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ignored: [DPA1]", "DPA850 .*unknown key ignored.*Known keys: select, ignore"),
        ("ignore: DPA1", "ignore is not a list of codes"),
        ("ignore: [DPA1999]", "'DPA1999', which is no code and no family"),
        ("severities: {DPA101: bad}", "severity 'bad'.*Choose from fail, warn, info"),
        ("severities: {DPA1: warn}", "DPA1, which is no code"),
        ("tolerances: {log_prob: 1}", "tolerances.log_prob = 1.*log_prob_token, log_prob_mean"),
        ("tolerances: {log_prob_mean: yes}", "tolerances.log_prob_mean = True"),
        ("aliases: {values: {column: 3}}", "aliases.values"),
        ("aliases: [values]", "aliases is not a mapping"),
        ("- DPA1", "not a mapping"),
        ("a: [", "cannot be read"),
        ("[" * 3000, "cannot be read .*nested too deeply"),
        ("a: 2024-13-45", "cannot be read"),
        ("0", "not a mapping"),
        ("ignore: null", "ignore is not a list of codes"),
        ("ignore: 5", "ignore is not a list of codes"),
        ("select: true", "select is not a list of codes"),
        ("ignore: ['']", "ignore names '', which is no code and no family"),
        ("ignore: [D]", "ignore names 'D', which is no code.*A family is"),
        ("select: [DPA]", "select names 'DPA'"),
        ("tolerances: {log_prob_mean: .nan}", "log_prob_mean = nan.*finite and not negative"),
        ("tolerances: {log_prob_token: .inf}", "log_prob_token = inf"),
        ("tolerances: {log_prob_token: -1}", "log_prob_token = -1"),
        ("aliases: {5: old_log_probs}", "aliases.5 is no name of a field"),
        ("aliases: {values: v, returns: v}", "aliases.values and aliases.returns both name v"),
    ],
)
def test_a_mistake_names_the_file_and_the_place(tmp_path, text, says):
    with pytest.raises(UsageError, match=says) as raised:
        load_policy(written(tmp_path, text))
    assert "policy.yaml" in str(raised.value)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere.toml: cannot be read"):
        load_policy(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("text", ["tool = 'x'", "a = " + "[" * 3000, "a = 1979-13-45"])
def test_a_toml_file_of_other_things_is_a_clear_error(tmp_path, text):
    with pytest.raises(UsageError, match=r"DPA851 .*policy.toml") as raised:
        load_policy(written(tmp_path, text, "policy.toml"))
    assert "\n" not in str(raised.value)


def test_a_shift_under_our_own_name_counts_once():
    batch = cook("T", [])
    theirs = batch["batch"]["old_log_probs"]
    moved = theirs.copy()
    moved[:, 1:], moved[:, :1] = theirs[:, :-1], 0
    batch["batch"]["old_log_probs"] = moved
    own = Policy(aliases={"old_log_probs": Alias("old_log_probs", -1)})
    told = [f for f in check(batch, policy=own) if f.severity != "info"]
    assert {tuple(f.columns.items()) for f in told} == {((3, (4,)),)}, "that cell had no source"
