import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.reference import masks


def test_positions_count_attended_tokens_and_repeat_on_right_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert masks.position_ids(mask).tolist() == expected
    assert masks.position_ids(mask.bool()).tolist() == expected


def test_response_attention_is_the_last_columns() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0]])
    assert masks.response_attention(mask, 3).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("width", [0, 5, 6])
def test_response_attention_needs_room_for_a_prompt(width: int) -> None:
    with pytest.raises(ValueError, match="does not leave room for a prompt"):
        masks.response_attention(torch.ones(2, 5, dtype=torch.int64), width)


def test_observations_are_not_sampled() -> None:
    attention = torch.tensor([[1, 1, 1, 1, 0]])
    tool = torch.tensor([[0, 1, 1, 0, 0]])
    assert masks.expected_response_mask(attention).int().tolist() == [[1, 1, 1, 1, 0]]
    sampled = masks.expected_response_mask(attention, observation=tool)
    assert sampled.int().tolist() == [[1, 0, 0, 1, 0]]


def test_mask_of_lengths_pads_on_the_given_side() -> None:
    lengths = torch.tensor([0, 2, 3])
    right = masks.mask_of_lengths(lengths, 3)
    left = masks.mask_of_lengths(lengths, 3, side="left")
    assert right.int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert left.int().tolist() == [[0, 0, 0], [0, 1, 1], [1, 1, 1]]


def test_mask_of_lengths_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit a width of 3"):
        masks.mask_of_lengths(torch.tensor([4]), 3)
    with pytest.raises(ValueError, match="neither 'left' nor 'right'"):
        masks.mask_of_lengths(torch.tensor([1]), 3, side="middle")


def test_mask_through_first_stop_includes_the_stop() -> None:
    ids = torch.tensor([[3, 9, 4, 9], [3, 4, 5, 6], [8, 1, 1, 1]])
    mask = masks.mask_through_first_stop(ids, {8, 9})
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_padding_sides() -> None:
    mask = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]])
    assert masks.is_left_padded(mask).tolist() == [True, False, True, True, False, False]
    assert masks.is_right_padded(mask).tolist() == [False, True, True, True, False, False]


def test_last_attended_looks_past_holes_and_marks_empty_rows() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert masks.last_attended(mask).tolist() == [2, 3, -1]


def test_outcome_rewards_sit_on_the_last_attended_token() -> None:
    attention = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    rewards = masks.outcome_rewards(torch.tensor([0.5, -1.0, 2.0]), attention)
    # An empty response gets its score in the last column, as verl writes it.
    assert rewards.tolist() == [[0, 0.5, 0], [0, 0, -1.0], [0, 0, 2.0]]
    assert masks.outcome_rewards(torch.tensor([1, 0, 0]), attention).sum() == 1


def test_ids_are_the_prompt_followed_by_the_response() -> None:
    ids = masks.joined_ids(torch.tensor([[0, 1]]), torch.tensor([[2, 3, 4]]))
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_packed_labels_do_not_leak_into_the_next_sequence() -> None:
    # verl issue 6475: one roll over the packed ids gives [4, 9, 6, 9, 7, 5, 3].
    ids = torch.tensor([3, 4, 9, 6, 9, 7, 5])
    labels = masks.packed_labels(ids, torch.tensor([0, 3, 5, 7]))
    assert labels.tolist() == [4, 9, -100, 9, -100, 5, -100]
    assert masks.packed_labels(ids, torch.tensor([0, 0, 7, 7])).tolist()[-2:] == [5, -100]


@pytest.mark.parametrize("offsets", [[0, 3], [1, 7], [0, 5, 3, 7], []])
def test_packed_labels_refuse_offsets_that_do_not_cover(offsets: list[int]) -> None:
    ids = torch.arange(7)
    with pytest.raises(ValueError, match="do not cut 7 tokens"):
        masks.packed_labels(ids, torch.tensor(offsets, dtype=torch.int64))


def test_end_facts() -> None:
    eos, pad = 9, 0
    responses = torch.tensor(
        [
            [3, eos, pad, pad],  # stops by itself
            [3, 4, 5, 6],  # cut by the limit
            [3, 4, 5, eos],  # stops in the last column
            [3, 4, pad, pad],  # ends early for no visible reason
            [3, eos, 5, eos],  # a second turn
            [pad, pad, pad, pad],  # nothing generated
        ]
    )
    lengths = torch.tensor([2, 4, 4, 2, 4, 0])
    facts = masks.end_facts(responses, masks.mask_of_lengths(lengths, 4), [eos])
    assert facts.length.tolist() == lengths.tolist()
    assert facts.last.tolist() == [1, 3, 3, 1, 3, -1]
    assert facts.first_stop.tolist() == [1, -1, 3, -1, 1, -1]
    assert facts.ends_with_stop.tolist() == [True, False, True, False, True, False]
    assert facts.truncated.tolist() == [False, True, False, False, False, False]
    assert facts.unexplained.tolist() == [False, False, False, True, False, False]
    assert facts.goes_on_after_stop.tolist() == [False, False, False, False, True, False]


def test_a_stop_id_on_padding_is_no_stop() -> None:
    # The pad id may be the stop id: padding after the last token must not count.
    responses = torch.tensor([[3, 4, 9, 9]])
    facts = masks.end_facts(responses, torch.tensor([[1, 1, 0, 0]]), [9])
    assert not facts.ends_with_stop.item()
    assert facts.first_stop.item() == -1


def test_no_stop_ids_at_all() -> None:
    facts = masks.end_facts(torch.tensor([[3, 4]]), torch.tensor([[1, 1]]), [])
    assert facts.truncated.item()


@given(
    st.integers(1, 6).flatmap(
        lambda width: st.tuples(
            st.just(width), st.lists(st.integers(0, width), min_size=1, max_size=5)
        )
    )
)
def test_lengths_and_masks_agree(drawn: tuple[int, list[int]]) -> None:
    width, lengths = drawn
    right = masks.mask_of_lengths(torch.tensor(lengths), width)
    left = masks.mask_of_lengths(torch.tensor(lengths), width, side="left")
    assert right.sum(dim=-1).tolist() == left.sum(dim=-1).tolist() == lengths
    assert masks.is_right_padded(right).all()
    assert masks.is_left_padded(left).all()
    assert masks.last_attended(right).tolist() == [length - 1 for length in lengths]
    row = torch.cat([left, right], dim=-1)
    tokens = row.sum(dim=-1)
    assert masks.position_ids(row).amax(dim=-1).tolist() == (tokens - 1).clamp(min=0).tolist()
