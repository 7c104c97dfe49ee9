"""The loss of a mini-batch: one rule for shrinking and for recomputing."""

from dataclasses import replace

import pytest
import torch

from dataproto_audit.probes import Settings
from dataproto_audit.reference.losses import policy_loss
from dataproto_audit.replay.update_evidence import cut_losses
from dataproto_audit.replay.update_terms import fields_used, loss_terms, unreadable, unusable

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


def test_a_mask_of_floats_leaves_the_loss_as_it_was_told():
    floats = fields(response_mask=torch.ones(4, 3))
    assert unusable(floats, SETTINGS) == "response_mask is float32"
    part = {name: tensor[:2] for name, tensor in floats.items()}
    assert cut_losses([{"pg_loss": 7.0}], floats, part, SETTINGS) == [{"pg_loss": 7.0}]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("advantages", torch.bool), ("old_log_probs", torch.complex64),
     ("response_mask", torch.complex64)],
)  # fmt: skip
def test_fields_of_another_kind_are_said(name, dtype):
    made = fields(**{name: torch.ones(4, 3, dtype=dtype)})
    assert unusable(made, SETTINGS) == f"{name} is {str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_masks_of_all_kinds_and_whole_numbers_are_taken(dtype):
    whole = torch.arange(12).reshape(4, 3)
    made = fields(response_mask=torch.ones(4, 3, dtype=dtype), advantages=whole)
    assert unusable(made, SETTINGS) == ""
    assert loss_terms(made, 0, SETTINGS)["normaliser"] == 12.0


MODES = [
    {"loss_mode": "gspo"}, {"loss_mode": "sapo"},
    {"loss_mode": "sapo", "gate_temperatures": [2.0, 3.0]}, {"loss_mode": "vanilla"},
]  # fmt: skip


def directly(made, **how):
    """Policy loss and normaliser from the reference itself, with PPO's settings of the test."""
    terms = policy_loss(
        made["update_log_probs"], made["old_log_probs"], made["advantages"],
        made["response_mask"], clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=None, **how,
    )  # fmt: skip
    return {name: float(terms[name]) for name in ("pg_loss", "total", "normaliser")}


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_any_mode_is_carried_as_it_is_recomputed(mode):
    before = fields(4, 6)
    after = {name: tensor[[0, 2]] for name, tensor in before.items()}
    how = {name: tuple(v) if isinstance(v, list) else v for name, v in mode.items()}
    told = {**mode, **directly(before, **how)}
    [cut] = cut_losses([told], before, after, SETTINGS)
    want = directly(after, **how)
    assert {name: cut[name] for name in want} == pytest.approx(want, rel=1e-5)
    assert {name: cut[name] for name in mode} == mode
    if how != {"loss_mode": "vanilla"}:
        assert want["pg_loss"] != pytest.approx(directly(after)["pg_loss"], rel=1e-2)
    [wrong] = cut_losses([{**told, "total": 2 * told["total"]}], before, after, SETTINGS)
    assert wrong["total"] == pytest.approx(2 * want["total"], rel=1e-5)


def test_of_an_unknown_policy_loss_only_what_does_not_depend_on_it_is_carried():
    on = replace(SETTINGS, use_kl_loss=True, kl_loss_coef=0.5)
    before = fields(ref_log_prob=torch.zeros(4, 3))
    after = {name: tensor[:2] for name, tensor in before.items()}
    told = {"loss_mode": "cispo", **loss_terms(before, 0, on)}
    assert unreadable(told) == "no policy loss is called cispo"
    [cut] = cut_losses([told], before, after, on)
    want = loss_terms(after, 0, on)
    assert cut == {"loss_mode": "cispo", "entropy_loss": 0.0,
                   "kl_loss": pytest.approx(want["kl_loss"]), "normaliser": 6.0}  # fmt: skip
    for gates in ([1.0], [0.0, 1.0], "ab", 2.0):
        assert "gate_temperatures" in unreadable({"loss_mode": "sapo", "gate_temperatures": gates})


def test_new_log_probs_that_stood_in_for_old_ones_do_so_after_a_cut():
    before = fields()
    after = {name: tensor[:2] for name, tensor in before.items()}
    told = directly({**before, "old_log_probs": before["update_log_probs"]})
    [cut] = cut_losses([{**told, "old": "new"}], before, after, SETTINGS)
    assert cut["total"] == pytest.approx(-float(after["advantages"].mean()), rel=1e-5)


def test_rounding_of_a_loss_near_zero_does_not_grow_with_a_cut():
    """Advantages of a group add up to 0, so that the loss of all rows is rounding alone."""
    before = fields(2, 3, advantages=torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]))
    before["update_log_probs"] = before["old_log_probs"] = torch.full((2, 3), -1.0)
    before["advantages"][0, 0] += 1e-4
    after = {name: tensor[:1] for name, tensor in before.items()}
    [cut] = cut_losses([{"total": 1e-3, "eps": 2e-3}], before, after, SETTINGS)
    assert cut["total"] == pytest.approx(-1.0, rel=1e-3)
