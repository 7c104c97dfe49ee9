"""Optimizer state in a checkpoint: none at all, or that of every parameter."""

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.moments import moments_of

STATE = {
    "model/a": torch.ones(2),
    "optim/a/step": torch.tensor(3.0),
    "optim/a/exp_avg": torch.ones(2),
    "optim/b.c/step": torch.tensor(3.0),
    "optim/b.c/exp_avg": torch.ones(3),
}


def test_state_is_copied_in_the_order_of_the_parameters():
    found = moments_of(STATE, ["b.c", "a"])
    assert [set(one) for one in found] == [{"step", "exp_avg"}] * 2
    assert found[0]["exp_avg"].shape == (3,)
    assert found[1]["exp_avg"] is not STATE["optim/a/exp_avg"]


def test_before_the_first_step_there_is_none():
    assert moments_of({"model/a": torch.ones(2)}, ["a", "b.c"]) == [{}, {}]


def test_a_parameter_that_never_had_a_gradient_has_none():
    assert moments_of(STATE | {"optim/d/none": torch.empty(0)}, ["a", "d"])[1] == {}


@pytest.mark.parametrize("lost", [["optim/b.c/exp_avg"], ["optim/b.c/exp_avg", "optim/b.c/step"]])
def test_state_that_others_have_must_be_there(lost):
    state = {name: value for name, value in STATE.items() if name not in lost}
    with pytest.raises(UsageError, match=r"DPA804 .*exp_avg.* of parameter b.c"):
        moments_of(state, ["a", "b.c"])
