import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.compare.batches import complete, demo_batch, from_tensors


def tensors(rows=8):
    return dict(demo_batch(vocab_size=30, rows=rows).batch.items())


def test_the_demo_is_ragged_and_trains_all_rows_but_the_last():
    batch = demo_batch(vocab_size=30, rows=6).batch
    lengths = batch["attention_mask"].sum(-1)
    assert len(lengths.unique()) > 1
    assert batch["response_mask"].any(-1).tolist() == [True] * 5 + [False]
    assert int(batch["input_ids"].max()) < 30


def test_rows_are_cut_to_what_the_layouts_divide():
    batch = from_tensors(tensors(), rows=7, multiple_of=3, temperature=0.5)
    assert len(batch) == 6
    assert batch.meta_info["temperature"] == 0.5
    with pytest.raises(UsageError, match=r"DPA854 8 rows.*16 parts"):
        from_tensors(tensors(), rows=8, multiple_of=16, temperature=1.0)


def test_a_batch_without_the_forward_fields_or_jagged_is_refused():
    given = tensors()
    jagged = given | {"responses": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)],
                                                              layout=torch.jagged)}  # fmt: skip
    with pytest.raises(UsageError, match=r"DPA851 .*jagged responses"):
        from_tensors(jagged, rows=8, multiple_of=1, temperature=1.0)
    del given["position_ids"]
    with pytest.raises(UsageError, match=r"DPA851 .*lacks position_ids"):
        from_tensors(given, rows=8, multiple_of=1, temperature=1.0)


def test_what_is_there_stays_and_what_lacks_is_made():
    given = tensors() | {"advantages": torch.full((8, 10), 2.0, dtype=torch.float64)}
    batch = from_tensors(given, rows=8, multiple_of=1, temperature=1.0)
    made = complete(batch, torch.full((8, 10), -3.0))
    assert made == ["old_log_probs", "ref_log_prob", "values", "returns"]
    assert batch.batch["advantages"].dtype == torch.float32
    assert (batch.batch["advantages"] == 2).all()
    off = batch.batch["attention_mask"][:, -10:] == 0
    assert (batch.batch["old_log_probs"][off] == -3).all()
    assert batch.batch["old_log_probs"][~off].std() > 0
