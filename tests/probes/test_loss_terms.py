"""What a loss is recomputed from, and how a mini-batch was split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.probes.context import Settings
from dataproto_audit.probes.loss_terms import (
    ABSOLUTE,
    ENTROPY,
    REF,
    RELATIVE,
    WEIGHTS,
    Undecided,
    arguments_of,
    bound_of,
    how_of,
    parts_of,
    picked,
    terms_of,
    unreadable,
)

FIXED = {
    "log_probs": "update_log_probs", "old_log_probs": "old_log_probs", "advantages": "advantages",
    "response_mask": "response_mask",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "there", "told", "more"),
    [
        ({}, (REF, ENTROPY), {}, {}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, (), {}, {"ref_log_prob": REF}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, (), {}, {}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, (REF,), {}, {"ref_log_prob": REF}),
        ({"use_kl_loss": False, "kl_loss_coef": 0.1}, (REF,), {}, {}),
        ({"entropy_coeff": 0.01}, (), {}, {"entropy": ENTROPY}),
        ({"entropy_coeff": 0.0}, (ENTROPY,), {}, {}),
        ({}, (WEIGHTS,), {}, {"rollout_is_weights": WEIGHTS}),
        ({}, (), {"old": "new"}, {"old_log_probs": "update_log_probs"}),
        ({}, (), {"old": "old"}, {}),
    ],
)
def test_which_fields_a_loss_is_made_of(
    settings: Any, there: tuple[str, ...], told: Any, more: dict[str, str]
) -> None:
    found = arguments_of(lambda name: name in there, Settings(**settings), told)
    assert found == {**FIXED, **more}


def test_how_a_loss_is_made_by_default() -> None:
    how = how_of(Settings(), {})
    assert (how["kl_loss_coef"], how["kl_loss_type"], how["entropy_coeff"]) == (
        0.0, "low_var_kl", 0.0,
    )  # fmt: skip
    assert how["loss_agg_mode"] == "token-mean"
    assert "loss_mode" not in how
    assert "gate_temperatures" not in how
    told = how_of(
        Settings(use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k1", entropy_coeff=0.3,
                 loss_agg_mode="token-sum"),
        {"loss_mode": "vanilla", "gate_temperatures": [1, 2]},
    )  # fmt: skip
    assert (told["kl_loss_coef"], told["kl_loss_type"], told["entropy_coeff"]) == (0.2, "k1", 0.3)
    assert (told["loss_agg_mode"], told["loss_mode"]) == ("token-sum", "vanilla")
    assert told["gate_temperatures"] == (1.0, 2.0)
    assert how_of(Settings(use_kl_loss=False, kl_loss_coef=0.2), {})["kl_loss_coef"] == 0.0


@pytest.mark.parametrize("gates", [(1, 2), [0.5, 1e-3], None])
def test_gates_that_can_be_read(gates: Any) -> None:
    assert unreadable({"gate_temperatures": gates}) == ""


@pytest.mark.parametrize(
    "gates", [(0.0, 1.0), (1.0, -1.0), (float("inf"), 1.0), (1.0, float("nan")), ("1", 1.0),
              (1.0,), (1.0, 1.0, 1.0), 1.0, "ab"]
)  # fmt: skip
def test_gates_that_are_no_two_positive_numbers(gates: Any) -> None:
    assert (
        unreadable({"gate_temperatures": gates}) == "gate_temperatures are no two positive numbers"
    )


def test_a_loss_of_ones_own_is_not_read() -> None:
    assert unreadable({"loss_mode": "mine"}) == "no recomputation of the loss mine"
    assert unreadable({}) == unreadable({"loss_mode": "vanilla"}) == ""


RANKS = [
    {"rows": 3, "indices": [[0, 2], [1]], "mini_batches": [0, 1]},
    {"rows": 3, "indices": [[2, 0], [1]], "mini_batches": [0, 1]},
]


def listed(parts: Any) -> list[list[list[int]]]:
    return [[micro.tolist() for micro in rank] for rank in parts]


def test_micro_batches_by_rank_and_mini_batch() -> None:
    """Rows of a rank are numbered from 0; a mini-batch knows its own by their places."""
    assert listed(parts_of(RANKS, np.array([0, 2, 3, 5]), 0)) == [[[0, 1]], [[3, 2]]]
    assert listed(parts_of(RANKS, np.array([1, 4]), 1)) == [[[0]], [[1]]]
    assert listed(parts_of(RANKS, np.array([0, 2]), 0)) == [[[0, 1]], []]


def test_without_numbers_all_micro_batches_are_of_the_one() -> None:
    ranks = [{"rows": 2, "indices": [[1], [0]]}, {"rows": 1, "indices": [[0]]}]
    assert listed(parts_of(ranks, np.arange(3), 0)) == [[[1], [0]], [[2]]]


@pytest.mark.parametrize(
    "ranks", [(), None, "ranks", [3], [{"rows": 2}], [{"rows": 2, "indices": []}]]
)
def test_notes_that_do_not_say(ranks: Any) -> None:
    assert listed(parts_of(ranks or (), np.arange(2), 0)) == []


def fields(rows: int = 6, width: int = 3) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=random)
    mask = torch.arange(width)[None] < torch.tensor([3, 2, 1, 3, 1, 2])[:rows, None]
    return {
        "update_log_probs": old + 0.1 * torch.rand(rows, width, generator=random),
        "old_log_probs": old,
        "advantages": torch.rand(rows, width, generator=random) - 0.3,
        "response_mask": mask.long(),
    }


def loss(rows: Any, told: Any, parts: Any = ()) -> dict[str, float]:
    given = fields()
    made = terms_of(given.__getitem__, given.__contains__, np.asarray(rows), Settings(), told,
                    parts=parts)  # fmt: skip
    return {name: float(value) for name, value in dict(made).items()}


def test_a_loss_of_micro_batches_weighted_by_rows() -> None:
    """The mean over ranks of the means over their micro-batches, by rows."""
    parts = parts_of(
        [{"rows": 4, "indices": [[0, 1, 2], [3]]}, {"rows": 2, "indices": [[0], [1]]}],
        np.arange(6), 0,
    )  # fmt: skip
    own = [loss(rows, {})["pg_loss"] for rows in ([0, 1, 2], [3], [4], [5])]
    want = (own[0] * 3 / 4 + own[1] / 4) / 2 + (own[2] + own[3]) / 4
    split = loss(np.arange(6), {"split": "rows"}, parts)
    assert split["pg_loss"] == pytest.approx(want, rel=1e-12)
    whole = loss(np.arange(6), {})
    assert split["pg_loss"] != pytest.approx(whole["pg_loss"], rel=1e-3)
    assert split["normaliser"] == whole["normaliser"] == 12.0


@pytest.mark.parametrize("held", [[[0, 1]], [[0, 1, 2, 3, 4, 5, 5]], []])
def test_a_split_that_does_not_make_up_the_mini_batch(held: Any) -> None:
    parts = (tuple(np.asarray(micro, np.int64) for micro in held),)
    with pytest.raises(Undecided, match="micro-batches that make up each mini-batch"):
        loss(np.arange(6), {"split": "rows"}, parts)


def test_rows_are_picked_in_order() -> None:
    given = fields()
    found = picked(given.__getitem__, {"advantages": "advantages"}, torch.tensor([4, 1]))
    assert torch.equal(found["advantages"], given["advantages"][[4, 1]])


@pytest.mark.parametrize(
    ("exact", "largest", "tokens", "normaliser", "eps", "bound"),
    [
        (0.0, 0.5, 4, 4.0, 0.0, ABSOLUTE),
        (2.0, 0.5, 4, 4.0, 0.0, ABSOLUTE + 2 * RELATIVE),
        (-2.0, 3.0, 4, 4.0, 0.0, 3 * ABSOLUTE + 2 * RELATIVE),
        (0.0, 1.0, 4, 2.0, 0.0, 2 * ABSOLUTE),
        (0.0, 1.0, 4, 0.5, 0.0, 4 * ABSOLUTE),
        (0.0, 1.0, 4, 8.0, 0.0, ABSOLUTE),
        (1.0, 1.0, 4, 4.0, 1e-2, 2e-2),
    ],
)
def test_how_far_a_term_may_lie(
    exact: float, largest: float, tokens: int, normaliser: float, eps: float, bound: float
) -> None:
    advantages, mask = np.full((2, 4), 0.1), np.zeros((2, 4), bool)
    mask[0, :tokens] = True
    advantages[0, 0], advantages[1, 0] = -largest, 99.0  # what is not trained does not count
    assert bound_of(exact, advantages, mask, normaliser, eps=eps) == pytest.approx(bound)


@pytest.mark.parametrize(
    "notes",
    [
        [{"indices": [[0, 1], [2, 3]]}],
        [{"rows": 4, "indices": [0, 1]}],
        [{"rows": 4, "indices": [["a", 3]]}],
        [{"rows": "4", "indices": [[0, 1]]}],
        [{"rows": 4, "indices": 3}],
        "ranks",
    ],
)
def test_notes_of_another_form_say_nothing(notes: Any) -> None:
    assert parts_of(notes, np.arange(4), 0) == ()


@pytest.mark.parametrize(
    ("told", "why"),
    [({"split": "tokens"}, "split by tokens"), ({"eps": "x"}, "eps is no number")],
)
def test_what_an_entry_tells_in_other_words_is_not_computed(told: Any, why: str) -> None:
    assert why in unreadable(told)
    assert not unreadable({"split": "rows", "eps": 1e-3})
