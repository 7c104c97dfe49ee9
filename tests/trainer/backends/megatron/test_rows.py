import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import MicroBatch
from dataproto_audit.trainer.backends.megatron.rows import align, line_up

IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 0], [1, 2, 3, 4, 5, 0, 0]])
MASK = (IDS > 0).long()


def micro(mask=MASK, positions=None):
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if positions is None else positions
    return MicroBatch(IDS, mask, positions, IDS[:, 3:])


@pytest.mark.parametrize("lay", [align, line_up])
def test_each_response_token_is_predicted_by_the_one_before(lay):
    rows = lay(micro(), multiple=1)
    read = rows.tokens_BS.flatten()
    before = {(0, 0): 5, (0, 1): 6, (0, 2): 7, (1, 0): 3, (1, 1): 4}
    scored = list(zip(rows.rows_N.tolist(), rows.columns_N.tolist(), strict=True))
    assert {place: int(read[i]) for place, i in zip(scored, rows.index_N, strict=True)} == before
    assert torch.equal(rows.labels_N, IDS[:, 3:][rows.rows_N, rows.columns_N])
    assert rows.spread(rows.labels_N).tolist() == [[6, 7, 8, 0], [4, 5, 0, 0]]
    assert torch.equal(rows.labels_BS().flatten()[rows.index_N], rows.labels_N)


def test_rows_begin_at_position_0():
    assert align(micro(), multiple=1).tokens_BS.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]


def test_width_is_a_multiple_and_holes_are_closed():
    mask = MASK.clone()
    mask[1, 1] = 0
    rows = align(micro(mask), multiple=4)
    assert rows.tokens_BS.shape == (2, 4)
    assert rows.tokens_BS[1].tolist() == [1, 3, 4, 5]
    assert align(micro(), multiple=6).tokens_BS.shape == (2, 6)


def test_a_line_holds_every_attended_token_and_says_where_rows_end():
    rows = line_up(micro(), multiple=4)
    assert rows.tokens_BS.shape[0] == 1
    assert rows.tokens_BS[0, :9].tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert rows.lengths == (4, 5, 3)
    assert rows.note == {"restarts": [True, True], "mask": "none"}
    assert align(micro(), multiple=1).lengths is None


def test_a_response_without_a_token_before_it_is_not_scored():
    mask = MASK.clone()
    mask[0, :3] = 0
    rows = align(micro(mask), multiple=1)
    assert rows.columns_N[rows.rows_N == 0].tolist() == [1, 2]
    with pytest.raises(UsageError, match=r"DPA851 .*no token before its response"):
        line_up(micro(mask), multiple=1)


def test_rows_without_any_token_keep_one_column():
    rows = align(micro(torch.zeros_like(MASK)), multiple=1)
    assert rows.tokens_BS.shape == (2, 1)
    assert not len(rows.index_N)
    assert not rows.spread(torch.zeros(0)).any()


@pytest.mark.parametrize("lay", [align, line_up])
def test_positions_that_rope_would_not_count_are_refused(lay):
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    positions[0, 3] += 1
    with pytest.raises(UsageError, match=r"DPA851 position_ids of row 0 say 2 .* 1 others"):
        lay(micro(positions=positions), multiple=1)
