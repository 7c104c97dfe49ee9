"""Metrics of a step: those of a critic, and of a KL in the rewards."""

import numpy as np
import pytest
import torch

from dataproto_audit.trainer.metrics import batch_metrics, kl_metrics


@pytest.fixture
def finished(ragged_batch):
    """A batch at the end of a step, without a critic; every row is a group of its own."""
    batch = ragged_batch(rows=8)
    batch.batch["token_level_scores"] = torch.zeros(batch.batch["responses"].shape)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(8)], dtype=object)
    return batch


def test_a_critic_is_told_by_its_values_returns_and_explained_variance(finished):
    random = torch.Generator().manual_seed(1)
    mask = finished.batch["response_mask"] != 0
    returns = torch.randn(mask.shape, generator=random)
    finished.batch["returns"], finished.batch["values"] = returns, returns * 0.5
    told = batch_metrics(finished)
    assert told["critic/values/mean"] == pytest.approx(float(returns[mask].mean()) / 2, abs=1e-6)
    assert told["critic/returns/max"] == float(returns[mask].max())
    assert told["critic/vf_explained_var"] == pytest.approx(0.75, abs=1e-6)
    finished.batch["returns"] = torch.ones(mask.shape)
    assert "critic/vf_explained_var" not in batch_metrics(finished)


def test_without_values_nothing_is_said_of_a_critic(finished):
    assert not {"critic/values/mean", "critic/vf_explained_var"} & set(batch_metrics(finished))


def test_the_kl_is_a_mean_over_rows_of_means_over_tokens():
    kl = torch.tensor([[0.2, 0.4], [0.6, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    told = kl_metrics(kl, mask, 0.05)
    assert told["actor/reward_kl_penalty"] == pytest.approx((0.3 + 0.6 + 0.0) / 3)
    assert told["actor/reward_kl_penalty_coeff"] == 0.05
