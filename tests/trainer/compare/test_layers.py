"""Hidden states of layers next to expected ones: places, peers, and what is missing."""

import numpy as np
import torch

from dataproto_audit.trainer.backends.layers import compared_tokens
from dataproto_audit.trainer.compare.layers import Told, gaps

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])
NAMES = ("model.embed_tokens", "model.layers.0")


def states(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 4, 3, generator=random) for name in NAMES}


def of_rows(whole, rows):
    seen, columns, _ = compared_tokens(MASK[rows])
    return whole[torch.tensor(rows)[seen], columns].numpy().copy()


def told(expected, *, rank, dp_rank, micros, names=NAMES):
    first = 2 * dp_rank
    found = {
        name: [of_rows(expected[name], [first + row for row in micro]) for micro in micros]
        for name in names
    }
    return Told(rank, dp_rank, tuple(np.array(micro) for micro in micros), found)


def compared(ranks, expected, noise=None):
    return gaps(ranks, expected, noise or expected, MASK, parts=2)


def test_the_last_token_of_a_row_is_not_compared():
    rows, columns, places = compared_tokens(MASK)
    assert list(zip(rows.tolist(), columns.tolist(), places.tolist(), strict=True)) == [
        (0, 1, 0), (0, 2, 1), (1, 0, 0), (2, 0, 0), (2, 1, 1), (2, 2, 2),
    ]  # fmt: skip


def test_equal_states_agree_in_any_order_of_micro_batches():
    expected = states()
    ranks = [
        told(expected, rank=0, dp_rank=0, micros=[[1], [0]]),
        told(expected, rank=1, dp_rank=1, micros=[[0, 1]]),
    ]
    found = compared(ranks, expected)
    assert [gap.name for gap in found] == list(NAMES)
    assert all(gap.agrees and gap.max_abs_diff == 0 for gap in found)


def test_a_wrong_state_is_named_by_layer_row_column_and_rank():
    expected = states()
    ranks = [
        told(expected, rank=0, dp_rank=0, micros=[[0, 1]]),
        told(expected, rank=5, dp_rank=1, micros=[[1], [0]]),
    ]
    ranks[1].states["model.layers.0"][1][2] += 0.5
    embedding, layer = compared(ranks, expected)
    assert embedding.agrees
    assert not layer.agrees
    assert (layer.worst, layer.rank) == ((2, 2), 5)
    assert abs(layer.max_abs_diff - 0.5) < 1e-6


def test_stages_tell_their_own_layers_and_a_layer_that_nobody_tells_is_no_agreement():
    expected = states()
    ranks = [
        told(expected, rank=0, dp_rank=0, micros=[[0, 1]], names=NAMES[:1]),
        told(expected, rank=1, dp_rank=0, micros=[[0, 1]], names=()),
        told(expected, rank=2, dp_rank=1, micros=[[0, 1]], names=NAMES[:1]),
    ]
    embedding, layer = compared(ranks, expected)
    assert (embedding.agrees, embedding.rank) == (True, 0)
    assert (layer.agrees, layer.rank, layer.max_abs_diff) == (False, None, float("inf"))


def test_rows_that_nobody_tells_are_no_agreement():
    expected = states()
    first = told(expected, rank=0, dp_rank=0, micros=[[1], [0]])
    second = told(expected, rank=1, dp_rank=1, micros=[[0], [1]])
    silent = second._replace(states={})
    for gap in compared([first, silent], expected):
        assert (gap.agrees, gap.max_abs_diff, gap.worst) == (False, float("inf"), (2, -1))
    del second.states["model.layers.0"][1]
    embedding, layer = compared([first, second], expected)
    assert embedding.agrees
    assert (layer.agrees, layer.worst, layer.rank) == (False, (3, -1), None)


def test_nan_and_a_wrong_number_of_tokens_are_no_agreement():
    expected = states()
    one = told(expected, rank=0, dp_rank=0, micros=[[0, 1]])
    one.states[NAMES[0]][0][0, 0] = np.nan
    one.states[NAMES[1]][0] = one.states[NAMES[1]][0][:1]
    found = compared([one], expected)
    assert [gap.agrees for gap in found] == [False, False]


def test_the_bound_follows_the_noise():
    expected = states()
    noise = {name: value + 0.01 for name, value in expected.items()}
    found = compared([told(expected, rank=0, dp_rank=0, micros=[[0, 1]])], expected, noise)
    assert all(abs(gap.bound - 0.04) < 1e-5 for gap in found)
