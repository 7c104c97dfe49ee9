"""What of an optimizer goes into a checkpoint; its steps are tested with the workers."""

from types import SimpleNamespace

import pytest
import torch

from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.backends.moments import STATELESS, moments_of

with shims.importing():
    from dataproto_audit.trainer.backends.megatron.optimizer import Optimizer, Owned


@pytest.mark.parametrize("stepped", [False, True])
def test_a_parameter_that_was_taken_over_without_state_is_marked(stepped):
    a, b = torch.zeros(2), torch.zeros(3)
    kept = {a: {"exp_avg": torch.ones(2)}} if stepped else {}
    member = SimpleNamespace(optimizer=SimpleNamespace(state=kept, param_groups=[]))
    optimizer = Optimizer.__new__(Optimizer)
    optimizer.separate = False
    optimizer.owned = lambda: iter([Owned("0/a", member, a, None), Owned("0/b", member, b, None)])
    state = optimizer.state()
    assert (f"optim/0/b/{STATELESS}" in state) is stepped
    assert moments_of(state, ["0/a", "0/b"])[1] == {}
