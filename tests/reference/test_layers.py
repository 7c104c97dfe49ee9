"""Hidden states by layer next to what transformers itself gives out."""

import pytest
import torch

from dataproto_audit.reference.layers import layer_outputs
from dataproto_audit.reference.logprobs import load_model
from dataproto_audit.trainer.models import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return load_model(write_tiny_model(folder, TinyModel(charset="digits", initializer_range=0.2)))


def rows():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    ids = torch.randint(3, 14, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def test_streams_are_transformers_own_and_parts_add_up(model):
    ids, mask, positions = rows()
    found = layer_outputs(model, ids, mask, positions)
    assert list(found) == [
        "model.embed_tokens",
        "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.0",
        "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.1",
        "model.norm",
    ]  # fmt: skip
    with torch.no_grad():
        given = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, output_hidden_states=True
        ).hidden_states
    for name, expected in zip(
        ("model.embed_tokens", "model.layers.0", "model.norm"), given, strict=True
    ):
        torch.testing.assert_close(found[name], expected, atol=0, rtol=0)
    added = found["model.layers.0"] + found["model.layers.1.self_attn"]
    torch.testing.assert_close(
        added + found["model.layers.1.mlp"], found["model.layers.1"], atol=1e-6, rtol=0
    )


def test_rows_may_go_one_at_a_time_and_no_hook_stays(model):
    ids, mask, positions = rows()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    whole = layer_outputs(model, ids, mask, positions)
    alone = layer_outputs(model, ids, mask, positions, rows_per_forward=1)
    real = mask.bool()
    for name, expected in whole.items():
        bound = 16 * torch.finfo(torch.float32).eps * float(expected[real].abs().max())
        torch.testing.assert_close(alone[name][real], expected[real], atol=bound, rtol=0)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
