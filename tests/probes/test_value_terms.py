"""The critic's loss of a mini-batch: one rule for the checks, for replay and for shrink."""

import numpy as np
import pytest
import torch

from dataproto_audit.probes.value_terms import (
    FIELDS,
    arguments_of,
    how_of,
    terms_of,
    unreadable,
)

TOLD = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean"}
BATCH = {
    "update_values": torch.tensor([[1.0, 2.0], [0.0, 9.0], [5.0, 5.0]]),
    "values": torch.tensor([[1.0, 0.0], [0.0, 9.0], [5.0, 5.0]]),
    "returns": torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0]]),
    "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]),
}


def test_the_loss_by_hand():
    given = arguments_of(BATCH, torch.tensor([0, 1]))
    assert set(given) == set(FIELDS)
    # squares 1, 4 (the clipped value 0.5 is nearer, so the other counts), 4; halved, over 3 tokens
    assert terms_of(given, how_of(TOLD)) == {"vf_loss": pytest.approx(1.5), "normaliser": 3.0}


def test_rows_and_aggregation_count():
    given = arguments_of(BATCH, torch.tensor([1, 2]))
    how = how_of({**TOLD, "loss_agg_mode": "seq-mean-token-sum"})
    assert terms_of(given, how) == {"vf_loss": pytest.approx(1.0), "normaliser": 2.0}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (TOLD, ""),
        ({}, "not recorded: losses.cliprange_value, losses.loss_agg_mode"),
        ({**TOLD, "loss_agg_mode": "mean"}, "unknown aggregation mean"),
        ({**TOLD, "loss_agg_mode": np.ones(2)}, "unknown aggregation [1. 1.]"),
        ({**TOLD, "cliprange_value": "wide"}, "losses.cliprange_value is no number"),
        ({**TOLD, "cliprange_value": np.float32(0.5)}, ""),
        ({**TOLD, "cliprange_value": torch.tensor(0.5)}, ""),
        ({**TOLD, "cliprange_value": float("nan")}, "cliprange_value is nan"),
        ({**TOLD, "cliprange_value": True}, "cliprange_value is True"),
    ],
)
def test_what_is_not_computed_is_said(told, said):
    assert unreadable(told) == said
