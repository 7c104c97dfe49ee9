"""Rows on one line: what is laid out, and that attention ends at each row."""

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.backends.base import MicroBatch, ModelSpec
from dataproto_audit.trainer.backends.packing import (
    pack,
    packed_attention,
    rows_of,
    use_packed_attention,
)
from dataproto_audit.trainer.backends.scoring import TokenScoring


def micro(lengths=((2, 3), (1, 1), (4, 5), (3, 2)), prompt=4, response=5, seed=0) -> MicroBatch:
    """Left-padded prompts and right-padded responses of the given lengths."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 20, (len(lengths), prompt + response), generator=random)
    columns = torch.arange(prompt + response)
    mask = torch.stack([(columns >= prompt - p) & (columns < prompt + r) for p, r in lengths])
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return MicroBatch(ids * mask, mask.long(), positions, (ids * mask)[:, prompt:])


def test_attended_tokens_stand_in_line_and_positions_begin_anew():
    batch = micro()
    packed = pack(batch)
    assert packed.lengths == (5, 2, 9, 5)
    assert packed.position_ids_1T[0].tolist() == [*range(5), *range(2), *range(9), *range(5)]
    assert packed.restarts == (True,) * 4
    assert torch.equal(packed.input_ids_1T[0], batch.input_ids_BT[batch.attention_mask_BT.bool()])


def test_scored_tokens_are_those_of_the_response_each_predicted_by_the_one_before():
    batch = micro()
    packed = pack(batch)
    assert len(packed.scored_N) == 3 + 1 + 5 + 2
    assert torch.equal(packed.input_ids_1T[0, packed.scored_N + 1], packed.labels_N)
    spread = packed.spread(packed.labels_N)
    assert torch.equal(spread, batch.responses_BR * batch.response_attention_BR)


def test_a_line_is_filled_up_by_a_row_of_its_own():
    packed = pack(micro(), multiple_of=4)
    assert packed.lengths == (5, 2, 9, 5, 3)
    assert packed.input_ids_1T.shape == (1, 24)
    assert packed.position_ids_1T[0, -3:].tolist() == [0, 1, 2]
    assert len(packed.restarts) == 4


def test_rows_that_nobody_attends_to_are_left_out_and_keep_their_place():
    packed = pack(micro(lengths=((2, 2), (0, 0), (1, 3))))
    assert packed.lengths == (4, 0, 4)
    assert sorted(set(packed.rows_N.tolist())) == [0, 2]
    assert rows_of(packed).lengths == (4, 4)
    empty = pack(micro(lengths=((0, 0),)), multiple_of=2)
    assert empty.lengths == (0, 2)
    assert empty.spread(torch.zeros(0)).shape == (1, 5)


def test_a_response_without_anything_before_it_is_refused():
    with pytest.raises(UsageError, match=r"DPA851 row 1 .*no token before its response"):
        pack(micro(lengths=((2, 2), (0, 3))))
    assert pack(micro(lengths=((2, 2), (0, 3))), predicted=False).lengths == (4, 3)


def test_positions_that_go_on_are_noted():
    batch = micro()
    batch.position_ids_BT[1] += 5
    assert pack(batch).note == {"restarts": [True, False, True, True], "mask": "none"}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [(5,), (3, 3), (1, 9, 4, 2, 8), (7, 1)])
def test_attention_is_that_of_each_row_alone(heads, lengths):
    random = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v = (
        torch.randn(1, n, total, 8, generator=random, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    packed = pack(micro(lengths=tuple((n, 0) for n in lengths), prompt=9, response=1))
    rows = rows_of(packed)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=0.3, packed_rows=rows)
    out.square().sum().backward()
    ours = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    start, expected = 0, []
    for length in lengths:
        part = slice(start, start + length)
        scores = q[:, :, part] @ repeated(k, heads)[:, :, part].transpose(-1, -2) * 0.3
        hidden = torch.ones(length, length).triu(1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected.append((weights @ repeated(v, heads)[:, :, part]).transpose(1, 2))
        start += length
    torch.testing.assert_close(out, torch.cat(expected, dim=1), atol=1e-5, rtol=0)
    torch.cat(expected, dim=1).square().sum().backward()
    for mine, x in zip(ours, (q, k, v), strict=True):
        torch.testing.assert_close(mine, x.grad, atol=1e-5, rtol=1e-5)


def repeated(x, heads):
    return x.repeat_interleave(heads[0] // heads[1], dim=1)


def test_a_mask_or_missing_lengths_over_packed_rows_are_an_error():
    x = torch.zeros(1, 2, 4, 8)
    rows = rows_of(pack(micro(lengths=((1, 1), (1, 1)))))
    for mask, told, dropout in [
        (torch.ones(1, 4), rows, 0.0),
        (None, None, 0.0),
        (None, rows, 0.1),
    ]:
        with pytest.raises(RuntimeError, match="packed rows"):
            packed_attention(torch.nn.Identity(), x, x, x, mask, packed_rows=told, dropout=dropout)


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(use_cache=False, **inputs).logits[0]


def test_a_mask_of_ones_would_let_rows_see_each_other_and_the_line_does_not(tiny_model):
    """What the replaced attention is for: transformers' own one leaks, without a word."""
    packed = pack(micro())
    line = {"input_ids": packed.input_ids_1T, "position_ids": packed.position_ids_1T}
    model = hf.build_model(ModelSpec(str(tiny_model()), attn_implementation="sdpa"))
    alone = torch.cat([
        logits_of(model, input_ids=ids[None], position_ids=torch.arange(len(ids))[None])
        for ids in packed.input_ids_1T[0].split(list(packed.lengths))
    ])  # fmt: skip
    leaked = logits_of(model, attention_mask=torch.ones_like(packed.input_ids_1T), **line)
    assert (leaked - alone).abs().max() > 0.1
    use_packed_attention(model)
    ours = logits_of(model, packed_rows=rows_of(packed), **line)
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    again = logits_of(
        model, packed_rows=rows_of(packed), attention_mask=torch.ones_like(packed.input_ids_1T),
        **line,
    )  # fmt: skip
    assert torch.equal(again, ours), "no mask reaches the attention"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_and_gradients_equal_the_padded_path(tiny_model, packed, fused, temperature):
    batch, found = micro(), []
    for changed in (False, True):
        model = hf.build_model(ModelSpec(str(tiny_model(tied=fused))))
        if changed:
            scoring = TokenScoring(packed, fused)
            scoring.install(model)
            out = scoring.score(model, batch, temperature=temperature, entropy=True)
        else:
            logits = hf.response_logits(model, batch, keep=True)
            out = hf.token_outputs(logits, batch, temperature=temperature, entropy=True)
        weights = torch.linspace(0, 1, 20).view(4, 5)
        (out.log_probs_BR * weights + 0.1 * out.entropy_BR).sum().backward()
        found.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (plain, plain_grads), (ours, our_grads) = found
    torch.testing.assert_close(ours.log_probs_BR, plain.log_probs_BR, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy_BR, plain.entropy_BR, atol=1e-5, rtol=0)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(our_grads[name], grad, atol=1e-5, rtol=1e-5)
