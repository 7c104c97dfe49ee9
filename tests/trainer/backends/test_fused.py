"""The fused output layer against the plain one: values, gradients, and what is alive at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataproto_audit.trainer.backends.fused import fused_scores, plain_scores


def inputs(tokens=13, hidden=8, vocabulary=50, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(tokens, hidden, generator=random).to(dtype).requires_grad_()
    weight_VH = torch.randn(vocabulary, hidden, generator=random).to(dtype).requires_grad_()
    return hidden_NH, weight_VH, torch.randint(0, vocabulary, (tokens,), generator=random)


def both(options, *, chunk, seed=0, **sizes):
    """(values, gradients) of the fused and of the plain path, for a loss that uses both outputs."""
    found = []
    for fused in (True, False):
        hidden, weight, labels = inputs(seed=seed, **sizes)
        if fused:
            chosen, entropy = fused_scores(hidden, weight, labels, chunk=chunk, **options)
        else:
            chosen, entropy = plain_scores(hidden @ weight.t(), labels, **options)
        loss = (chosen * torch.linspace(-1, 2, len(chosen))).sum()
        if entropy is not None:
            loss = loss + (entropy.square() * 0.3).sum()
        loss.backward()
        found.append([chosen.detach(), entropy, hidden.grad, weight.grad])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_values_and_gradients_equal_the_plain_path(temperature, entropy, chunk):
    fused, plain = both({"temperature": temperature, "entropy": entropy}, chunk=chunk)
    for ours, expected in zip(fused, plain, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_sixteen_bits_stay_as_near_as_their_precision():
    fused, plain = both({"temperature": 1.0, "entropy": True}, chunk=4, dtype=torch.bfloat16)
    for ours, expected in zip(fused, plain, strict=True):
        assert ours.dtype == expected.dtype
        scale = float(expected.detach().float().abs().max())
        torch.testing.assert_close(ours.float(), expected.float(), atol=0.02 * scale, rtol=0)


def test_gradients_are_those_of_finite_differences():
    hidden, weight, labels = inputs(tokens=3, hidden=2, vocabulary=4)
    chosen, entropy = fused_scores(hidden, weight, labels, temperature=0.5, entropy=True, chunk=2)
    (chosen.sum() + entropy.sum()).backward()
    with torch.no_grad():
        for at in [(0, 0), (2, 1)]:
            values = []
            for step in (1e-2, -1e-2):
                moved = hidden.clone()
                moved[at] += step
                values.append(sum(part.sum() for part in plain_scores(
                    moved @ weight.t(), labels, temperature=0.5, entropy=True)))  # fmt: skip
            slope = float(values[0] - values[1]) / 2e-2
            assert float(hidden.grad[at]) == pytest.approx(slope, abs=1e-3)


def test_a_frozen_layer_and_a_frozen_model_get_no_gradient():
    hidden, weight, labels = inputs()
    chosen, _ = fused_scores(hidden, weight.detach(), labels, temperature=1.0, entropy=False)
    chosen.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        chosen, entropy = fused_scores(hidden, weight, labels, temperature=1.0, entropy=True)
    assert not chosen.requires_grad
    assert entropy is not None


def test_no_scored_token_gives_nothing_and_still_flows_back():
    hidden, weight, labels = inputs()
    chosen, _ = fused_scores(hidden[:0], weight, labels[:0], temperature=1.0, entropy=True)
    chosen.sum().backward()
    assert not weight.grad.any()
    assert not hidden.grad.any()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return out


def test_no_operation_makes_the_whole_logits():
    hidden, weight, labels = inputs(tokens=64, hidden=4, vocabulary=100)
    with Largest() as seen:
        chosen, entropy = fused_scores(
            hidden, weight, labels, temperature=0.9, entropy=True, chunk=8
        )
        (chosen.sum() + entropy.sum()).backward()
    assert seen.elements == 8 * 100
