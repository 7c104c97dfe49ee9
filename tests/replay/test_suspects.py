"""What an earlier fault explains, and what stands by itself beside it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.protocol import DataProto
from dataproto_audit.replay.bisect import Verdict, bisect
from dataproto_audit.replay.placed import Suspect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.replay.suspects import Blame
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.traces import toy_scorers

OPTIONS = Options(step=2, entropy=True, response_width=8, one_token=0, truncated=0)
LONG = 4
Change = Callable[[DataProto], None]


def judged(folder: Path, changes: Mapping[str, Change], *, model: bool = False) -> Verdict:
    """The verdict on a step whose batch is changed as it leaves each stage."""
    told = vars(OPTIONS.settings())
    with TraceWriter(folder / "trace", retention="all", settings=told) as writer:
        writer.begin_step(OPTIONS.step)
        for b in boundaries(OPTIONS):
            if b.when == "after" and b.stage in changes:
                changes[b.stage](b.batch)
            writer.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        writer.end_step()
    return bisect(folder, scorers=Scorers(**toy_scorers(OPTIONS)) if model else None)


def faults(verdict: Verdict) -> dict[str, str]:
    """The code of each fault that stands by itself, by stage."""
    return {fault.stage: fault.lead.code for fault in verdict.faults}


def long_rows(batch: DataProto) -> list[int]:
    return torch.nonzero(batch.batch["response_mask"].sum(1) >= LONG).flatten().tolist()


def another_uid(batch: DataProto) -> None:
    batch.non_tensor_batch["uid"] = np.array(["one"] * len(batch), dtype=object)


def two_rows_late(batch: DataProto) -> None:
    old, rows = batch.batch["old_log_probs"].clone(), long_rows(batch)[2:4]
    old[rows] = old[rows].roll(1, 1)
    batch.batch["old_log_probs"] = old


def one_token_far(batch: DataProto) -> None:
    old, row = batch.batch["old_log_probs"].clone(), long_rows(batch)[5]
    old[row, 2] -= 4
    batch.batch["old_log_probs"] = old


def other_row_overwritten(batch: DataProto) -> None:
    old, row = batch.batch["old_log_probs"].clone(), long_rows(batch)[0]
    old[row] = batch.batch["ref_log_prob"][row] - 1
    batch.batch["old_log_probs"] = old


def prompt_of_another_row() -> dict[str, Change]:
    """The first row is given another's prompt; its entropy comes out negative, wherever the row was
    moved to."""
    changed: list[torch.Tensor] = []

    def prompt(batch: DataProto) -> None:
        prompts, ids = batch.batch["prompts"].clone(), batch.batch["input_ids"].clone()
        other = next(row for row in range(len(batch)) if not torch.equal(prompts[row], prompts[0]))
        prompts[0], ids[0, : prompts.shape[1]] = prompts[other], prompts[other]
        attention = batch.batch["attention_mask"].clone()
        attention[0, : prompts.shape[1]] = attention[other, : prompts.shape[1]]
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        batch.batch.update({"prompts": prompts, "input_ids": ids, "attention_mask": attention,
                            "position_ids": positions})  # fmt: skip
        changed.append(ids[0].clone())

    def entropy(batch: DataProto) -> None:
        entropys = batch.batch["entropys"].clone()
        rows = (batch.batch["input_ids"] == changed[0]).all(1).nonzero()
        entropys[rows[0], 0] = -0.5
        batch.batch["entropys"] = entropys

    return {"rollout": prompt, "old_log_prob": entropy}


def test_a_wrong_uid_explains_no_shift(tmp_path: Path) -> None:
    """Prompts and uids do not belong together, in all rows; log-probs of two rows are late."""
    verdict = judged(tmp_path, {"union": another_uid, "old_log_prob": two_rows_late})
    assert list(faults(verdict)) == ["union", "old_log_prob"], verdict.story()


def test_two_faults_of_a_field_are_told_apart(tmp_path: Path) -> None:
    changes = {"old_log_prob": one_token_far, "ref_log_prob": other_row_overwritten}
    verdict = judged(tmp_path, changes, model=True)
    assert list(faults(verdict)) == ["old_log_prob", "ref_log_prob"], verdict.story()


@pytest.mark.parametrize(("rows", "by_itself"), [((0, 1), False), ((0, 1, 2), True)])
def test_two_faults_of_a_field_explain_what_their_rows_together_set_off(
    rows: tuple[int, ...], by_itself: bool
) -> None:
    def suspect(boundary: int, stage: str, code: str, check: str, *rows: int) -> Suspect:
        keys = frozenset(map(str, rows))
        return Suspect(boundary, stage, "old_log_probs", rows, {}, keys, code, check)

    nothing_recorded: Any = SimpleNamespace(seen=[])
    blame = Blame(nothing_recorded, [])
    blame.take(suspect(10, "old_log_prob", "DPA303", "rollout_old_gap", 0))
    blame.take(suspect(12, "ref_log_prob", "DPA106", "rows", 1))
    blame.take(suspect(16, "update_actor", "DPA501", "first_ratio", *rows))
    stages = [fault.stage for fault in blame.faults]
    assert stages == ["old_log_prob", "ref_log_prob", *["update_actor"] * by_itself]


def test_what_is_impossible_is_explained_by_nothing(tmp_path: Path) -> None:
    told = faults(judged(tmp_path, prompt_of_another_row()))
    assert told["old_log_prob"] == "DPA604", told


def test_a_wrong_prompt_explains_the_log_probs_of_its_row(tmp_path: Path) -> None:
    told = faults(judged(tmp_path, {"rollout": prompt_of_another_row()["rollout"]}))
    assert len(told) == 1
    assert "old_log_prob" not in told


def test_a_wrong_prompt_is_one_fault_with_a_model_too(tmp_path: Path) -> None:
    """The engine's log-probs do not fit it, and it is not that of its group."""
    verdict = judged(tmp_path, {"rollout": prompt_of_another_row()["rollout"]}, model=True)
    assert list(faults(verdict)) == ["rollout"], verdict.story()
    assert verdict.rows == [0]
    assert "DPA402 union.prompts" in verdict.to_dict()["evidence"]["explains"]


def test_a_wrong_uid_beside_other_rows_of_the_engine_stands_by_itself(tmp_path: Path) -> None:
    def engine_far(batch: DataProto) -> None:
        sampled = batch.batch["rollout_log_probs"].clone()
        sampled[long_rows(batch)[2]] -= 3.0
        batch.batch["rollout_log_probs"] = sampled

    changes = {"rollout": engine_far, "union": another_uid}
    verdict = judged(tmp_path, changes, model=True)
    assert list(faults(verdict)) == ["rollout", "union"], verdict.story()


def test_a_temperature_that_was_lost_moves_no_columns(tmp_path: Path) -> None:
    def without_meta(batch: DataProto) -> None:
        batch.meta_info.pop("temperature")

    changes = {"union": without_meta, "old_log_prob": two_rows_late}
    assert list(faults(judged(tmp_path, changes))) == ["union", "old_log_prob"]


def test_an_entropy_below_zero_makes_no_nan_elsewhere(tmp_path: Path) -> None:
    def negated(batch: DataProto) -> None:
        batch.batch["entropys"] = -batch.batch["entropys"]

    def overflow(batch: DataProto) -> None:
        reference = batch.batch["ref_log_prob"].clone()
        reference[long_rows(batch)[0], 0] = float("nan")
        batch.batch["ref_log_prob"] = reference

    told = faults(judged(tmp_path, {"old_log_prob": negated, "ref_log_prob": overflow}))
    assert told == {"old_log_prob": "DPA604", "ref_log_prob": "DPA301"}
