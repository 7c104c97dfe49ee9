"""Which of two log-probs is wrong, by a third one; where the trainer's passes share a fault."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.protocol import DataProto
from dataproto_audit.replay.bisect import Verdict, bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.replay.witnesses import DRAWN, SHARED, UNTOLD
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.traces import toy_scorers, write_simulated

PLAIN = BASES["plain"]
ENGINE, OLD, UPDATE, REF = (
    "rollout_log_probs", "old_log_probs", "update_log_probs", "ref_log_prob",
)  # fmt: skip
LONG = 4
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A field and the response mask to the field that is recorded."""


def judged(
    folder: Path, changes: Mapping[tuple[str, str], Change], *, options: Options = PLAIN,
    lost: tuple[str, ...] = (), model: bool = False,
) -> Verdict:  # fmt: skip
    """The verdict on a step in which fields change as they leave a stage, or are lost."""
    with TraceWriter(folder, retention="all", settings=vars(options.settings())) as writer:
        writer.begin_step(options.step)
        for b in boundaries(options):
            tensors = b.batch.batch
            for (stage, name), change in changes.items():
                if (b.stage, b.when) == (stage, "after"):
                    tensors[name] = change(tensors[name].clone(), tensors["response_mask"] != 0)
            writer.write_boundary(b.stage, without(b.batch, lost), when=b.when, evidence=b.evidence)
        writer.end_step()
    return bisect(folder, scorers=Scorers(**toy_scorers(options)) if model else None)


def without(batch: DataProto, lost: tuple[str, ...]) -> DataProto:
    if batch.batch is None or not set(lost) & set(batch.batch.keys()):
        return batch
    kept = {name: tensor for name, tensor in batch.batch.items() if name not in lost}
    return DataProto.from_dict(kept, dict(batch.non_tensor_batch), dict(batch.meta_info))


def long_rows(mask: torch.Tensor, least: int = LONG) -> list[int]:
    found: list[int] = torch.nonzero(mask.sum(1) >= least).flatten().tolist()
    return found


def reversed_row(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    row = long_rows(mask, 8)[1]
    held = int(mask[row].sum())
    field[row, :held] = field[row, :held].flip(0)
    return field


def base_two(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return field / np.log(2)


def two_rows_late(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = long_rows(mask)[2:4]
    field[rows] = field[rows].roll(1, 1)
    return field


def rows_exchanged(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    first, second = long_rows(mask)[:2]
    field[[first, second]] = field[[second, first]]
    return field


def first(verdict: Verdict) -> tuple[str | None, str | None]:
    return verdict.stage, verdict.to_dict()["field"]


def test_one_row_of_the_engine_is_the_engines_where_the_update_agrees(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {("rollout", ENGINE): reversed_row})
    assert first(verdict) == ("rollout", ENGINE), verdict.story()
    assert len(verdict.rows) == 1
    assert verdict.to_dict()["boundary"].endswith("rollout")
    assert verdict.later_faults == verdict.cleared[1:] == []
    assert not {SHARED, DRAWN, UNTOLD} & set(verdict.missing)


def test_rows_are_counted_where_the_engine_left_them(tmp_path: Path) -> None:
    """The batch was balanced before the two were compared."""
    wanted: list[int] = []

    def change(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        wanted.append(long_rows(mask, 8)[1])
        return reversed_row(field, mask)

    assert judged(tmp_path, {("rollout", ENGINE): change}).rows == wanted


@pytest.mark.parametrize("lost", [(UPDATE,), (REF,)])
def test_either_third_one_tells(tmp_path: Path, lost: tuple[str, ...]) -> None:
    verdict = judged(tmp_path, {("rollout", ENGINE): reversed_row}, lost=lost)
    assert first(verdict) == ("rollout", ENGINE), verdict.story()


def test_where_no_third_one_tells_both_are_named(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {("rollout", ENGINE): reversed_row}, lost=(UPDATE, REF))
    assert verdict.stage == "old_log_prob"
    assert UNTOLD in verdict.missing
    told = judged(tmp_path / "m", {("rollout", ENGINE): reversed_row}, lost=(UPDATE, REF),
                  model=True)  # fmt: skip
    assert first(told) == ("rollout", ENGINE), told.story()
    assert UNTOLD not in told.missing


def test_all_of_the_engines_are_called_wrong_with_what_stays_in_doubt(tmp_path: Path) -> None:
    verdict = judged(tmp_path, {("rollout", ENGINE): base_two})
    assert first(verdict) == ("rollout", ENGINE), verdict.story()
    assert SHARED in verdict.missing
    assert SHARED in verdict.story()


@pytest.mark.parametrize("name", ["old_one_column_early", "dropout_while_scoring",
                                  "dynamic_batch_order_kept"])  # fmt: skip
def test_old_ones_that_all_others_contradict_stay_accused(tmp_path: Path, name: str) -> None:
    write_simulated(tmp_path, "plain", [CATALOGUE[name]])
    verdict = bisect(tmp_path)
    assert first(verdict) == ("old_log_prob", OLD), verdict.story()
    assert not {SHARED, DRAWN, UNTOLD} & set(verdict.missing)


def test_a_temperature_that_all_passes_of_the_trainer_lack_is_the_trainers(tmp_path: Path) -> None:
    """Old ones, the update's and the reference's agree; tokens were drawn as the engine says."""
    write_simulated(tmp_path, "cold", [CATALOGUE["trainer_ignores_temperature"]])
    verdict = bisect(tmp_path)
    assert first(verdict) == ("old_log_prob", OLD), verdict.story()
    assert DRAWN in verdict.missing


def test_a_shift_that_all_passes_of_the_trainer_share_is_the_trainers(tmp_path: Path) -> None:
    """What equal prefixes say of the old ones alone outweighs that the update's agree."""
    changes: dict[tuple[str, str], Change] = {
        (stage, name): lambda field, mask: field.roll(1, 1)
        for stage, name in (("old_log_prob", OLD), ("ref_log_prob", REF), ("update_actor", UPDATE))
    }
    verdict = judged(tmp_path, changes)
    assert first(verdict) == ("old_log_prob", OLD), verdict.story()


def test_rows_of_the_engine_and_rows_of_the_trainer_are_told_apart(tmp_path: Path) -> None:
    changes = {("rollout", ENGINE): reversed_row, ("old_log_prob", OLD): two_rows_late}
    verdict = judged(tmp_path, changes)
    assert [fault.stage for fault in verdict.faults] == ["rollout", "old_log_prob"]
    assert len(verdict.rows) == 1
    assert len(verdict.later_faults[0]["rows"]) == 2


def test_a_reference_that_copies_the_policy_is_no_witness(tmp_path: Path) -> None:
    """It says what the old ones say, wrong or not."""

    def as_old(folder: Path) -> Verdict:
        with TraceWriter(folder, retention="all", settings=vars(PLAIN.settings())) as writer:
            writer.begin_step(PLAIN.step)
            for b in boundaries(PLAIN):
                tensors = b.batch.batch
                if (b.stage, b.when) == ("old_log_prob", "after"):
                    tensors[OLD] = two_rows_late(
                        tensors[OLD].clone(), tensors["response_mask"] != 0
                    )
                if (b.stage, b.when) == ("ref_log_prob", "after"):
                    tensors[REF] = tensors[OLD].clone()
                batch = without(b.batch, (UPDATE,))
                writer.write_boundary(b.stage, batch, when=b.when, evidence=b.evidence)
            writer.end_step()
        return bisect(folder)

    assert as_old(tmp_path).stage == "old_log_prob"


@pytest.mark.parametrize("model", [True, False])
def test_rows_of_the_update_that_are_exchanged_are_the_updates(tmp_path: Path, model: bool) -> None:
    verdict = judged(tmp_path, {("update_actor", UPDATE): rows_exchanged}, model=model)
    assert first(verdict) == ("update_actor", UPDATE), verdict.story()
    assert verdict.later_faults == []


def test_healthy_steps_have_no_doubt(tmp_path: Path) -> None:
    options = replace(PLAIN, step=3)
    verdict = judged(tmp_path, {}, options=options)
    assert verdict.verdict == "healthy"
    assert not {SHARED, DRAWN, UNTOLD} & set(verdict.missing)


def test_rows_that_an_earlier_fault_explains_accuse_nobody(tmp_path: Path) -> None:
    """The trainer's passes agree on responses that the reward stage cut: the engine saw others."""

    def cut(field: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        field[:, -3:] = 0
        return field

    changes = {("reward", "responses"): cut, ("old_log_prob", OLD): two_rows_late}
    verdict = judged(tmp_path, changes)
    assert [fault.stage for fault in verdict.faults] == ["reward", "old_log_prob"], verdict.story()


def test_old_ones_that_the_update_contradicts_are_told_where_they_were_made(tmp_path: Path) -> None:
    """Without the engine's log-probs the first mini-batch is the first to compare them."""
    changes = {("old_log_prob", OLD): rows_exchanged}
    verdict = judged(tmp_path, changes, lost=(ENGINE,))
    assert first(verdict) == ("old_log_prob", OLD), verdict.story()
    assert verdict.later_faults == []
