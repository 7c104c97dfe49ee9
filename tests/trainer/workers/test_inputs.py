import numpy as np
import torch

from dataproto_audit.trainer.workers.inputs import micro_batch, scatter, token_counts

CPU = torch.device("cpu")


def test_only_columns_that_nobody_attends_to_are_cut(ragged_batch):
    batch = ragged_batch(rows=12).batch
    for rows in (np.array([0]), np.array([3, 7]), np.arange(12)):
        micro = micro_batch(batch, rows, device=CPU)
        mask = batch["attention_mask"][rows]
        assert torch.equal(micro.attention_mask_BT.sum(-1), mask.sum(-1))
        assert micro.attention_mask_BT[:, 0].any()
        assert micro.attention_mask_BT[:, -1].any()
        kept = micro.attention_mask_BT.bool()
        for name, cut in (
            ("input_ids", micro.input_ids_BT),
            ("position_ids", micro.position_ids_BT),
        ):
            assert torch.equal(cut[kept], batch[name][rows][mask.bool()])
        width = micro.response_width
        assert torch.equal(micro.responses_BR, batch["responses"][rows][:, :width])
        assert torch.equal(micro.response_attention_BR, mask[:, 6 : 6 + width].bool())


def test_one_column_of_each_side_stays_whatever_the_mask(ragged_batch):
    batch = ragged_batch(rows=3).batch.clone()
    batch["attention_mask"][:] = 0
    assert micro_batch(batch, np.arange(3), device=CPU).input_ids_BT.shape == (3, 11)
    batch["attention_mask"][:, 2] = 1
    assert micro_batch(batch, np.arange(3), device=CPU).response_width == 1
    batch["attention_mask"][:] = 0
    batch["attention_mask"][:, 8] = 1
    micro = micro_batch(batch, np.arange(3), device=CPU)
    assert micro.input_ids_BT.shape[1] == micro.response_width + 1


def test_scatter_puts_outputs_back_to_their_rows():
    target = torch.zeros(4, 3)
    scatter(target, [np.array([2, 0]), np.array([3])], [torch.ones(2, 2), torch.full((1, 3), 5.0)])
    assert target.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0], [5, 5, 5]]


def test_token_counts_are_attended_tokens(ragged_batch):
    batch = ragged_batch().batch
    assert token_counts(batch).tolist() == batch["attention_mask"].sum(-1).tolist()
