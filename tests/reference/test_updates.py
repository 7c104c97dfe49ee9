import pytest
import torch
from torch import Tensor

from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients, sgd_step


def _named(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "b": torch.randn(3, generator=generator, dtype=torch.float64),
    }


def test_sgd_by_hand() -> None:
    new = sgd_step({"p": torch.tensor([1.0])}, {"p": torch.tensor([0.5])}, lr=0.1)
    assert new["p"].item() == pytest.approx(0.95)
    decayed = sgd_step(
        {"p": torch.tensor([1.0])}, {"p": torch.tensor([0.5])}, lr=0.1, weight_decay=0.2
    )
    assert decayed["p"].item() == pytest.approx(0.93)


def test_the_first_adamw_step_moves_by_the_learning_rate() -> None:
    # m / (1 - b1) = g and v / (1 - b2) = g^2, so the direction is the sign of g.
    new, state = adamw_step(
        {"p": torch.tensor([2.0, 2.0])}, {"p": torch.tensor([0.3, -7.0])}, AdamWState(),
        lr=0.1, weight_decay=0.5,
    )  # fmt: skip
    assert new["p"].tolist() == pytest.approx([2 * 0.95 - 0.1, 2 * 0.95 + 0.1])
    assert state.step == 1
    assert state.first["p"].tolist() == pytest.approx([0.03, -0.7])
    assert state.second["p"].tolist() == pytest.approx([0.00009, 0.049])


def test_adamw_follows_torch_over_steps() -> None:
    ours, state = _named(0), AdamWState()
    theirs = {name: value.clone().requires_grad_() for name, value in ours.items()}
    settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs.values(), **settings)
    for step in range(5):
        gradients = _named(step + 1)
        for name, value in theirs.items():
            value.grad = gradients[name].clone()
        optimizer.step()
        ours, state = adamw_step(ours, gradients, state, **settings)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-12, atol=1e-12)


def test_sgd_follows_torch() -> None:
    ours, gradients = _named(0), _named(1)
    theirs = {name: value.clone().requires_grad_() for name, value in ours.items()}
    for name, value in theirs.items():
        value.grad = gradients[name]
    torch.optim.SGD(theirs.values(), lr=0.1, weight_decay=0.2).step()
    new = sgd_step(ours, gradients, lr=0.1, weight_decay=0.2)
    for name, value in theirs.items():
        torch.testing.assert_close(new[name], value.detach())


def test_nothing_is_changed_in_place() -> None:
    parameters, gradients = _named(0), _named(1)
    sgd_step(parameters, gradients, lr=0.1)
    _, state = adamw_step(parameters, gradients, AdamWState(), lr=0.1)
    before = state.first["w"].clone()
    adamw_step(parameters, gradients, state, lr=0.1)
    clip_gradients(gradients, max_norm=0.1)
    assert torch.equal(parameters["w"], _named(0)["w"])
    assert torch.equal(gradients["w"], _named(1)["w"])
    assert torch.equal(state.first["w"], before)


def test_results_keep_the_parameters_dtype() -> None:
    parameters = {"p": torch.tensor([1.0], dtype=torch.float32)}
    assert sgd_step(parameters, parameters, lr=0.1)["p"].dtype == torch.float32
    new, state = adamw_step(parameters, parameters, AdamWState(), lr=0.1)
    assert new["p"].dtype == torch.float32
    assert state.first["p"].dtype == torch.float64


def test_gradients_are_clipped_by_their_common_norm() -> None:
    clipped, norm = clip_gradients(
        {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, max_norm=1.0
    )
    assert norm == pytest.approx(5.0)
    assert [clipped["a"].item(), clipped["b"].item()] == pytest.approx([0.6, 0.8], abs=1e-6)
    same, _ = clip_gradients({"a": torch.tensor([0.3])}, max_norm=1.0)
    assert same["a"].item() == pytest.approx(0.3)
    still, norm = clip_gradients({"a": torch.tensor([0.0])}, max_norm=1.0)
    assert (still["a"].item(), norm) == (0.0, 0.0)


def test_clipping_follows_torch() -> None:
    gradients = _named(1)
    holders = [torch.zeros_like(value).requires_grad_() for value in gradients.values()]
    for holder, gradient in zip(holders, gradients.values(), strict=True):
        holder.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(holders, 0.5)
    clipped, norm = clip_gradients(gradients, max_norm=0.5)
    assert norm == pytest.approx(expected.item())
    for holder, gradient in zip(holders, clipped.values(), strict=True):
        torch.testing.assert_close(gradient, holder.grad)


def test_a_forgotten_gradient_is_named() -> None:
    with pytest.raises(ValueError, match="differ in names: b"):
        sgd_step(_named(0), {"w": torch.zeros(3, 2)}, lr=0.1)
    with pytest.raises(ValueError, match="differ in names: x"):
        adamw_step(_named(0), _named(1) | {"x": torch.zeros(1)}, AdamWState(), lr=0.1)
