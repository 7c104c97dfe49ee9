"""``check``, ``check_union`` and ``check_concat``: what goes in, what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dataproto_audit
from dataproto_audit.checker import check, check_concat, check_union
from dataproto_audit.checker.api import ordered
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.findings import Finding
from dataproto_audit.testing.recipes import cook

from ._forms import ARRAYS, CONFIG, FORMS, META, jagged, numbers, told, with_garbage

Ops = list[dict[str, Any]]
GAP: Ops = [{"op": "add", "f": "old_log_probs", "at": [3, 2], "v": -0.9}]
NO_REWARD: Ops = [{"op": "mul", "f": "advantages", "at": [1], "v": 3.0}]
EARLY: Ops = [{"op": "shift", "f": "token_level_scores", "by": -1}]
TRAINED_PAD: Ops = [{"op": "set", "f": "response_mask", "at": [2, 4], "v": 1}]


def test_it_is_there_at_the_top() -> None:
    assert dataproto_audit.check is check
    assert check(cook("T", [])).ok


@pytest.mark.parametrize("ops", [[], GAP, NO_REWARD, EARLY, GAP + NO_REWARD + EARLY])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_of_a_batch_says_the_same(form: str, ops: Ops) -> None:
    want = check(numbers(cook("T", ops)), config=CONFIG)
    got = check(FORMS[form](cook("T", ops)), config=CONFIG)
    assert told(got) == told(want)
    assert bool(want.findings) == bool(ops)


def test_each_finding_names_cell_stage_and_cause() -> None:
    findings = {f.code: f for f in check(cook("T", GAP + NO_REWARD + EARLY))}
    gap, advantage, early = findings["DPA305"], findings["DPA408"], findings["DPA405"]
    assert (gap.stage, gap.rows) == ("ref_log_prob", (3,))
    assert gap.columns == {3: (2,)}
    assert (advantage.stage, advantage.field, advantage.rows) == ("advantage", "advantages", (1,))
    assert (early.stage, early.field, early.causes[0]) == (
        "reward", "token_level_scores", "reward_shifted",
    )  # fmt: skip
    assert gap.step == advantage.step == early.step == 1


def test_a_stage_that_is_named_is_checked_alone() -> None:
    broken = cook("T", EARLY + NO_REWARD)
    alone = check(broken, stage="reward")
    assert {f.stage for f in alone} == {"reward"}
    assert {f.stage for f in check(broken)} == {"reward", "advantage"}


def test_a_named_stage_is_held_to_what_it_declares() -> None:
    batch = cook("T", [{"op": "del", "f": ["advantages", "returns"]}])
    [finding, *_] = check(batch, stage="advantage").findings
    assert (finding.code, finding.field) == ("DPA101", "advantages")
    assert check(batch).ok


def test_findings_are_ordered_as_the_loop_goes_and_info_comes_last() -> None:
    pieces: Ops = [{"op": "meta", "k": "n", "v": 4}, *TRAINED_PAD, *EARLY, *NO_REWARD]
    report = check(cook("T", pieces))
    stages = list(STAGES)
    loud = [stages.index(f.stage) for f in report if f.severity != "info"]
    assert loud == sorted(loud)
    kinds = [f.severity == "info" for f in report]
    assert kinds == sorted(kinds)
    assert any(kinds)
    assert not all(kinds)


def test_a_finding_is_listed_once() -> None:
    one = Finding("DPA405", "fail", "reward", check="a", field="x", rows=(1,))
    two = Finding("DPA405", "fail", "reward", check="b", field="x", rows=(1,))
    other = Finding("DPA405", "fail", "reward", check="b", field="x", rows=(2,))
    assert len(ordered([one, two, other])) == 2


def test_an_answer_is_text_json_and_a_table() -> None:
    report = check(cook("T", GAP))
    assert str(report).startswith("NOT OK: ")
    assert "row 3: 2" in str(report)
    said = json.loads(report.to_json())
    assert set(said) >= {"ok", "outcomes", "findings", "not_checkable"}
    assert said["ok"] is False
    assert said["outcomes"]["not_checkable"] == len(said["not_checkable"])
    assert {"code", "severity", "step", "stage", "field", "rows", "columns", "expected", "actual",
            "evidence", "causes", "hint"} <= set(said["findings"][0])  # fmt: skip
    table = report.to_pandas()
    assert table["code"].tolist() == [f.code for f in report]
    assert all(outcome.reason for outcome in report.not_checkable)


def test_an_answer_without_findings_prints_too() -> None:
    report = check({"batch": {"responses": np.ones((2, 3), np.int64)}})
    assert str(report).startswith("ok: ")
    assert json.loads(report.to_json())["findings"] == []
    assert report.to_pandas().empty


def test_the_configuration_says_what_the_batch_does_not() -> None:
    batch = cook("T", [{"op": "meta", "k": "n", "v": None}])
    assert not [f for f in check(batch) if f.check == "group_size"]
    [finding] = [f for f in check(batch, config={"n": 2}) if f.check == "group_size"]
    assert finding.expected == "2 rows per uid"


# -- both sides of a boundary ----------------------------------------------------------------------


def _without(*names: str) -> Ops:
    return [{"op": "del", "f": list(names)}]


LATE = ("advantages", "returns", "token_level_rewards")


def test_both_sides_of_a_boundary_are_compared() -> None:
    before = cook("T", _without(*LATE))
    after = cook("T", [{"op": "set", "f": "responses", "at": [0, 0], "v": 6}])
    found = {(f.code, f.stage, f.field) for f in check(after, before=before)}
    assert ("DPA106", "advantage", "responses") in found
    assert check(cook("T", []), before=before).ok


def test_a_named_boundary_is_that_of_the_stage() -> None:
    before = cook("T", [])
    after = cook("T", [{"op": "take", "f": "*", "idx": [5, 4, 3, 2, 1, 0]}])
    assert check(after, stage="balance", before=before).ok
    moved = cook("T", [{"op": "take", "f": "responses", "idx": [1, 0, 2, 3, 4, 5]}])
    report = check(moved, stage="balance", before=before)
    assert not report.ok


def test_what_changed_between_equal_boundaries_is_named_at_its_writer() -> None:
    before = cook("T", [])
    after = cook("T", [{"op": "add", "f": "token_level_scores", "at": [0, 2], "v": 0.25}])
    [finding] = [f for f in check(after, before=before) if f.code == "DPA113"]
    assert (finding.stage, finding.field, finding.rows) == ("reward", "token_level_scores", (0,))


def test_the_same_batch_twice_is_quiet() -> None:
    for base in "TMV":
        report = check(cook(base, []), before=cook(base, []))
        assert not report.findings, str(report)


# -- several steps ---------------------------------------------------------------------------------


def test_a_history_of_metrics_needs_no_batch() -> None:
    steps = [{"step": n, "response_mask/tokens": 100 * (n < 4)} for n in range(1, 5)]
    [finding] = check(None, history=steps).findings
    assert (finding.code, finding.step) == ("DPA608", 4)


def test_steps_without_a_number_are_counted() -> None:
    for steps in ([{"tokens/trained": 0}] * 2, [{"step": float("nan"), "tokens/trained": 0}] * 2):
        assert [f.step for f in check(None, history=steps)] == [1, 2]


def test_a_history_of_batches_is_checked_step_by_step() -> None:
    steps = [cook("T", [{"op": "meta", "k": "global_steps", "v": n}]) for n in (1, 2)]
    steps.append(cook("T", [{"op": "meta", "k": "global_steps", "v": 3}, *EARLY]))
    report = check(None, history=steps)
    assert [(f.code, f.step) for f in report if f.severity == "fail"] == [("DPA405", 3)]


def test_the_batch_is_the_step_after_its_history() -> None:
    steps = [{"actor/grad_norm": 0.5}] * 3
    report = check(cook("T", EARLY), history=steps)
    assert [f.code for f in report if f.severity == "fail"] == ["DPA405"]


# -- merges ----------------------------------------------------------------------------------------


def test_a_union_that_would_lose_rows_or_values() -> None:
    left, right = cook("T", []), cook("T", [{"op": "take", "f": "*", "idx": [0, 3]}])
    [finding] = check_union(left, right).findings
    assert (finding.code, finding.stage, finding.field) == ("DPA114", "union", "batch_size")
    other = cook("T", [{"op": "set", "f": "responses", "at": [1, 2], "v": 8}])
    [finding] = check_union(left, other).findings
    assert (finding.code, finding.rows, finding.columns) == ("DPA115", (1,), {1: (2,)})
    assert check_union(left, cook("T", [])).outcomes[0].kind == "passed"


def test_a_concatenation_that_would_lose_a_field() -> None:
    parts = [cook("T", []), cook("T", _without("values")), cook("T", [])]
    [finding] = check_concat(parts).findings
    assert (finding.code, finding.stage, finding.field) == ("DPA116", "dispatch", "values")
    assert check_concat([cook("M", [])] * 2).ok
    assert check_concat([]).ok


def test_meta_entries_that_cannot_be_used_are_told_by_merges_too() -> None:
    wrong = cook("T", [{"op": "meta", "k": "n", "v": "three"}])
    for report in (check_union(wrong, wrong), check_concat([wrong]), check(wrong)):
        [finding] = [f for f in report if f.code == "DPA112"]
        assert (finding.field, finding.stage) == ("meta_info.n", "prompts")
        assert finding.actual == "which is no whole number"


# -- garbage ---------------------------------------------------------------------------------------


def test_nothing_to_check_is_a_usage_error() -> None:
    for args in ((None,), (None, None, None, [])):
        with pytest.raises(UsageError, match="there is nothing to check"):
            check(*args)


@pytest.mark.parametrize("batch", [3, "text", [1], object()])
def test_what_is_no_batch_is_a_usage_error(batch: Any) -> None:
    with pytest.raises(UsageError, match="DPA857"):
        check(batch)


def test_a_stage_that_nothing_declares_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="DPA"):
        check(cook("T", []), stage="rolout")


@pytest.mark.parametrize("batch", [{}, {"batch": {}}, {"batch": None}, {"meta_info": {"n": 3}}])
def test_an_empty_batch_is_checked_as_far_as_it_goes(batch: Any) -> None:
    report = check(batch)
    assert report.ok
    assert [o.kind for o in report.outcomes] == ["not_checkable"]


def test_a_mapping_of_other_things_is_not_checkable() -> None:
    [outcome] = check({1: 2}).outcomes
    assert (outcome.kind, outcome.check) == ("not_checkable", "fields.known")


def _own_faults(report: Any) -> list[str]:
    return [str(f) for f in report.findings if f.code.startswith("DPA9")]


_bases = st.sampled_from("TMV")
_names = sorted({*cook("T", [])["batch"], *cook("T", [])["non_tensor_batch"],
                 *cook("V", [])["non_tensor_batch"]})  # fmt: skip
_entries = ("n", "temperature", "global_steps", "eos_token_id", "pad_token_id", "adv_estimator",
            "dp_size", "top_p", "sampling", "micro_batch_size", "multi_turn", "tool_token_ids",
            "image_token_id", "merge_size", "cp_size", "old_log_prob_version", "process_reward",
            "true_on_policy", "max_response_length", "ranks", "losses", "rejection")  # fmt: skip
_changes = st.dictionaries(st.sampled_from(_names), st.sampled_from(sorted(ARRAYS)), max_size=3)
_metas = st.dictionaries(st.sampled_from(_entries), st.sampled_from(sorted(META)), max_size=2)


@given(base=_bases, changes=_changes, meta=_metas, before=st.booleans())
def test_garbage_is_a_finding_or_an_outcome_and_never_our_fault(
    base: str, changes: dict[str, str], meta: dict[str, str], before: bool
) -> None:
    known = cook(base, [])
    changes = {n: how for n, how in changes.items()
               if n in known["batch"] or n in known["non_tensor_batch"]}  # fmt: skip
    batch = with_garbage(base, changes, meta)
    report = check(batch, before=known if before else None)
    assert _own_faults(report) == []
    assert report.outcomes
    json.loads(report.to_json())
    assert str(report)
    assert _own_faults(check_union(known, batch)) == []
    assert _own_faults(check_concat([known, batch])) == []


@pytest.mark.parametrize("how", list(ARRAYS))
@pytest.mark.parametrize("name", ["responses", "response_mask", "old_log_probs", "uid"])
def test_each_kind_of_garbage_in_the_fields_that_matter(name: str, how: str) -> None:
    assert _own_faults(check(with_garbage("T", {name: how}, {}))) == []


@pytest.mark.parametrize("how", list(META))
@pytest.mark.parametrize("name", _entries)
def test_each_kind_of_garbage_in_meta_entries(name: str, how: str) -> None:
    assert _own_faults(check(with_garbage("T", {}, {name: how}))) == []


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("form", ["padded", "jagged"])
def test_batches_with_next_to_no_rows(rows: int, form: str) -> None:
    batch = cook("T", [{"op": "take", "f": "*", "idx": list(range(rows))}])
    if form == "jagged" and rows:
        fields = jagged(cook("T", []))
        batch = {"batch": {n: t[:rows] for n, t in fields.items() if not hasattr(t, "tolist")}}
    assert _own_faults(check(batch)) == []


@pytest.mark.parametrize("given", [5, "x", {"step": 1}, True])
def test_what_is_no_list_of_steps_or_batches_is_a_usage_error(given: Any) -> None:
    with pytest.raises(UsageError, match=r"DPA857 history is a .*list of steps"):
        check(None, history=given)
    with pytest.raises(UsageError, match=r"DPA857 parts is a .*list of batches"):
        check_concat(given)


@pytest.mark.parametrize("history", [[None], [3], ["x"], [[1, 2]]])
def test_a_history_that_is_none(history: Any) -> None:
    if history == [None]:
        assert check(None, history=history).ok
        return
    with pytest.raises(UsageError, match="DPA857"):
        check(None, history=history)


Metric = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
                   st.just(np.float32(0.5)), st.just(torch.tensor(0.5)), st.just(1 + 2j),
                   st.just(np.array(3)))  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(
    ["step", "lp_gap", "grad_norm", "ppo_kl", "kl_loss", "entropy", "masked_out_frac", "clipfrac",
     "trained_tokens", "dead_groups", "ppo_epochs", "lr", "greedy_hash", "something"]),
    Metric), min_size=1, max_size=5))  # fmt: skip
def test_metrics_of_any_kind(steps: list[dict[str, Any]]) -> None:
    report = check(None, history=steps)
    assert _own_faults(report) == []
    json.loads(report.to_json())


Broken = Callable[[dict[str, Any]], None]


def test_a_batch_is_left_as_it_was() -> None:
    batch = cook("T", GAP + EARLY)
    before = {name: array.copy() for name, array in batch["batch"].items()}
    check(batch, before=cook("T", []))
    assert all((batch["batch"][name] == array).all() for name, array in before.items())
    assert list(batch["meta_info"]) == list(cook("T", [])["meta_info"])
