"""Masks, positions and the layout of ids: what they must be, given the attention mask.

Every function takes the batch's own tensors and returns new ones. Shapes: ``attention_mask``
[rows, prompt + response], prompts padded left, responses padded right.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64, Integer, Shaped
from torch import Tensor

from dataproto_audit.reference.shapes import (
    BoolRows,
    IndexRows,
    Mask,
    WideMask,
    as_bool,
    checked,
)


@checked
def position_ids(attention_mask: WideMask) -> Int64[Tensor, "rows total"]:
    """Positions count attended tokens: clip(cumsum(mask) - 1, 0).

    Left padding gets 0, right padding repeats the last position. Text rows only: the
    multi-channel positions of image models are not covered.
    """
    return (as_bool(attention_mask).cumsum(dim=-1) - 1).clamp(min=0)


@checked
def response_attention(attention_mask: WideMask, response_width: int) -> Mask:
    """The last ``response_width`` columns of the attention mask.

    Raises:
        ValueError: the mask is not wider than the response.
    """
    total = attention_mask.shape[1]
    if not 0 < response_width < total:
        raise ValueError(
            f"response width {response_width} does not leave room for a prompt in a mask of "
            f"{total} columns"
        )
    return attention_mask[:, total - response_width :]


@checked
def expected_response_mask(
    attention: Mask, *, observation: Mask | None = None
) -> Bool[Tensor, "rows response"]:
    """Sampled tokens: attended response tokens that are not an observation.

    ``attention`` is the response part of the attention mask; ``observation`` marks tokens written
    by a tool or a user. Rejection sampling, which clears more of the mask, is not covered.
    """
    sampled = as_bool(attention)
    return sampled if observation is None else sampled & ~as_bool(observation)


@checked
def mask_of_lengths(
    lengths: Integer[Tensor, " rows"], width: int, *, side: str = "right"
) -> Bool[Tensor, "rows width"]:
    """Mask with ``lengths[i]`` ones in row i, padded on the given side ("left" or "right").

    Raises:
        ValueError: unknown side, or a length outside 0..width.
    """
    if side not in ("left", "right"):
        raise ValueError(f"padding side {side!r} is neither 'left' nor 'right'")
    if bool(((lengths < 0) | (lengths > width)).any()):
        raise ValueError(f"lengths {lengths.tolist()} do not fit a width of {width}")
    column = torch.arange(width, device=lengths.device)
    if side == "left":
        column = width - 1 - column
    return column[None, :] < lengths[:, None]


@checked
def mask_through_first_stop(
    ids: Integer[Tensor, "rows response"], stop_ids: Collection[int]
) -> Bool[Tensor, "rows response"]:
    """Columns up to and including the first stop id; all columns where there is none.

    A stop id inside a response (template tokens of a later turn) also ends this mask, so it fits
    single-turn responses only.
    """
    stops_before = is_stop(ids, stop_ids).cumsum(dim=-1) - is_stop(ids, stop_ids).long()
    return stops_before == 0


@checked
def is_left_padded(mask: WideMask) -> BoolRows:
    """Whether each row reads 0..0 1..1 (a row of equal values counts)."""
    on = as_bool(mask)
    return (on[:, 1:] >= on[:, :-1]).all(dim=-1)


@checked
def is_right_padded(mask: WideMask) -> BoolRows:
    """Whether each row reads 1..1 0..0 (a row of equal values counts)."""
    on = as_bool(mask)
    return (on[:, 1:] <= on[:, :-1]).all(dim=-1)


@checked
def last_attended(attention: Mask) -> IndexRows:
    """Column of the last attended response token, -1 for a row without any.

    An outcome reward sits here. verl writes the reward of an empty response to the last column,
    which is what index -1 addresses.
    """
    column = torch.arange(attention.shape[1], device=attention.device)
    return torch.where(as_bool(attention), column, column.new_full((), -1)).amax(dim=-1)


@checked
def outcome_rewards(
    scores: Shaped[Tensor, " rows"], attention: Mask
) -> Float64[Tensor, "rows response"]:
    """Token-level form of one score a row: zero but for the last attended token (float64)."""
    rewards = torch.zeros(attention.shape, dtype=torch.float64, device=attention.device)
    rows = torch.arange(attention.shape[0], device=attention.device)
    rewards[rows, last_attended(attention)] = scores.double()
    return rewards


@checked
def joined_ids(
    prompts: Integer[Tensor, "rows prompt"], responses: Integer[Tensor, "rows response"]
) -> Integer[Tensor, "rows prompt+response"]:
    """``input_ids``: the prompt columns followed by the response columns."""
    return torch.cat([prompts, responses], dim=-1)


@checked
def packed_labels(
    ids: Integer[Tensor, " tokens"], offsets: Integer[Tensor, " bounds"], *, ignore: int = -100
) -> Integer[Tensor, " tokens"]:
    """Next-token labels of sequences packed end to end: the shift stays inside each sequence.

    ``offsets`` are the starts of the sequences and the total length (``cu_seqlens``). The last
    token of a sequence has no next one and gets ``ignore``.

    Raises:
        ValueError: offsets that do not rise from 0 to the number of tokens.
    """
    bounds = offsets.long()
    tokens = ids.numel()
    whole = bounds.numel() > 0 and int(bounds[0]) == 0 and int(bounds[-1]) == tokens
    if not whole or bool((bounds[1:] < bounds[:-1]).any()):
        raise ValueError(f"offsets {offsets.tolist()} do not cut {tokens} tokens into sequences")
    labels = ids.roll(-1)
    lasts = bounds[1:][bounds[1:] > bounds[:-1]] - 1
    labels[lasts] = ignore
    return labels


@checked
def is_stop(
    ids: Integer[Tensor, "rows response"], stop_ids: Collection[int]
) -> Bool[Tensor, "rows response"]:
    """Where an id is one of the stop ids."""
    return torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=ids.dtype, device=ids.device))


@dataclass(frozen=True)
class EndFacts:
    """How each response ends. All fields [rows]; columns are -1 where there is no such token."""

    length: Tensor
    """Attended response tokens."""
    last: Tensor
    """Column of the last attended token."""
    first_stop: Tensor
    """Column of the first attended stop id."""
    ends_with_stop: Tensor
    """The last attended token is a stop id."""
    fills_width: Tensor
    """Every column is attended: the length limit was reached."""

    @property
    def truncated(self) -> Tensor:
        """Cut by the length limit: no stop id at the end and no column left."""
        return self.fills_width & ~self.ends_with_stop

    @property
    def unexplained(self) -> Tensor:
        """Ended early without a stop id; a tool limit or an abort would have to explain it."""
        return (self.length > 0) & ~self.fills_width & ~self.ends_with_stop

    @property
    def goes_on_after_stop(self) -> Tensor:
        """Attended tokens follow a stop id: normal over several turns, not in one."""
        return (self.first_stop >= 0) & (self.first_stop < self.last)


@checked
def end_facts(
    responses: Integer[Tensor, "rows response"], attention: Mask, stop_ids: Collection[int]
) -> EndFacts:
    """How each response ends, from its ids, its attention mask and the stop ids."""
    on, last = as_bool(attention), last_attended(attention)
    stops = is_stop(responses, stop_ids) & on
    width = responses.shape[1]
    column = torch.arange(width, device=responses.device)
    first = torch.where(stops, column, column.new_full((), width)).amin(dim=-1)
    # An empty row looks at column 0, which is no attended stop.
    at_last = stops.gather(1, last.clamp(min=0)[:, None])[:, 0]
    return EndFacts(
        length=on.sum(dim=-1),
        last=last,
        first_stop=torch.where(first < width, first, first.new_full((), -1)),
        ends_with_stop=at_last,
        fills_width=on.all(dim=-1),
    )
