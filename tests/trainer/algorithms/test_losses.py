import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.reference import losses as reference
from dataproto_audit.trainer.algorithms.losses import (
    AGGREGATION_MODES,
    Counts,
    policy_loss,
    token_weights,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


def ragged(seed: int, rows: int = 8, width: int = 6):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    new, old, advantages = (torch.randn(rows, width, generator=generator) for _ in range(3))
    return mask, new, old, advantages


def counts_of(mask: torch.Tensor) -> Counts:
    return Counts(int(mask.sum()), int(mask.any(-1).sum()), mask.shape[1])


def value(mask, new, old, advantages, *, mode, counts):
    loss = policy_loss(new, old, advantages, **CLIP).loss
    return (loss * token_weights(mask, mode=mode, counts=counts)).sum()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_equals_the_unsplit_reference(mode, seed):
    mask, new, old, advantages = ragged(seed)
    ours = value(mask, new, old, advantages, mode=mode, counts=counts_of(mask))
    expected = reference.policy_loss(
        new,
        old,
        advantages,
        mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        loss_agg_mode=mode,
    )
    assert float(ours) == pytest.approx(float(expected["total"]), abs=1e-6)
    assert counts_of(mask).normaliser(mode) == float(expected["normaliser"])


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_shares_of_any_split_add_up_to_the_whole(mode):
    mask, new, old, advantages = ragged(1)
    counts = counts_of(mask)
    whole = value(mask, new, old, advantages, mode=mode, counts=counts)
    parts = [[0], [1, 5, 6], [2, 3, 4, 7]]
    split = sum(
        value(mask[p], new[p], old[p], advantages[p], mode=mode, counts=counts) for p in parts
    )
    assert float(split) == pytest.approx(float(whole), abs=1e-6)


def test_cut_padding_columns_change_nothing_not_even_the_width_in_the_norm():
    mask, new, old, advantages = ragged(2)
    mask[:, 4:] = 0
    counts = counts_of(mask)
    for mode in AGGREGATION_MODES:
        whole = value(mask, new, old, advantages, mode=mode, counts=counts)
        cut = value(
            mask[:, :4], new[:, :4], old[:, :4], advantages[:, :4], mode=mode, counts=counts
        )
        assert float(cut) == pytest.approx(float(whole), abs=1e-6)


def test_clip_flags_and_kl_equal_the_reference_fractions():
    mask, new, old, advantages = ragged(5)
    mask = torch.ones_like(mask)
    terms = policy_loss(new, old, advantages, **CLIP)
    expected = reference.policy_loss(
        new, old, advantages, mask, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0
    )
    assert terms.clipped_lower.any()
    assert float(terms.clipped.float().mean()) == pytest.approx(float(expected["pg_clipfrac"]))
    assert float(terms.clipped_lower.float().mean()) == pytest.approx(
        float(expected["pg_clipfrac_lower"])
    )
    assert float(terms.kl.mean()) == pytest.approx(float(expected["ppo_kl"]), abs=1e-6)


def test_nothing_to_train_on_gives_a_zero_with_a_zero_gradient():
    mask, new, old, advantages = ragged(0)
    new.requires_grad_()
    loss = value(mask * 0, new, old, advantages, mode="token-mean", counts=Counts(0, 0, 6))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not new.grad.any()


def test_wrong_settings_are_refused():
    mask, new, old, advantages = ragged(0)
    with pytest.raises(UsageError, match=r"DPA851 .*token-avg"):
        token_weights(mask, mode="token-avg", counts=counts_of(mask))
    with pytest.raises(UsageError, match=r"DPA851 .*clip_ratio_c"):
        policy_loss(new, old, advantages, clip_low=0.2, clip_high=0.2, clip_c=1.0)
