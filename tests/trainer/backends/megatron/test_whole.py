"""Whole tensors cut for the ranks of a layout and put together again, bit for bit; no engine."""

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.weights import Seat
from dataproto_audit.trainer.backends.megatron.whole import (
    SEAT,
    Held,
    megatron_state,
    whole_of_megatron,
)
from dataproto_audit.trainer.backends.moments import STATELESS, moments_of
from dataproto_audit.trainer.backends.shards import ShardSpec
from dataproto_audit.trainer.backends.whole import fsdp_state, whole_of_fsdp

MODEL = {
    "vocab_size": 43, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "self_attn.q_proj.weight": (24, 8), "self_attn.k_proj.weight": (12, 8),
    "self_attn.v_proj.weight": (12, 8), "self_attn.o_proj.weight": (8, 24),
    "mlp.gate_proj.weight": (12, 8), "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12), "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}  # fmt: skip


def made_whole():
    shapes = {"model.embed_tokens.weight": (43, 8), "lm_head.weight": (43, 8),
              "model.norm.weight": (8,)}  # fmt: skip
    for layer in range(4):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in SIZES.items()}
    torch.manual_seed(3)
    whole = {
        kind: {name: torch.randn(shape) for name, shape in shapes.items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    return {**whole, "step": {name: torch.tensor(7.0) for name in shapes}}


def parameters(tp, stage, stages):
    """Shapes of one rank's parameters by their name in its chunk."""
    rows = -(-43 // tp)
    found = {}
    if stage == 0:
        found["embedding.word_embeddings.weight"] = (rows, 8)
    for layer in range(4 // stages):
        prefix = f"decoder.layers.{layer}."
        found |= {
            prefix + "self_attention.linear_qkv.weight": (48 // tp, 8),
            prefix + "self_attention.linear_proj.weight": (8, 24 // tp),
            prefix + "mlp.linear_fc1.weight": (24 // tp, 8),
            prefix + "mlp.linear_fc2.weight": (8, 12 // tp),
            prefix + "input_layernorm.weight": (8,),
            prefix + "pre_mlp_layernorm.weight": (8,),
        }
    if stage == stages - 1:
        found |= {"decoder.final_layernorm.weight": (8,), "output_layer.weight": (rows, 8)}
    return found


def states(whole, *, tp=1, pp=1, copies=1, cut=False):
    """The state of every rank of a layout; ``cut`` as the distributed optimizer cuts moments."""
    out = []
    for stage in range(pp):
        for copy in range(copies):
            for rank in range(tp):
                first = stage * (4 // pp)
                held = []
                for name, shape in parameters(tp, stage, pp).items():
                    size = torch.Size(shape).numel()
                    run = (copy * size // copies, (copy + 1) * size // copies) if cut else None
                    held.append(Held(f"0/{name}", torch.empty(shape), first, run))
                seat = Seat(rank=rank, ranks=tp, copy=copy > 0)
                state = megatron_state(whole, held, MODEL, seat, masters=False)
                state[SEAT] = torch.tensor([rank, tp, copy, first])
                state |= {f"range/{one.key}": torch.tensor(one.part) for one in held if one.part}
                out.append(state)
    return out


@pytest.mark.parametrize(
    "layout",
    [
        {}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "copies": 2},
        {"copies": 2, "cut": True}, {"tp": 2, "pp": 4, "copies": 3, "cut": True},
    ],
)  # fmt: skip
def test_what_a_layout_writes_is_put_together_bit_for_bit(layout):
    whole = made_whole()
    again = whole_of_megatron(states(whole, **layout), MODEL)
    assert again.keys() == whole.keys()
    for kind, by_name in whole.items():
        assert again[kind].keys() == by_name.keys(), kind
        assert all(torch.equal(again[kind][name], value) for name, value in by_name.items()), kind


def test_a_state_before_the_first_step_has_no_moments():
    whole = {"model": made_whole()["model"]}
    assert list(whole_of_megatron(states(whole, tp=2), MODEL)) == ["model"]


def fsdp_states(whole, ranks):
    out = []
    for rank in range(ranks):
        pieces = {}
        for name, value in whole["model"].items():
            rows = -(-value.shape[0] // ranks)
            start = min(rank * rows, value.shape[0])
            piece = value[start : start + rows]
            pieces[name] = (piece, ShardSpec(tuple(value.shape), "float32", start))
        trained = [name for name, (piece, _) in pieces.items() if piece.numel()]
        out.append(fsdp_state(whole, pieces, trained))
    return out


def test_fsdp_ranks_of_any_number_and_megatron_ranks_take_each_others_state():
    whole = made_whole()
    from_three = whole_of_fsdp(fsdp_states(whole, 3), ranks=3)
    from_megatron = whole_of_megatron(states(from_three, tp=2, pp=2, copies=2, cut=True), MODEL)
    from_two = whole_of_fsdp(fsdp_states(from_megatron, 2) * 2, ranks=2)  # two copies of it
    for kind, by_name in whole.items():
        for name, value in by_name.items():
            assert torch.equal(from_two[kind][name], value), (kind, name)


NORM = "model.norm.weight"
MEGATRON_NORM = "0/decoder.final_layernorm.weight"


def without_state(whole, *names):
    """``whole`` with weights that never had a gradient, as FSDP ranks mark them."""
    kept = {
        kind: {name: value for name, value in by.items() if kind == "model" or name not in names}
        for kind, by in whole.items()
    }
    return {**kept, STATELESS: {name: torch.empty(0) for name in names}}


def test_a_weight_that_never_had_a_gradient_goes_on_without_moments_on_either_engine():
    whole = without_state(made_whole(), NORM)
    wrote = fsdp_states(whole, 2)
    assert f"optim/{NORM}/{STATELESS}" in wrote[0]
    from_fsdp = whole_of_fsdp(wrote, ranks=2)
    assert list(from_fsdp[STATELESS]) == [NORM]
    ranks = states(from_fsdp, copies=2, cut=True)
    for rank in ranks:
        assert f"optim/{MEGATRON_NORM}/exp_avg" not in rank
        found = moments_of(rank, [MEGATRON_NORM, "0/output_layer.weight"])
        assert [sorted(one) for one in found] == [[], ["exp_avg", "exp_avg_sq", "step"]]
    again = whole_of_megatron(ranks, MODEL)
    assert list(again[STATELESS]) == [NORM]
    assert NORM not in again["exp_avg"]
    assert fsdp_states(again, 2)[0].keys() == wrote[0].keys()


def test_the_part_of_a_fused_weight_that_never_had_a_gradient_has_moments_of_0():
    key = "model.layers.1.self_attn.k_proj.weight"
    again = whole_of_megatron(states(without_state(made_whole(), key), tp=2), MODEL)
    assert STATELESS not in again
    assert torch.equal(again["exp_avg"][key], torch.zeros(12, 8))
    query = key.replace("k_proj", "q_proj")
    assert torch.equal(again["exp_avg"][query], made_whole()["exp_avg"][query])


@pytest.mark.parametrize("lost", [["exp_avg"], ["exp_avg", "exp_avg_sq", "step"]])
def test_moments_that_one_parameter_lost_are_refused_and_not_begun_anew(lost):
    whole = made_whole()
    for kind in lost:
        del whole[kind][NORM]
    message = rf"DPA804 .*lacks the optimizer's {', '.join(lost)} of parameter {NORM}"
    for take in (lambda: fsdp_states(whole, 2), lambda: states(whole, tp=2)):
        with pytest.raises(UsageError, match=message):
            take()


@pytest.mark.parametrize(
    ("ranks", "said"), [([0], r"exp_avg \(4 of 8 values\)"), ([0, 1], "exp_avg")]
)
def test_runs_of_moments_that_do_not_make_up_the_parameter_are_refused(ranks, said):
    files = states(made_whole(), copies=2, cut=True)
    for rank in ranks:
        del files[rank][f"optim/{MEGATRON_NORM}/exp_avg"]
    with pytest.raises(UsageError, match=f"DPA804 .*optimizer's {said} of parameter 0/decoder"):
        whole_of_megatron(files, MODEL)


def test_weights_of_another_precision_are_refused_and_moments_keep_theirs():
    whole = made_whole()
    halved = {name: value.bfloat16() for name, value in whole["model"].items()}
    mixed = whole | {"model": halved}
    with pytest.raises(UsageError, match=r"DPA804 .*is bfloat16, the model has float32.*dtype"):
        states(mixed, tp=2)
    spec = ShardSpec((8,), "float32")
    with pytest.raises(UsageError, match=rf"DPA804 .*{NORM} is bfloat16, the model has float32"):
        fsdp_state(mixed, {NORM: (torch.empty(8), spec)}, [])
    taken = fsdp_state(mixed, {NORM: (torch.empty(8, dtype=torch.bfloat16), spec)}, [NORM])
    assert torch.equal(taken[f"model/{NORM}"], halved[NORM])
    assert taken[f"optim/{NORM}/exp_avg"].dtype == torch.float32


def test_another_model_s_checkpoint_is_refused_by_name():
    whole = made_whole()
    whole["exp_avg"]["model.norm.weight"] = torch.zeros(9)
    with pytest.raises(UsageError, match=r"DPA804 .*exp_avg of model.norm.weight is \(9,\)"):
        states(whole, tp=2)
    del whole["model"]["model.norm.weight"]
    with pytest.raises(UsageError, match=r"DPA804 .*model of model.norm.weight is missing"):
        fsdp_states({**whole, "model": {**whole["model"]}}, 1) and states(whole)
