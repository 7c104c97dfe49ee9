"""Steps saved file by file: a fault is where its values were first seen, and nothing is cleared by
a file that could not be checked."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.checker.config import settings_from
from dataproto_audit.dump.trace import Trace, write_step
from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.convert import convert
from dataproto_audit.replay.recording import PARTIAL

SAMPLES = Path(__file__).parents[1] / "data" / "samples" / "verl-0.7.1"
CONFIG = settings_from("adv_estimator=grpo n=4", {})[0]


TOKENS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask",
          "rollout_log_probs")  # fmt: skip
ORDER = list(range(16))[::-1]


@dataclass(frozen=True)
class Made:
    """A boundary to write: the rollout in another order, log-probs alone, and the whole batch."""

    stage: str
    settings: dict
    name: str
    when: str = "after"
    part: str = ""
    evidence: dict = field(default_factory=lambda: {PARTIAL: True})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The boundaries of a converted step, and the files of verl's calls before."""
    to = tmp_path_factory.mktemp("made") / "t"
    convert(SAMPLES / "padeos", to)
    last = Trace(to).step(1).find("advantage")
    view, known = last.view(), last.settings
    drawn = {name: view.tensors[name][ORDER] for name in TOKENS}
    return [
        (Made("rollout", known, "00_rollout"), BatchView(drawn, {}, {})),
        *((Made(stage, known, f"0{place}_{stage}"), BatchView({name: view.tensors[name]}, {}, {}))
          for place, stage, name in ((1, "old_log_prob", "old_log_probs"),
                                     (2, "ref_log_prob", "ref_log_prob"))),
        (Made("advantage", known, "03_advantage"), view),
    ]  # fmt: skip


def judged(whole, to, name="", change=None, late=""):
    """The verdict where ``change`` was made to ``field`` wherever its first values are."""
    items = []
    for boundary, view in whole:
        tensors = {one: tensor.clone() for one, tensor in view.tensors.items()}
        if name in tensors and boundary.name >= late:
            change(tensors[name])
        batch = {"batch": tensors, "non_tensor_batch": dict(view.arrays),
                 "meta_info": dict(view.meta)}  # fmt: skip
        options = {"when": boundary.when, "part": boundary.part, "evidence": boundary.evidence}
        items.append((boundary.stage, batch, options))
    write_step(to / "t", 1, items, settings=whole[-1][0].settings)
    return bisect(to / "t", config=CONFIG)


def nan(tensor):
    tensor[3, 0] = float("nan")


def shifted(tensor):
    tensor[3] = torch.roll(tensor[3], 1)


@pytest.mark.parametrize("change", [nan, shifted])
@pytest.mark.parametrize(
    ("name", "stage"), [("old_log_probs", "old_log_prob"), ("ref_log_prob", "ref_log_prob")]
)
def test_a_fault_is_where_its_values_were_first_seen(whole, tmp_path, name, stage, change):
    verdict = judged(whole, tmp_path, name, change)
    told = verdict.to_dict()
    assert (verdict.stage, told["field"], verdict.rows) == (stage, name, [3])
    assert told["boundary"].endswith(stage)
    assert told["later_faults"] == []
    assert stage not in {item["stage"] for item in told["cleared"]}
    assert f"boundary  {told['boundary']}" in verdict.story()


def test_rows_are_named_as_there(whole, tmp_path):
    """The rollout was saved before the batch was balanced: its rows are in another order."""
    values = whole[-1][1].tensors["rollout_log_probs"][3].clone()

    def broken(tensor):
        row = next(r for r, one in enumerate(tensor) if torch.equal(one, values))
        tensor[row, 0] = float("nan")

    verdict = judged(whole, tmp_path, "rollout_log_probs", broken)
    assert (verdict.stage, verdict.rows) == ("rollout", [ORDER.index(3)])


def test_the_engine_is_the_odd_one_where_trainer_and_reference_agree(whole, tmp_path):
    values = whole[-1][1].tensors["rollout_log_probs"][3].clone()

    def broken(tensor):
        row = next(r for r, one in enumerate(tensor) if torch.equal(one, values))
        tensor[row] = tensor[row] * 1.3 - 0.3

    verdict = judged(whole, tmp_path, "rollout_log_probs", broken)
    told = verdict.to_dict()
    assert (verdict.stage, told["field"]) == ("rollout", "rollout_log_probs")
    assert "by a third one" in told["evidence"]["says"]


def test_what_changed_in_between_stays_where_it_was_seen(whole, tmp_path):
    """Wrong only from the advantage on: nothing before it holds these values."""
    verdict = judged(whole, tmp_path, "old_log_probs", nan, late="03")
    assert (verdict.verdict, verdict.stage) == ("faulty", "advantage")


def test_a_healthy_one_is_quiet_and_says_what_was_not_judged(whole, tmp_path):
    verdict = judged(whole, tmp_path)
    states = {stage: state for stage, state, _ in verdict.stages}
    assert verdict.faults == []
    assert states["old_log_prob"] == states["ref_log_prob"] == "not judged"
    assert states["rollout"] == states["advantage"] == "ok"


def test_notes_are_told_under_the_verdict(whole, tmp_path):
    verdict = judged(whole, tmp_path)
    codes = [info["code"] for info in verdict.to_dict()["infos"]]
    assert "DPA108" in codes
    assert "  info      DPA108" in verdict.story()


def test_unknown_factors_are_not_checked_and_said(tmp_path):
    convert(SAMPLES / "gae_legacy", tmp_path / "t")
    bare = settings_from("adv_estimator=gae", {})[0]
    story = bisect(tmp_path / "t", config=bare).story()
    assert "NOT CHECKED  advantages: not recomputed, as nothing says gamma or lam" in story
    full = settings_from("adv_estimator=gae gamma=1.0 lam=1.0", {})[0]
    assert "NOT CHECKED" not in bisect(tmp_path / "t", config=full).story()


def test_of_quiet_steps_the_fullest_is_judged_and_the_others_are_named(whole, tmp_path):
    judged(whole, tmp_path)
    last = whole[-1]
    batch = {"batch": dict(last[1].tensors), "non_tensor_batch": dict(last[1].arrays),
             "meta_info": {}}  # fmt: skip
    alone = ("update_actor", batch, {"when": "before", "evidence": {PARTIAL: True}})
    write_step(tmp_path / "t", 2, [alone], settings=last[0].settings)
    verdict = bisect(tmp_path / "t", config=CONFIG)
    assert verdict.step == 1
    assert verdict.to_dict()["other_steps"] == {"quiet": [2], "not_judged": []}
    assert "other steps  checked and quiet, not recomputed: 2" in verdict.story()
