"""The step counter of an optimizer that keeps it in its groups, as FusedAdam does on GPUs."""

import torch

from dataproto_audit.trainer.backends.megatron import shims

with shims.importing():
    from dataproto_audit.trainer.backends.megatron.optimizer import group_step, steps_to_groups


class Fused(torch.optim.Optimizer):
    """Counts steps as Transformer Engine's FusedAdam does, and moves by a factor of the count."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("exp_avg", torch.zeros_like(param)).add_(param.grad)
                param.data -= state["exp_avg"] / group["step"]


def made():
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    for param in params:
        param.grad = torch.ones_like(param)
    return params, Fused([{"params": params[:1]}, {"params": params[1:]}])


def test_the_step_of_a_group_is_saved_and_taken_back():
    params, optimizer = made()
    assert group_step(optimizer, params[0]) is None
    for _ in range(3):
        optimizer.step()
    steps = [group_step(optimizer, param) for param in params]
    assert steps == [3.0, 3.0]
    fresh_params, fresh = made()
    for param, kept in zip(fresh_params, params, strict=True):
        param.data.copy_(kept.data)
    state = {
        place: {"exp_avg": optimizer.state[param]["exp_avg"].clone(), "step": torch.tensor(3.0)}
        for place, param in enumerate(params)
    }
    groups = fresh.state_dict()["param_groups"]
    steps_to_groups(groups, state)
    fresh.load_state_dict({"state": state, "param_groups": groups})
    optimizer.step()
    fresh.step()
    assert all(torch.equal(a, b) for a, b in zip(params, fresh_params, strict=True))
    assert all("step" not in kept for kept in fresh.state.values())


def test_adam_s_own_counters_and_groups_without_any_are_left():
    param = torch.nn.Parameter(torch.ones(2))
    assert group_step(torch.optim.AdamW([param]), param) is None
    groups = [{"params": [0]}]
    steps_to_groups(groups, {0: {"exp_avg": torch.zeros(2)}})
    assert groups == [{"params": [0]}]
