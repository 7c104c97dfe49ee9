"""`show` on the command line: a boundary of a trace is chosen, listed, or named by its folder."""

import json

import pytest

from dataproto_audit.testing.traces import write_simulated


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_simulated(folder, "plain", steps=2)
    return folder


def test_a_trace_is_listed_until_a_boundary_is_chosen(call, trace):
    text = call("show", trace).stdout
    assert "in 2 steps" in text
    assert "after old_log_prob" in text
    assert "tensors" not in text
    assert call("show", trace, "--step", 2).stdout.count("after old_log_prob") == 1
    everything = call("show", trace, "--json").stdout.splitlines()
    assert len(everything) == text.count(" after ") + text.count(" before ")
    assert call("show", trace, "--boundary", "all").stdout.count("tensors") > 20


@pytest.mark.parametrize(
    ("name", "when"),
    [("advantage", "after"), ("advantage_before", "before"), ("rollout_before", "before")],
)
def test_a_boundary_is_called_by_stage_or_name(call, trace, name, when):
    found = call("show", trace, "--step", 2, "--boundary", name, "--row", 3, "--json").stdout
    [one] = map(json.loads, found.splitlines())
    assert (one["when"], one["step"], one["tokens"][0]["row"]) == (when, 2, 3)
    folder = trace / "trace" / "step_000002" / one["place"].split()[-1]
    [same] = map(json.loads, call("show", folder, "--row", 3, "--json").stdout.splitlines())
    assert same["place"] == one["place"]
    assert same["fields"] == one["fields"]
    assert "row 3" in call("show", folder, "--row", 3).stdout


def test_each_step_has_its_boundary(call, trace):
    found = call("show", trace, "--boundary", "reward", "--json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in found] == [2, 3]


@pytest.mark.parametrize(
    ("args", "fragments"),
    [
        (("--boundary", "rewards"), ("no boundary 'rewards'", "_reward,", "_advantage")),
        (("--boundary", "rewards", "--step", 3), ("in step 3", "_reward,")),
        (("--step", 9), ("no step 9", "It holds: 2, 3")),
        (("--row", 0), ("--row is of one", "--boundary", "_reward,")),
    ],
)
def test_errors_list_what_there_is(call, trace, args, fragments):
    done = call("show", trace, *args, check=2)
    assert all(fragment in done.stderr for fragment in fragments), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("option", [("--boundary", "reward"), ("--step", 1)])
def test_the_options_are_of_traces(call, trace, tmp_path, option):
    call("convert", trace, tmp_path / "batch.pkl", "--place", 3)
    assert "is no trace" in call("show", tmp_path / "batch.pkl", *option, check=2).stderr


def test_a_folder_is_named_from_within(call, trace, monkeypatch):
    step = trace / "trace" / "step_000002"
    [boundary] = step.glob("*_reward")
    monkeypatch.chdir(boundary)
    [one] = map(json.loads, call("show", ".", "--json").stdout.splitlines())
    monkeypatch.chdir(step)
    assert json.loads(call("show", boundary.name, "--json").stdout)["place"] == one["place"]
    assert "in 1 step" in call("show", ".").stdout
