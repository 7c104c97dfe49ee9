"""Faults of a Megatron layout: each function spoils one rank's backend, as a mistake in code would.

A function may give back another that undoes what it changed for the whole process.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from dataproto_audit.trainer.backends.megatron import modules, rows, schedule, weights

LAYER = 2
"""The layer that is spoiled where only one is."""


def _patched(*patches):
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack.close


def wrong_qkv_interleave(backend):
    """All queries, then all keys, then all values, where Megatron reads them group by group; in one
    layer. Loading and export agree with each other, so weights come back as they went."""
    right, plain = weights._of_layer, weights._Cut.query_key_value

    def one_after_the_other(cut, prefix, kind):
        heads, groups = (int(cut._model[f"num_{x}_heads"]) for x in ("attention", "key_value"))
        size = weights.head_dim(cut._model)
        ends = [n * size // cut._seat.ranks for n in (heads, groups, groups)]
        for letter, part in zip("qkv", cut.tensor.split(ends), strict=True):
            yield cut.rows(f"{prefix}{letter}_proj.{kind}", part)

    def of_layer(cut, prefix, rest):
        spoiled = prefix == f"model.layers.{LAYER}."
        weights._Cut.query_key_value = one_after_the_other if spoiled else plain
        yield from right(cut, prefix, rest)

    weights._of_layer = of_layer
    backend._shards = backend._pieces(lambda param: param.detach())
    backend._load(Path(backend._folder))
    backend.weights_changed()

    def undo():
        weights._of_layer, weights._Cut.query_key_value = right, plain

    return undo


def norm_weights_not_summed_over_sequence_ranks(backend):
    """The mark is missing by which the gradients of norms are summed over tensor-parallel ranks,
    each of which saw a part of the sequence."""
    for chunk in backend._chunks:
        for param in chunk.parameters():
            if getattr(param, "sequence_parallel", False):
                param.sequence_parallel = False


def padded_vocabulary_in_the_softmax(backend):
    """The rows that fill the vocabulary up take part in the softmax."""
    backend._schedule._vocabulary += 1


def value_gradient_summed(backend):
    """The gradient of the hidden states is summed over tensor-parallel ranks, as parts of the
    vocabulary need it; each rank's value head gives the whole of it already."""
    gather = schedule.gather_from_sequence_parallel_region

    def summing(hidden, **_):
        return gather(hidden)

    return _patched(mock.patch.object(schedule, gather.__name__, summing))


def context_parallel_without_zigzag(backend):
    """Ranks get runs of tokens one after the other; the rotary embedding counts in zigzag."""

    def straight(length, ranks, rank, device=None):
        return rank * length + torch.arange(length, device=device)

    return _patched(
        mock.patch.object(schedule, "positions", straight),
        mock.patch.object(modules, "positions", straight),
    )


def left_padding_kept(backend):
    """Rows go in as they come, padded on the left: the rotary embedding counts columns, and what
    is causal only sees the padding, too."""
    hidden_states = backend.hidden_states
    pads = {}

    def align(micro, *, multiple):
        aligned = rows.align(micro, multiple=multiple)
        width = micro.input_ids_BT.shape[1] - 1
        width += -width % multiple
        ids = torch.nn.functional.pad(
            micro.input_ids_BT, (0, max(0, width - micro.input_ids_BT.shape[1]))
        )[:, :width]
        pad = micro.attention_mask_BT.argmax(-1)
        pads[id(micro)] = pad
        old = aligned.tokens_BS.shape[1]
        at, place = aligned.index_N // old, aligned.index_N % old
        return replace(aligned, tokens_BS=ids, index_N=at * width + place + pad[at])

    def at_their_columns(micro, output):
        seen, _, places = schedule.compared_tokens(micro.attention_mask_BT)
        return output[places + pads[id(micro)][seen], seen]

    backend.hidden_states = at_their_columns
    undo = _patched(mock.patch.object(schedule, "align", align))

    def all_back():
        backend.hidden_states = hidden_states
        undo()

    return all_back
