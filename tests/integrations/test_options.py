"""Where settings come from, which wins, and what is refused."""

from pathlib import Path

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.stages import STAGES as DECLARED
from dataproto_audit.integrations.options import KNOWN, PREFIX, STAGES, options, switched_on


def test_a_call_wins_over_the_environment_and_that_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text("on_fail: record\nlevel: shape\nevery_n_steps: 3\n")
    environ = {"DATAPROTO_AUDIT_LEVEL": "full", "DATAPROTO_AUDIT_EVERY_N_STEPS": "5"}
    found = options(path, environ, every_n_steps=7)
    assert (found.on_fail, found.level, found.every_n_steps) == ("record", "full", 7)


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text("rows: 64\nstages: [rollout, advantage]\n")
    found = options(environ={"DATAPROTO_AUDIT_CONFIG": str(path)})
    assert (found.rows, found.stages) == (64, ("rollout", "advantage"))


def test_the_defaults_are_full_and_warn() -> None:
    found = options(environ={})
    assert (found.level, found.on_fail, found.every_n_steps) == ("full", "warn", 1)
    assert found.flight_recorder
    assert found.metrics


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("STAGES", "rollout, advantage", ("rollout", "advantage")),
        ("RANKS", "0,3", (0, 3)),
        ("METRICS", "off", False),
        ("TABLES", "True", True),
        ("ROWS", "128", 128),
        ("RUN_DIR", "some/where", "some/where"),
    ],
)
def test_variables_are_read_by_kind(name: str, text: str, value: object) -> None:
    assert getattr(options(environ={f"{PREFIX}{name}": text}), name.lower()) == value


@pytest.mark.parametrize(
    ("environ", "code", "told"),
    [
        ({"LEVEL": "max"}, "DPA851", "is 'max'. Choose from off, shape, full"),
        ({"ON_FAIL": "stop"}, "DPA851", "Choose from raise, warn, record"),
        ({"STAGES": "rolout"}, "DPA851", "Choose from prompts, rollout"),
        ({"EVERY_N_STEPS": "0"}, "DPA851", "whole number from 1 on"),
        ({"ROWS": "some"}, "DPA851", "whole number from 0 on"),
        ({"RANKS": "a"}, "DPA851", "whole number"),
        ({"METRICS": "maybe"}, "DPA851", "Choose from 1, true, on, yes, 0"),
        ({"EVERY_N_STEP": "2"}, "DPA850", "Did you mean every_n_steps?"),
        ({"FOO": "2"}, "DPA850", "There are level, on_fail"),
    ],
)
def test_wrong_values_are_refused_with_what_there_is(
    environ: dict[str, str], code: str, told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        options(environ={f"{PREFIX}{name}": value for name, value in environ.items()})
    assert caught.value.code == code
    assert told in str(caught.value)
    assert PREFIX in str(caught.value)


@pytest.mark.parametrize("text", ["- a list\n", "level: [\n", "levle: full\n"])
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"audit\.yaml"):
        options(path, {})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        options(tmp_path / "none.yaml", {})


def test_yaml_reads_a_bare_off_as_false(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text("level: off\n")
    assert options(path, {}).level == "off"


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, None), ("1", True), ("on", True), ("0", False), ("", None), (" ", None)],
)
def test_the_switch(text: str | None, value: bool | None) -> None:
    assert switched_on({} if text is None else {"DATAPROTO_AUDIT": text}) is value


@pytest.mark.parametrize("name", [*KNOWN, "config"])
def test_an_empty_variable_counts_as_not_set(name: str) -> None:
    assert options(environ={f"{PREFIX}{name.upper()}": ""}) == options(environ={})


def test_a_wrong_switch_is_refused() -> None:
    with pytest.raises(UsageError, match="DATAPROTO_AUDIT"):
        switched_on({"DATAPROTO_AUDIT": "perhaps"})


def test_stages_that_can_be_chosen_are_declared() -> None:
    assert [name for name in DECLARED if name not in ("dispatch",)] == list(STAGES)


def test_steps_are_chosen_from_the_first_on() -> None:
    found = options(environ={}, every_n_steps=3)
    assert [step for step in range(9) if found.looks_at(step)] == [0, 1, 4, 7]


def test_ranks_count_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options(environ={}, ranks="0,2")
    monkeypatch.delenv("RANK", raising=False)
    assert found.here()
    monkeypatch.setenv("RANK", "2")
    assert found.here()
    monkeypatch.setenv("RANK", "1")
    assert not found.here()
    assert options(environ={}).here()


def test_every_setting_is_known() -> None:
    assert len(KNOWN) == len(set(KNOWN)) >= 10


def test_a_policy_that_cannot_be_read_is_refused_where_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"DPA851 .*nowhere\.yaml"):
        options(environ={}, policy=str(tmp_path / "nowhere.yaml"))
    good = tmp_path / "policy.yaml"
    good.write_text("ignore: [DPA6]\n")
    assert options(environ={f"{PREFIX}POLICY": str(good)}).policy == str(good)


def test_a_home_folder_is_meant_by_its_sign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a call, a file and a variable."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "audit.yaml"
    path.write_text("run_dir: ~/x\n")
    told = [
        options(environ={}, run_dir="~/x"),
        options("~/audit.yaml", {}),
        options(environ={"DATAPROTO_AUDIT_RUN_DIR": "~/x"}),
    ]
    assert {found.run_dir for found in told} == {str(tmp_path / "x")}


def test_blanks_around_a_word_are_none_of_it() -> None:
    environ = {"DATAPROTO_AUDIT_LEVEL": " shape", "DATAPROTO_AUDIT_TRACE": " off "}
    assert (options(environ=environ).level, options(environ=environ).trace) == ("shape", "off")


def test_the_modes_of_a_trace_are_listed_with_off() -> None:
    with pytest.raises(UsageError, match=r"or off\."):
        options(environ={"DATAPROTO_AUDIT_TRACE": "sometimes"})


@pytest.mark.parametrize("text", ["1: x", "true: x", "null: x", "1.5: x", "2020-01-01: x"])
def test_a_key_that_is_no_text_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="no such setting") as refused:
        options(path, environ={})
    assert refused.value.code == "DPA850"
    assert str(path) in str(refused.value)
