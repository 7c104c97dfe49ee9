"""A KL in the rewards that was computed in bfloat16, as verl's workers hand it on."""

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.replay.recompute_values import kl_reward

BETA = 0.001


def rewards(kind: str) -> dict[str, torch.Tensor]:
    """Scores at the end, and rewards less a KL whose every step is rounded."""
    made = torch.Generator().manual_seed(3)
    old = (-3 * torch.rand(4, 12, generator=made)).bfloat16()
    ref = (old.float() + 0.1 * torch.randn(4, 12, generator=made)).bfloat16()
    scores = torch.zeros(4, 12)
    scores[:, -1] = torch.rand(4, generator=made)
    distance = old - ref
    kl = distance if kind == "k1" else torch.exp(-distance) - 1 + distance
    return {
        "old_log_probs": old, "ref_log_prob": ref, "response_mask": torch.ones(4, 12).long(),
        "token_level_scores": scores, "token_level_rewards": scores - BETA * kl.float(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_its_rounding_is_no_fault(kind: str) -> None:
    fields = rewards(kind)
    found = kl_reward(BatchView.of({"batch": fields, "non_tensor_batch": {}, "meta_info": {}}))
    if found is None:  # k3 is lost in its rounding where the policies are so near
        assert kind == "k3"
        return
    expected, looked, bound, told = found
    assert told["estimator"] == kind
    gap = np.abs(expected - fields["token_level_rewards"].numpy())
    assert (gap <= bound)[looked].all()


def test_a_row_with_another_coefficient_is_one() -> None:
    fields = rewards("k1")
    taken = fields["token_level_scores"] - fields["token_level_rewards"]
    fields["token_level_rewards"][2] -= taken[2]
    found = kl_reward(BatchView.of({"batch": fields, "non_tensor_batch": {}, "meta_info": {}}))
    assert found is not None
    expected, looked, bound, _ = found
    wrong = np.abs(expected - fields["token_level_rewards"].numpy()) > bound
    assert set(np.flatnonzero((wrong & looked).any(1))) == {2}
