"""Values and the value loss of transformers' token classifier, by the formula written out again."""

import pytest
import torch

from dataproto_audit.reference.values import grad_of_value_loss, load_value_model, token_values
from dataproto_audit.trainer.models import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = TinyModel(charset="digits", initializer_range=0.2)
    return write_tiny_model(tmp_path_factory.mktemp("model"), sizes)


@pytest.fixture
def model(folder):
    made = load_value_model(folder)
    torch.manual_seed(4)
    with torch.no_grad():
        made.score.weight.normal_()
        made.score.bias.fill_(0.5)
    return made


def batch():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 14, mask.shape, generator=random) * mask
    return {
        "input_ids": ids, "attention_mask": mask, "responses": ids[:, 3:],
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        "values": torch.randn(2, 3, generator=random),
        "returns": torch.randn(2, 3, generator=random),
    }  # fmt: skip


def test_a_value_is_that_of_the_state_before_its_token(model):
    rows = batch()
    found = token_values(model, rows)
    with torch.no_grad():
        hidden = model.model(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"],
            position_ids=rows["position_ids"], use_cache=False,
        ).last_hidden_state  # fmt: skip
        every = hidden @ model.score.weight[0] + 0.5
    torch.testing.assert_close(found[1], every[1, 2:5].double(), atol=1e-5, rtol=0)
    assert found[0, 2] == 0, "not attended"
    torch.testing.assert_close(
        token_values(model, rows, rows_per_forward=1), found, atol=1e-5, rtol=0
    )


def test_the_loss_is_ppo_s_and_its_gradient_autograd_s(model):
    rows = batch()
    gradients, loss = grad_of_value_loss(model, rows, clip=0.1)
    values, old, returns = token_values(model, rows), rows["values"], rows["returns"]
    held = torch.clamp(values, old.double() - 0.1, old.double() + 0.1)
    worse = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    expected = (worse * rows["response_mask"]).sum() / 4 / 2
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    free = ((values - returns) ** 2 >= (held - returns) ** 2) & rows["response_mask"].bool()
    bias = ((values - returns) * free).sum() / 4
    assert float(gradients["score.bias"]) == pytest.approx(float(bias), rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_language_model_s_head_begins_at_0_and_a_missing_folder_is_named(folder, tmp_path):
    assert not token_values(load_value_model(folder), batch()).any()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_value_model(tmp_path)
