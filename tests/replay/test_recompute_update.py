"""The loss of each mini-batch against its recomputation, as far as it can be computed."""

import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.reference.losses import policy_loss
from dataproto_audit.replay.recompute_update import losses

SETTINGS = Settings(loss_agg_mode="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2)


def tensors(mask=torch.long):
    torch.manual_seed(1)
    names = ("update_log_probs", "old_log_probs", "advantages")
    made = {name: torch.randn(4, 6) for name in names}
    made["response_mask"] = torch.ones(4, 6, dtype=mask)
    return {**made, "mini_batch": torch.zeros(4, dtype=torch.long)}


def view(made):
    return BatchView.of({"batch": made, "non_tensor_batch": {}, "meta_info": {}})


def compared(made, told):
    return list(losses(view(made), {"losses": told}, SETTINGS))


def test_a_mask_of_floats_is_said_and_nothing_is_compared():
    [(name, recorded, _, _, missing)] = compared(tensors(torch.float32), [{"total": 1.0}])
    assert (name, len(recorded), missing) == ("loss", 0, "loss: response_mask is float32")


@pytest.mark.parametrize(
    "mode",
    [{}, {"loss_mode": "gspo"}, {"loss_mode": "sapo", "gate_temperatures": (2.0, 3.0)}],
)
def test_the_policy_loss_is_the_one_that_was_told(mode):
    made = tensors()
    names = ("update_log_probs", "old_log_probs", "advantages", "response_mask")
    terms = policy_loss(
        *(made[name] for name in names), clip_ratio_low=0.2, clip_ratio_high=0.2,
        clip_ratio_c=None, **mode,
    )  # fmt: skip
    told = {**mode, "total": float(terms["total"])}
    [(name, recorded, expected, bound, missing)] = compared(made, [told])
    assert (name, missing) == ("total", "")
    assert abs(recorded - expected) <= bound
    [(_, recorded, expected, bound, _)] = compared(made, [{**told, "total": told["total"] + 0.1}])
    assert abs(recorded - expected) > bound


def test_an_unknown_policy_loss_is_said():
    told = [{"loss_mode": "cispo", "total": 1.0}]
    [(name, _, _, _, missing)] = compared(tensors(), told)
    assert (name, missing) == ("loss", "loss: no recomputation of the loss cispo")


RANKS = [{"rank": 0, "rows": 4, "indices": [[2, 0], [3, 1]]}]
OF_PARTS = "loss: not recorded: micro-batches that make up each mini-batch (mini-batch 0)"


def ragged():
    made = tensors()
    made["response_mask"] = (torch.arange(6) <= torch.arange(4)[:, None]).long()
    return made


def loss(made, rows, **more):
    names = ("update_log_probs", "old_log_probs", "advantages", "response_mask")
    return policy_loss(
        *(made[name][rows] for name in names), clip_ratio_low=0.2, clip_ratio_high=0.2,
        clip_ratio_c=None, **more,
    )  # fmt: skip


def test_a_mean_over_micro_batches_is_recomputed_as_one():
    made = ragged()
    total = float(sum(loss(made, micro)["total"] for micro in RANKS[0]["indices"]) / 2)
    assert abs(total - float(loss(made, [0, 1, 2, 3])["total"])) > 0.01
    told = {"losses": [{"split": "rows", "total": total}], "ranks": RANKS}
    [(_, recorded, expected, bound, _)] = losses(view(made), told, SETTINGS)
    assert abs(recorded - expected) <= bound
    told["losses"][0]["total"] += 0.01
    [(_, recorded, expected, bound, _)] = losses(view(made), told, SETTINGS)
    assert abs(recorded - expected) > bound


@pytest.mark.parametrize("ranks", [None, [], [{"rank": 0, "rows": 4, "indices": [[2, 0]]}]])
def test_a_mean_over_micro_batches_that_nobody_recorded_is_said(ranks):
    made = ragged()
    first = float(loss(made, [0, 1])["total"])
    made["mini_batch"] = torch.tensor([0, 0, 1, 1])
    told = [{"split": "rows", "total": 1.0}, {"total": float(loss(made, [2, 3])["total"])}]
    [unknown, (name, recorded, expected, bound, _)] = losses(
        view(made), {"losses": told, "ranks": ranks}, SETTINGS
    )
    assert (unknown[0], unknown[4]) == ("loss", OF_PARTS)
    assert (name, len(recorded)) == ("total", 1)
    assert first != recorded
    assert abs(recorded - expected) <= bound


def test_new_log_probs_for_old_ones_and_a_rough_number_are_recomputed():
    made = tensors()
    same = {**made, "old_log_probs": made["update_log_probs"]}
    total = float(loss(same, [0, 1, 2, 3])["total"])
    for told, fits in (
        ({"old": "new", "total": total}, True),
        ({"old": "new", "total": total + 0.01}, False),
        ({"old": "new", "total": total + 0.01, "eps": 2.0**-6}, True),
        ({"old": "new", "total": total + 1.0, "eps": 2.0**-6}, False),
        ({"total": total}, False),
    ):
        [(_, recorded, expected, bound, _)] = compared(made, [told])
        assert bool(abs(recorded - expected) <= bound) is fits, told
