"""The mapping form never refuses: what is wrong in it, or of a queer kind, becomes a finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.checker import check
from dataproto_audit.testing.recipes import cook

from ._forms import tensors, told

TRAINED_PAD: list[dict[str, Any]] = [{"op": "set", "f": "response_mask", "at": [2, 4], "v": 1}]


@pytest.mark.parametrize("part", ["batch", "non_tensor_batch", "meta_info"])
@pytest.mark.parametrize("value", [3, [1], "x"])
def test_the_mapping_form_never_refuses_a_part(part: str, value: Any) -> None:
    [found] = check({"batch": {}, part: value}).findings
    assert (found.code, found.severity, found.field) == ("DPA102", "fail", part)
    assert type(value).__name__ in found.actual


NO_TENSORS = {"a text": "abc", "nothing": None, "a number": 3, "a mapping": {"a": 1},
              "no data": torch.zeros(6, 4, device="meta")}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize(
    ("name", "stage"),
    [("responses", "rollout"), ("response_mask", "rollout"), ("old_log_probs", "old_log_prob"),
     ("ref_log_prob", "ref_log_prob"), ("advantages", "advantage")],
)  # fmt: skip
def test_the_mapping_form_tells_what_is_no_tensor(name: str, stage: str, kind: str) -> None:
    batch = cook("T", [])
    batch["batch"][name] = NO_TENSORS[kind]
    failed = [f for f in check(batch).findings if f.severity == "fail"]
    assert [(f.code, f.field, f.stage) for f in failed] == [("DPA102", name, stage)]
    assert "tensor" in failed[0].expected


def test_several_kinds_that_are_wrong_are_all_told() -> None:
    one = torch.ones(3, 2, dtype=torch.long)
    report = check({"batch": {"responses": one, "response_mask": "abc", "old_log_probs": "x"}})
    assert [(f.field, f.stage, f.actual) for f in report.findings] == [
        ("response_mask", "rollout", "str 'abc'"),
        ("old_log_probs", "old_log_prob", "str 'x'"),
    ]


@pytest.mark.parametrize("value", [None, 3, torch.arange(6, device="meta")])
def test_the_mapping_form_tells_what_is_no_array(value: Any) -> None:
    batch = cook("T", [])
    batch["non_tensor_batch"]["uid"] = value
    failed = [f for f in check(batch).findings if f.severity == "fail"]
    assert [(f.code, f.field) for f in failed] == [("DPA109", "uid")]
    assert "6 rows" in failed[0].expected


def test_entries_of_ones_own_may_be_anything_in_a_mapping() -> None:
    batch = cook("T", [])
    batch["batch"] |= {"note": "abc", "mine": None, "temperature": 1.0}
    assert told(check(batch)) == told(check(cook("T", [])))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_masks_of_floats_are_told_and_read_all_the_same(kind: torch.dtype) -> None:
    """The wrong kind is one finding; where all values are 0 or 1 the other checks go on."""
    wrong, plain = cook("T", TRAINED_PAD), check(cook("T", TRAINED_PAD))
    fields = tensors(wrong)
    for name in ("response_mask", "attention_mask"):
        fields[name] = fields[name].to(kind)
    report = check(wrong | {"batch": fields})
    assert {f.field for f in report.findings if f.code == "DPA102"} == {
        "response_mask", "attention_mask",
    }  # fmt: skip
    assert told(report)[2:] == told(plain)
    assert fields["response_mask"].dtype == kind


@pytest.mark.parametrize("value", [0.5, 2.0, float("nan"), -1.0])
def test_masks_of_other_floats_are_not_read(value: float) -> None:
    fields = tensors(cook("T", []))
    fields["response_mask"] = fields["response_mask"].float()
    fields["response_mask"][1, 0] = value
    report = check(cook("T", []) | {"batch": fields})
    assert [(f.code, f.field) for f in report.findings] == [("DPA102", "response_mask")]
    reasons = [o.reason for o in report.outcomes if o.check == "mask_values"]
    assert "response_mask is f32[6,5]" in reasons[0]


QUEER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "sparse": lambda t: t.to_sparse(),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "negative": lambda t: torch._neg_view(t.float()),
    "with a gradient": lambda t: t.float().requires_grad_(),
    "no data": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch on quantised tensors
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("kind", QUEER)
@pytest.mark.parametrize(
    "name",
    ["responses", "response_mask", "old_log_probs", "advantages", "uid", "raw_prompt", "score",
     "losses", "ranks", "temperature", "n", "global_steps", "global_token_num", "process_reward"],
)  # fmt: skip
def test_tensors_of_every_kind_anywhere_are_never_our_fault(name: str, kind: str) -> None:
    batch = cook("T", [])
    for part in batch.values():
        if name in part:
            break
    else:
        part = batch["meta_info"]
    part[name] = QUEER[kind](torch.as_tensor(part.get(name, np.ones(6))) if part is not
                             batch["non_tensor_batch"] else torch.arange(6))  # fmt: skip
    report = check(batch, config={"loss_agg_mode": "token-mean"})
    assert not [str(f) for f in report.findings if f.code.startswith("DPA9")]
    json.loads(report.to_json())
    assert str(report)
