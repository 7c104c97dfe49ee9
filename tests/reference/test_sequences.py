from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from dataproto_audit.reference import masks, sequences

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])


def test_packed_rows_lie_end_to_end() -> None:
    ids = torch.arange(12).reshape(3, 4)
    assert sequences.packed(ids, MASK).tolist() == [[1, 2, 4, 5, 6, 7]]
    assert sequences.packed_offsets(MASK).tolist() == [0, 2, 6, 6]
    channels = torch.stack([ids, ids + 100])
    assert sequences.packed(channels, MASK.bool())[1].tolist() == [[101, 102, 104, 105, 106, 107]]


def test_a_mask_of_other_rows_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        sequences.packed(torch.ones(2, 4), MASK)


@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=6))
def test_offsets_cut_what_was_packed(rows: list[list[int]]) -> None:
    mask = torch.tensor(rows)
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    packed, offsets = sequences.packed(ids, mask)[0], sequences.packed_offsets(mask).tolist()
    for row, (start, end) in enumerate(pairwise(offsets)):
        assert packed[start:end].tolist() == ids[row][mask[row] != 0].tolist()
    labels = masks.packed_labels(packed, torch.tensor(offsets))
    assert int((labels == -100).sum()) == sum(any(row) for row in rows)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_work_never_overflows(dtype: torch.dtype) -> None:
    longest = 30000 if dtype == torch.int16 else 10**6
    made = sequences.attention_work(torch.tensor([0, 1, longest], dtype=dtype))
    assert made.tolist() == [0, 1, longest**2]


@pytest.mark.parametrize(
    ("earlier", "later", "at"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 2, 3], None), ([1, 2], [1], 1),
     ([1, 2], [3, 2], 0)],
)  # fmt: skip
def test_where_a_later_turn_breaks_off(earlier: list[int], later: list[int], at: int) -> None:
    assert sequences.first_break(earlier, later) == at


def test_rows_that_stay_in_the_loss() -> None:
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, 0.0], [0.0, 0.0]])
    new = torch.tensor([[-3.0, -3.0], [-3.0, -3.0], [-1.2, -9.0], [-9.0, -9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]])
    keep = sequences.off_policy_keep(advantages, old, new, mask, threshold=0.5)
    assert keep.tolist() == [[True], [False], [True], [True]]
