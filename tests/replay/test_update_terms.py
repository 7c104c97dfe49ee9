"""The loss of a mini-batch: one rule for shrinking and for recomputing."""

from dataclasses import replace

import pytest
import torch

from dataproto_audit.probes import Settings
from dataproto_audit.replay.update_evidence import cut_losses
from dataproto_audit.replay.update_terms import fields_used, loss_terms, unusable

SETTINGS = Settings(loss_agg_mode="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2)


def fields(rows=4, width=3, **more):
    torch.manual_seed(0)
    names = ("update_log_probs", "old_log_probs", "advantages")
    made = {name: torch.randn(rows, width) for name in names}
    made["response_mask"] = torch.ones(rows, width, dtype=torch.long)
    return {**made, "mini_batch": torch.zeros(rows, dtype=torch.long), **more}


def test_a_kl_coefficient_counts_only_with_the_loss_that_it_is_of():
    """With the KL in the reward, configurations still hold the coefficient of the loss."""
    off = replace(SETTINGS, use_kl_loss=False, kl_loss_coef=0.001)
    assert unusable(fields(), off) == ""
    before, after = fields(), {name: t[:2] for name, t in fields().items()}
    told = [loss_terms(before, 0, off)]
    [cut] = cut_losses(told, before, after, off)
    assert cut["pg_loss"] == pytest.approx(loss_terms(after, 0, off)["pg_loss"])
    assert cut["normaliser"] == 6.0


def test_what_keeps_the_loss_from_being_computed_is_said():
    on = replace(SETTINGS, use_kl_loss=True, kl_loss_coef=0.001)
    assert unusable(fields(), on) == "record ref_log_prob"
    assert "no KL estimator" in unusable(fields(), replace(on, kl_loss_type="x", kl_loss_coef=0.0))
    assert "no aggregation" in unusable(fields(), replace(SETTINGS, loss_agg_mode="x"))
    assert "clip_ratio_c" in unusable(fields(), replace(SETTINGS, clip_ratio_c=0.5))
    assert unusable(fields(advantages=torch.zeros(4, 2)), SETTINGS) == (
        "advantages has the shape [4, 2]")  # fmt: skip
    assert fields_used(fields().__contains__, replace(SETTINGS, entropy_coeff=0.1))[-1] == (
        "update_entropys")  # fmt: skip


def test_a_broken_field_leaves_the_loss_as_it_was_told():
    broken = fields(old_log_probs=torch.zeros(3, 3))
    assert cut_losses([{"pg_loss": 7.0}], broken, fields(2), SETTINGS) == [{"pg_loss": 7.0}]


def test_the_weight_of_the_kl_is_in_the_total():
    on = replace(SETTINGS, use_kl_loss=True, kl_loss_coef=0.5)
    terms = loss_terms(fields(ref_log_prob=torch.zeros(4, 3)), 0, on)
    assert terms["kl_loss"] != 0.0
    assert terms["total"] == pytest.approx(terms["pg_loss"] + 0.5 * terms["kl_loss"])
