"""A value model on one FSDP rank against the reference; Megatron's and several ranks' are compared
in tests/trainer/compare."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients
from dataproto_audit.reference.values import grad_of_value_loss, load_value_model, token_values
from dataproto_audit.trainer.algorithms.losses import value_loss
from dataproto_audit.trainer.backends.base import ModelSpec, OptimSpec
from dataproto_audit.trainer.backends.fsdp import FSDPBackend
from dataproto_audit.trainer.compare.critic import drawn_head, set_head
from dataproto_audit.trainer.plans import MicroBatching, plan_update
from dataproto_audit.trainer.workers.critic import compute_values, train_values
from dataproto_audit.trainer.workers.spec import ValueLossOptions

OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, grad_clip=0.05)
PARTS = [np.array([5, 0, 2]), np.array([1]), np.array([7, 6, 4, 3])]


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def batch(ragged_batch):
    made = ragged_batch()
    random = torch.Generator().manual_seed(2)
    for name in ("values", "returns"):
        made.batch[name] = torch.randn(made.batch["responses"].shape, generator=random)
    return made


def build(folder, **switches):
    spec = ModelSpec(str(folder), head="value", **switches)
    return FSDPBackend(spec, device=torch.device("cpu"), optim=OPTIM)


def expected_model(folder):
    model = load_value_model(folder)
    model.load_state_dict(drawn_head(model.score.in_features), strict=False)
    return model


@pytest.mark.parametrize("switches", [{}, {"remove_padding": True}, {"fused_kernels": True}])
def test_values_and_an_update_equal_the_reference(tiny_model, batch, switches):
    folder = tiny_model(tied=True)
    backend, model = build(folder, **switches), expected_model(folder)
    set_head(backend)
    values = compute_values(backend, batch.batch, PARTS)
    torch.testing.assert_close(values.double(), token_values(model, batch.batch), atol=1e-5, rtol=0)
    lengths, trained = (
        batch.batch[name].sum(-1).numpy() for name in ("attention_mask", "response_mask")
    )
    plan = plan_update(
        lengths, trained, ranks=1, mini_batch_size=8, width=5, micro=MicroBatching(rows=3)
    ).ranks[0][0]  # fmt: skip
    gradients, loss = grad_of_value_loss(model, batch.batch, clip=0.5)
    clipped, norm = clip_gradients(gradients, max_norm=0.05)
    assert norm > 0.05
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    result = train_values(backend, batch.batch, plan, options=ValueLossOptions())
    assert result.sums["vf_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    assert 0 < result.sums["vf_clipfrac"] < 1
    mask = batch.batch["response_mask"] != 0
    assert result.sums["vpred_mean"] == pytest.approx(float(values[mask].mean()), abs=1e-6)
    stepped, _ = adamw_step(start, clipped, AdamWState(), lr=1e-3, weight_decay=0.1)
    ours = {name: piece for name, (piece, _) in backend.shards().items()}
    assert ours.keys() == stepped.keys()
    wrong = sum(float((ours[name] - stepped[name]).square().sum()) for name in start)
    moved = sum(float((stepped[name] - start[name]).square().sum()) for name in start)
    assert (wrong / moved) ** 0.5 <= 1e-3


def test_a_language_model_s_folder_has_a_value_head_of_zeros(tiny_model, batch):
    assert not compute_values(build(tiny_model()), batch.batch, PARTS).any()


def test_the_value_loss_takes_the_worse_of_held_and_free():
    values, old = torch.tensor([[2.0, 0.0, 0.4]]), torch.zeros(1, 3)
    loss, clipped = value_loss(values, old, torch.tensor([[2.0, 1.0, 0.0]]), clip=0.5)
    assert torch.allclose(loss, torch.tensor([[1.125, 0.5, 0.08]]))
    assert clipped.tolist() == [[True, False, False]]
