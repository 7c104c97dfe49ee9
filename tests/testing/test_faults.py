"""Seeded faults change what they say they change, and nothing else."""

import numpy as np
import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.faults import FAULTS, Truth, fault, parse_injection
from dataproto_audit.testing.healthy import Options, boundaries

OPTIONS = Options(prompts=24, n=4, response_width=5)
AFTER_STAGE = [name for name, f in FAULTS.items() if f.where == "after_stage"]


def before_and_after(name: str) -> tuple[DataProto, DataProto, Truth]:
    chosen = FAULTS[name]
    for b in boundaries(OPTIONS):
        if (b.stage, b.when) == (chosen.stage, "after"):
            tensors = b.batch.batch.clone()
            arrays = {n: a.copy() for n, a in b.batch.non_tensor_batch.items()}
            truth = chosen.apply(b.batch)
            return DataProto(tensors, arrays), b.batch, truth
    raise AssertionError(name)


@pytest.mark.parametrize("name", AFTER_STAGE)
def test_the_truth_is_what_changed(name: str) -> None:
    old, new, truth = before_and_after(name)
    assert truth.rows
    assert truth.field == FAULTS[name].field
    for field, tensor in old.batch.items():
        changed = torch.nonzero(tensor != new.batch[field])
        if field != truth.field:
            assert not len(changed)
    if truth.field in old.batch.keys():  # noqa: SIM118 - a TensorDict iterates rows
        named = {(row, column) for row, columns in truth.columns.items() for column in columns}
        really = set(map(tuple, torch.nonzero(old.batch[truth.field] != new.batch[truth.field])
                         .tolist()))  # fmt: skip
        assert named <= really
        assert set(truth.rows) == {row for row, _ in named}
    else:
        was, now = old.non_tensor_batch[truth.field], new.non_tensor_batch[truth.field]
        assert truth.rows == tuple(np.flatnonzero(was != now).tolist())


def test_the_temperature_is_lower_and_the_rest_stays() -> None:
    settings = {"temperature": 1.0, "top_p": 0.9}
    changed = FAULTS["other_temperature"].apply(settings)
    assert changed == {"temperature": 0.7, "top_p": 0.9}
    assert settings["temperature"] == 1.0


def test_stale_weights_are_those_of_before() -> None:
    assert FAULTS["stale_rollout_weights"].apply("new", "old") == "old"


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_says_what_it_is(name: str) -> None:
    chosen = FAULTS[name]
    assert chosen.name == name
    assert chosen.meaning.endswith(".")
    assert chosen.where in ("after_stage", "sampling", "before_sync")


@pytest.mark.parametrize("text", ["", "@", "tiled_groups", "tiled_groups@", "tiled_groups@0",
                                  "tiled_groups@-1", "tiled_groups@1.5", "nothing@1"])  # fmt: skip
def test_other_spellings_of_an_injection_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"DPA851.*FAULT@STEP.*Faults: "):
        parse_injection(text)


@pytest.mark.parametrize(
    ("text", "meant"), [("log_prob_shif@3", "Did you mean log_prob_shift? "), ("xyz@3", "")]
)
def test_a_fault_with_a_typing_error_names_the_nearest(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_injection(text)
    assert caught.value.remedy.startswith(f"{meant}Faults: ")


def test_a_fault_of_ones_own() -> None:
    @fault("mine", "reward", "score")
    def mine(batch: DataProto) -> Truth:
        """Scores are forgotten."""
        return Truth("score")

    try:
        assert parse_injection("mine@3") == (FAULTS["mine"], 3)
        assert FAULTS["mine"].meaning == "Scores are forgotten."
    finally:
        del FAULTS["mine"]
