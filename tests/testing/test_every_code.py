"""Every code about batches and runs (DPA1xx to DPA7xx) is fired by something.

Most are fired by a case of their probe's family (``tests/probes``, each run by the family's own
test), the contract's by a fault of the bench, and the rest by a few lines here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import DataProto, check, check_concat, check_union
from dataproto_audit.codes import CODES, ProtocolError
from dataproto_audit.testing.bench import run_fault
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.recipes import cook
from dataproto_audit.testing.toy_model import ToyModel
from dataproto_audit.testing.toy_policy import ToyPolicy

from ..probes.test_every_probe import CASES

BATCH_CODES = [code for code in CODES if code[3] in "1234567"]
BY_CASE = {case.code for cases in CASES.values() for case in cases}
BY_FAULT = {
    "DPA101": "values_missing",
    "DPA102": "ids_as_floats",
    "DPA103": "values_of_the_prompt",
    "DPA104": "rows_filtered_in_reward",
    "DPA105": "balance_index_repeats_a_row",
    "DPA106": "only_tensors_balanced",
    "DPA107": "meta_lost_in_concat",
    "DPA109": "raw_prompt_not_repeated",
    "DPA113": "sampling_log_probs_dropped",
    "DPA404": "tiled_groups",
}


def _codes(report: Any) -> set[str]:
    return {finding.code for finding in report.findings}


def misuse() -> set[str]:
    with pytest.raises(ProtocolError) as caught:
        DataProto.from_single_dict({"ids": torch.zeros(6, 2)}).chunk(4)
    return {caught.value.code}


def a_meta_entry_of_another_kind() -> set[str]:
    batch = cook("T", [])
    return _codes(check({**batch, "meta_info": {**batch["meta_info"], "n": "three"}}))


def sides_of_other_rows() -> set[str]:
    return _codes(check_union({"batch": {"responses": np.ones((2, 3), np.int64)}}, cook("T", [])))


def sides_of_other_values() -> set[str]:
    return _codes(check_union(cook("T", []), cook("T", [{"op": "meta", "k": "n", "v": 4}])))


def a_part_without_a_field() -> set[str]:
    return _codes(check_concat([cook("T", []), cook("T", [{"op": "del", "f": "old_log_probs"}])]))


def another_model() -> set[str]:
    return _codes(check(cook("T", []), model=ToyModel(ToyPolicy(vocab=32))))


HERE: dict[str, Callable[[], set[str]]] = {
    "DPA110": misuse,
    "DPA112": a_meta_entry_of_another_kind,
    "DPA114": sides_of_other_rows,
    "DPA115": sides_of_other_values,
    "DPA116": a_part_without_a_field,
    "DPA308": another_model,
}


@pytest.mark.parametrize("code", BATCH_CODES)
def test_something_fires_it(code: str) -> None:
    assert code in BY_CASE | set(BY_FAULT) | set(HERE), f"{code} needs a scene, or has to go"


@pytest.mark.parametrize("code", BY_FAULT)
def test_the_fault_fires_it(code: str) -> None:
    fault = CATALOGUE[BY_FAULT[code]]
    run = run_fault(fault, fault.bases[0])
    assert code in {finding.code for finding in (run.score.first, run.score.hit) if finding}


@pytest.mark.parametrize("code", HERE)
def test_the_scene_fires_it(code: str) -> None:
    assert code in HERE[code]()
