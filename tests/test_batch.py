"""One view over every form a batch comes in."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.healthy import Options, boundaries


def jagged(rows):
    return torch.nested.nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)


PROMPTS, RESPONSES = [[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10, 11]]
MASK = [[1, 1], [1, 1, 0, 1]]


def padded_mapping():
    return {
        "batch": {
            "prompts": torch.tensor([[1, 2, 3], [0, 4, 5]]),
            "responses": torch.tensor([[6, 7, 0, 0], [8, 9, 10, 11]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]),
            "response_mask": np.array([[1, 1, 0, 0], [1, 1, 0, 1]]),
        },
        "non_tensor_batch": {"uid": ["a", "b"]},
        "meta_info": {"temperature": 0.7},
    }


def jagged_tensordict():
    whole = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return TensorDict(
        {
            "prompts": jagged(PROMPTS),
            "responses": jagged(RESPONSES),
            "input_ids": jagged(whole),
            "response_mask": jagged(MASK),
        },
        batch_size=[2],
    )


def test_a_mapping():
    view = BatchView.of(padded_mapping())
    assert (view.rows, view.prompt, view.response, view.layout) == (2, 3, 4, "padded")
    assert view.meta["temperature"] == 0.7
    assert view.numpy("uid").tolist() == ["a", "b"]
    assert "response_mask" in view
    assert "nothing" not in view


def test_a_jagged_tensordict_reads_like_the_padded_batch():
    view, padded = BatchView.of(jagged_tensordict()), BatchView.of(padded_mapping())
    assert (view.rows, view.prompt, view.response, view.layout) == (2, 3, 4, "jagged")
    for name in ("prompts", "responses", "response_mask"):
        assert (view.numpy(name) == padded.numpy(name)).all(), name
    assert view.attention is not None
    assert (view.attention == padded.attention).all()
    assert view.numpy("input_ids").tolist() == [[1, 2, 3, 6, 7, 0, 0], [0, 4, 5, 8, 9, 10, 11]]


def test_blocks_cover_every_row_once():
    view = BatchView.of(padded_mapping())
    parts = [block["responses"] for block in view.blocks(1)]
    assert len(parts) == 2
    assert (np.concatenate(parts) == view.numpy("responses")).all()


def test_none_and_a_view_and_a_wrong_kind():
    assert BatchView.of(None).rows == 0
    view = BatchView.of(padded_mapping())
    assert BatchView.of(view) is view
    with pytest.raises(UsageError, match="cannot read a batch from int"):
        BatchView.of(3)


def as_mapping(batch):
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    return {
        "batch": {n: t.numpy() for n, t in tensors.items()},
        "non_tensor_batch": batch.non_tensor_batch,
        "meta_info": batch.meta_info,
    }


def test_a_step_of_mappings_is_audited_like_a_step_of_batches():
    options = Options(prompts=6)
    outcomes = []
    for form in (lambda b: b, as_mapping):
        auditor = Auditor(options.settings())
        auditor.begin_step(1)
        for b in boundaries(options):
            auditor.boundary(b.stage, form(b.batch), when=b.when, evidence=b.evidence)
        outcomes.append(auditor.outcomes)
    assert outcomes[0] == outcomes[1]


BAD = {
    "no rows": {"responses": torch.zeros(0, 4, dtype=torch.long)},
    "no columns": {"responses": torch.zeros(2, 0, dtype=torch.long)},
    "one axis": {"responses": torch.zeros(2, dtype=torch.long)},
    "three axes": {"responses": torch.zeros(2, 4, 3, dtype=torch.long)},
    "a scalar": {"responses": torch.tensor(3)},
    "float ids": {"responses": torch.full((2, 4), float("nan"))},
    "float mask": {"response_mask": torch.full((2, 4), 0.5)},
    "bool mask": {"response_mask": torch.ones(2, 4, dtype=torch.bool)},
    "negative ids": {"responses": torch.full((2, 4), -1)},
    "not contiguous": {"responses": torch.arange(8).reshape(4, 2).T},
    "meta device": {"responses": torch.zeros(2, 4, dtype=torch.long, device="meta")},
    "more rows": {"responses": torch.zeros(3, 4, dtype=torch.long)},
    "mixed objects": {"responses": [1, "two"]},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stage", ["rollout", "old_log_prob", "advantage", "update_actor"])
def test_a_bad_batch_is_a_finding_or_a_clear_error_never_our_fault(name, stage):
    batch = padded_mapping()
    batch["batch"] |= BAD[name]
    auditor = Auditor(Options().settings(), on_fail="record")
    auditor.begin_step(1)
    auditor.boundary(stage, batch)
    if name == "meta device":
        [told] = [f for f in auditor.findings if f.code == "DPA102"]
        assert (told.field, told.stage) == ("responses", stage)
        assert "without data" in told.actual
    assert not [str(f) for f in auditor.findings if f.code.startswith("DPA9")]


def test_a_dataproto_without_data_is_refused():
    batch = DataProto.from_dict({"responses": torch.zeros(2, 4, dtype=torch.long, device="meta")})
    with pytest.raises(UsageError, match="responses has no data"):
        BatchView.of(batch)


ODD = {"a text": "abc", "nothing": None, "a number": 3, "a mapping": {"a": 1},
       "no data": torch.zeros(2, 4, device="meta")}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_field_is_kept_apart_in_a_mapping(name):
    fields = {"old_log_probs": ODD[name], "responses": torch.zeros(2, 4, dtype=torch.long)}
    for batch in ({"batch": fields}, fields):
        view = BatchView.of(batch)
        assert view.names == ("responses",)
        assert list(view.odd) == ["old_log_probs"]
        assert list(view.under({"a": ("b", 0)}).odd) == ["old_log_probs"]
        assert not view.only(["responses"]).odd


def test_a_view_of_a_part_of_a_part_knows_the_whole_batch():
    view = BatchView.of({"a": torch.ones(2, 3), "b": torch.zeros(2, 3), "c": torch.ones(2)})
    assert view.only(["a", "b"]).only(["a"]).whole is view


def test_a_batch_without_tensors():
    view = BatchView.of(DataProto(non_tensor_batch={"uid": np.array(["a", "b"], object)}))
    assert (view.rows, view.prompt, view.response) == (2, None, None)


def test_aliases_do_not_hide_a_field():
    view = BatchView.of({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)})
    with pytest.raises(UsageError, match=r"aliases.a names b, but the batch holds both"):
        view.under({"a": ("b", 0)})
    with pytest.raises(UsageError, match="several aliases name the field a"):
        view.under({"c": ("a", 0), "d": ("a", 1)})


def test_aliases_may_swap_names_and_miss_their_source():
    view = BatchView.of({"a": torch.ones(2, 3), "b": torch.zeros(2, 3), "u": ["x", "y"]})
    turned = view.under({"a": ("b", 0), "b": ("a", 0), "uid": ("u", 0), "c": ("nowhere", 0)})
    assert (turned.numpy("a").sum(), turned.numpy("b").sum()) == (0, 6)
    assert set(turned.names) == {"a", "b", "uid"}
