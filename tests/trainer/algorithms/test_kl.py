import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.reference.kl import kl_estimate
from dataproto_audit.trainer.algorithms.kl import ESTIMATORS, kl_per_token

NAMES = [*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS)]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_the_reference(name):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(6, 4, generator=generator).requires_grad_()
    reference = torch.randn(6, 4, generator=generator)
    theirs = ours.detach().clone().requires_grad_()
    value, expected = (
        kl_per_token(ours, reference, estimator=name),
        kl_estimate(theirs, reference, name),
    )
    torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_k3_is_bounded_where_a_token_was_all_but_ruled_out():
    far = kl_per_token(torch.full((1, 2), -60.0), torch.zeros(1, 2), estimator="low_var_kl")
    assert far.tolist() == [[10.0, 10.0]]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"DPA851.*low_var_kl"):
        kl_per_token(torch.zeros(1, 1), torch.zeros(1, 1), estimator="full")
