"""The loss of a mini-batch: one rule for shrinking and for recomputing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto_audit.probes import Settings
from dataproto_audit.probes.loss_terms import unreadable
from dataproto_audit.reference.losses import policy_loss
from dataproto_audit.replay.update_evidence import cut_losses, cut_ranks, cut_value_losses
from dataproto_audit.replay.update_terms import fields_used, loss_terms, unusable, value_terms

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
    assert unreadable(told) == "no recomputation of the loss cispo"
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


RANKS = [
    {"rank": 0, "rows": 4, "indices": [[2, 0], [3], [1]]},
    {"rank": 1, "rows": 4, "indices": [[0, 1, 2], [3]]},
]  # fmt: skip


def split_apart(made, ranks, **how):
    """The mean of the ranks' means of their micro-batches, weighted by rows; by hand."""
    total, start = 0.0, 0
    for rank in ranks:
        for micro in rank["indices"]:
            part = {name: tensor[[start + at for at in micro]] for name, tensor in made.items()}
            total += directly(part, **how)["total"] * len(micro) / rank["rows"] / len(ranks)
        start += rank["rows"]
    return total


def ragged(rows=8, width=5):
    """Rows of 1 to ``width`` tokens, so that a mean over micro-batches is not that over all."""
    made = fields(rows, width)
    made["response_mask"] = (torch.arange(width) <= torch.arange(rows)[:, None] % width).long()
    return made


@pytest.mark.parametrize("more", [{}, {"old": "new"}, {"eps": 2.0**-8}, {"loss_mode": "gspo"}])
def test_a_mean_over_micro_batches_is_cut_as_one(more):
    before, kept = ragged(), np.array([0, 1, 2, 4, 5])
    after = {name: tensor[torch.from_numpy(kept)] for name, tensor in before.items()}
    used = [{**made, "old_log_probs": made["update_log_probs"]} if more.get("old") == "new"
            else made for made in (before, after)]  # fmt: skip
    attended = [made["response_mask"].sum(1).numpy() for made in (before, after)]
    ranks = cut_ranks(RANKS, kept, *attended)
    how = {name: more[name] for name in ("loss_mode",) if name in more}
    told = {"split": "rows", "total": split_apart(used[0], RANKS, **how), **more}
    assert told["total"] != pytest.approx(directly(used[0], **how)["total"], rel=1e-2)
    [cut] = cut_losses([told], before, after, SETTINGS, ranks=(RANKS, ranks))
    assert cut["total"] == pytest.approx(split_apart(used[1], ranks, **how), rel=1e-5)
    [wrong] = cut_losses(
        [{**told, "total": 3 * told["total"]}], before, after, SETTINGS, ranks=(RANKS, ranks)
    )
    assert wrong["total"] == pytest.approx(3 * cut["total"], rel=1e-5)


def test_a_mean_over_micro_batches_that_nobody_recorded_stays_as_it_was_told():
    before = ragged()
    after = {name: tensor[:3] for name, tensor in before.items()}
    told = {"split": "rows", "total": 7.0, "normaliser": float(before["response_mask"].sum())}
    [cut] = cut_losses([told], before, after, SETTINGS)
    assert cut == {**told, "normaliser": float(after["response_mask"].sum())}


def test_rounding_of_a_loss_near_zero_does_not_grow_with_a_cut():
    """Advantages of a group add up to 0, so that the loss of all rows is rounding alone."""
    before = fields(2, 3, advantages=torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]))
    before["update_log_probs"] = before["old_log_probs"] = torch.full((2, 3), -1.0)
    before["advantages"][0, 0] += 1e-4
    after = {name: tensor[:1] for name, tensor in before.items()}
    [cut] = cut_losses([{"total": 1e-3, "eps": 2e-3}], before, after, SETTINGS)
    assert cut["total"] == pytest.approx(-1.0, rel=1e-3)


def critic(rows=6, width=4):
    torch.manual_seed(3)
    made = {name: torch.randn(rows, width) for name in ("update_values", "values", "returns")}
    made["response_mask"] = (torch.arange(width) <= torch.arange(rows)[:, None] % width).long()
    return {**made, "value_mini_batch": torch.arange(rows) % 2}


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_losses_of_a_critic_are_cut_with_it(factor):
    before = critic()
    after = {name: tensor[[0, 1, 4, 5]] for name, tensor in before.items()}
    told = [{"cliprange_value": 0.5, "loss_agg_mode": "token-mean"} for _ in range(2)]
    for number, entry in enumerate(told):
        entry |= value_terms(before, number, entry)
        entry["vf_loss"] *= factor
    for number, entry in enumerate(cut_value_losses(told, before, after)):
        want = value_terms(after, number, entry)
        assert entry["normaliser"] == want["normaliser"] != told[number]["normaliser"]
        assert entry["vf_loss"] == pytest.approx(factor * want["vf_loss"])


@pytest.mark.parametrize(
    "change",
    [{"values": torch.zeros(6, 3)}, {"value_mini_batch": torch.full((6,), 7)},
     {"response_mask": torch.ones(6, 4)}],
)  # fmt: skip
def test_losses_of_a_critic_that_cannot_be_computed_stay(change):
    told = [{"cliprange_value": 0.5, "loss_agg_mode": "token-mean", "vf_loss": 3.0}]
    assert cut_value_losses(told, {**critic(), **change}, critic()) == told
    assert value_terms(critic(), 0, {**told[0], "loss_agg_mode": "x"}) == {}
