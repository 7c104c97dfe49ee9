import numpy as np
import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.plans import MicroBatching, plan_update
from dataproto_audit.trainer.workers.dispatch import (
    Place,
    collect,
    dispatch,
    kept,
    merge_losses,
    spread,
    update_metrics,
)
from dataproto_audit.trainer.workers.update import TERMS


def test_ranks_get_contiguous_rows_and_only_what_they_need(ragged_batch):
    batch = ragged_batch(rows=6)
    batch.non_tensor_batch["uid"] = np.array(list("aabbcc"), dtype=object)
    parts = dispatch(batch, fields=("input_ids", "responses"), meta=("temperature",), ranks=3)
    assert [len(part) for part in parts] == [2, 2, 2]
    for rank, part in enumerate(parts):
        assert set(part.batch.keys()) == {"input_ids", "responses"}
        assert part.non_tensor_batch == {}
        assert part.meta_info == {"temperature": 1.0}
        assert torch.equal(part.batch["input_ids"], batch.batch["input_ids"][2 * rank :][:2])


def test_missing_fields_and_uneven_rows_are_refused(ragged_batch):
    batch = ragged_batch(rows=6)
    with pytest.raises(UsageError, match="DPA851 the batch lacks values, step"):
        dispatch(batch, fields=("input_ids", "values"), meta=("step",), ranks=2)
    with pytest.raises(UsageError, match="DPA854 6 rows"):
        dispatch(batch, fields=("input_ids",), meta=(), ranks=4)


def test_collected_rows_are_in_rank_order_and_notes_know_their_first_row():
    parts = [
        DataProto.from_dict({"x": torch.full((rows, 2), rank)}, meta_info={"rank": {"rank": rank}})
        for rank, rows in enumerate((3, 2))
    ]
    out = collect(parts)
    assert out.batch["x"][:, 0].tolist() == [0, 0, 0, 1, 1]
    assert out.meta_info["ranks"] == [{"rank": 0, "first_row": 0}, {"rank": 1, "first_row": 3}]


def test_peers_of_a_model_get_the_same_rows_and_one_of_them_is_heard():
    places = [Place(0, 0, 2, False), Place(1, 0, 2), Place(2, 1, 2, False), Place(3, 1, 2)]
    assert spread(["a", "b"], places) == ["a", "a", "b", "b"]
    assert kept([10, 11, 12, 13], places) == [11, 13]
    assert kept([10, 11], [Place(0, 1, 2), Place(1, 0, 2)]) == [11, 10]


def part(shares):
    steps = [{"sums": dict.fromkeys(TERMS, share), "grad_norm": 2.0, "lr": 0.1} for share in shares]
    return DataProto.from_dict({"x": torch.zeros(2, 1)}, meta_info={"steps": steps})


def test_losses_are_summed_over_ranks_with_their_normaliser():
    lengths, trained = np.array([4, 4, 4, 4]), np.array([2, 3, 0, 1])
    plan = plan_update(
        lengths,
        trained,
        ranks=2,
        mini_batch_size=2,
        width=3,
        micro=MicroBatching(),
        shuffle=False,
    )
    parts = [part([1.0, 2.0]), part([0.5, 0.25])]
    losses = merge_losses(parts, plan, mode="token-mean")
    assert [entry["total"] for entry in losses] == [1.5, 2.25]
    assert [entry["normaliser"] for entry in losses] == [2, 4]
    assert [entry["loss_scale_factor"] for entry in losses] == [1.0, 1.0]
    normed = merge_losses(parts, plan, mode="seq-mean-token-sum-norm")
    assert [(e["normaliser"], e["loss_scale_factor"]) for e in normed] == [(1, 3.0), (2, 3.0)]
    metrics = update_metrics(losses, with_kl=True, with_entropy=False)
    assert metrics["actor/pg_loss"] == pytest.approx(1.875)
    assert metrics["actor/grad_norm"] == 2.0
    assert "actor/kl_loss" in metrics
    assert "actor/entropy" not in metrics
