import json

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.backends.base import MicroBatch, ModelSpec


def micro(rows: int = 2, prompt: int = 3, response: int = 4) -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 20, (rows, prompt + response), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return MicroBatch(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), ids[:, prompt:])


def test_keeping_only_the_last_logits_changes_nothing(tiny_model):
    model = hf.build_model(ModelSpec(str(tiny_model())))
    assert hf.takes_logits_to_keep(model)
    with torch.no_grad():
        kept = hf.response_logits(model, micro(), keep=True)
        whole = hf.response_logits(model, micro(), keep=False)
    assert kept.shape == (2, 4, model.config.vocab_size)
    torch.testing.assert_close(kept, whole, atol=1e-5, rtol=0)


def test_outputs_are_zero_and_without_gradient_off_the_attention():
    batch = micro()
    logits = torch.randn(2, 4, 20).requires_grad_()
    for entropy in (False, True):
        out = hf.token_outputs(logits, batch, temperature=0.5, entropy=entropy)
        assert out.log_probs_BR[0, -2:].tolist() == [0.0, 0.0]
        (gradient,) = torch.autograd.grad(out.log_probs_BR.sum(), logits)
        assert not gradient[0, -2:].any()
        assert gradient[1].any()


def test_a_uniform_distribution_has_the_entropy_of_its_size():
    out = hf.token_outputs(torch.zeros(2, 4, 20), micro(), temperature=2.0, entropy=True)
    expected = torch.tensor(20.0).log()
    torch.testing.assert_close(out.entropy_BR[1], expected.expand(4))
    torch.testing.assert_close(out.log_probs_BR[1], -expected.expand(4))


def test_a_large_vocabulary_costs_no_accuracy():
    generator = torch.Generator().manual_seed(1)
    logits = 0.1 * torch.randn(2, 4, 50_048, generator=generator)
    out = hf.token_outputs(logits, micro(), temperature=1.0, entropy=True)
    log_p = logits[1].double().log_softmax(-1)
    exact = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(out.entropy_BR[1].double(), exact, atol=4e-6, rtol=0)


def test_wrong_folders_and_dtypes_are_refused(tmp_path, tiny_model):
    with pytest.raises(UsageError, match=r"DPA852 .*config.json"):
        hf.build_model(ModelSpec(str(tmp_path)))
    with pytest.raises(UsageError, match=r"DPA851 .*float8"):
        hf.build_model(ModelSpec(str(tiny_model()), dtype="float8"))
    (tmp_path / "config.json").write_text((tiny_model() / "config.json").read_text())
    with pytest.raises(UsageError, match=r"DPA852 .*weights"):
        hf.build_model(ModelSpec(str(tmp_path)))
    for content in (b"garbage", b"", b"PK\x03\x04 cut off"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UsageError, match=r"DPA852 .*weights") as caught:
            hf.build_model(ModelSpec(str(tmp_path)))
        assert "\n" not in str(caught.value)


def test_a_configuration_that_only_transformers_knows_to_be_wrong_is_refused(tmp_path):
    sizes = {"model_type": "mistral", "vocab_size": 19, "num_hidden_layers": "2"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UsageError, match=r"DPA852 .*num_hidden_layers"):
        hf.build_model(ModelSpec(str(tmp_path)))
