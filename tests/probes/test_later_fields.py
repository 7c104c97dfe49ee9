"""Exemptions that rest on a field which a later stage writes: told in a saved batch, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import check
from dataproto_audit.findings import Report

ROWS, WIDTH, PROMPT = 8, 6, 2
TOLD = {"multi_turn": False, "rejection": False}


def coded(report: Report, code: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.severity, f.rows) for f in report.findings if f.code == code]


# -- rows that only fill the batch up, marked at dispatch ------------------------------------------


def padded(flags: Any = (False, False, True), name: str = "is_padding") -> dict[str, Any]:
    """Two rows of two tokens, and one that holds a stop token and is not trained."""
    attention = torch.ones(3, 4, dtype=torch.long)
    attention[2] = torch.tensor([0, 1, 1, 0])
    mask = torch.ones(3, 2, dtype=torch.long)
    mask[2] = 0
    ids = torch.ones(3, 2, dtype=torch.long)
    fields = {"prompts": ids, "responses": ids, "attention_mask": attention, "response_mask": mask}
    arrays = {"uid": np.array(["a", "a", "pad0"], object), name: np.array(flags)}
    return {"batch": fields, "non_tensor_batch": arrays}


@pytest.mark.parametrize("name", ["is_padding", "is_pad"])
def test_marked_padding_rows_need_no_trained_token(name: str) -> None:
    report = check(padded(name=name), config=TOLD)
    assert not [str(f) for f in report.findings if f.severity != "info"]
    [outcome] = [o for o in report.outcomes if o.check == "mask_complete"]
    assert outcome.kind == "passed"


@pytest.mark.parametrize("flags", [(False, False, False), (True, False, False)])
def test_rows_that_are_not_marked_do(flags: tuple[bool, ...]) -> None:
    assert coded(check(padded(flags), config=TOLD), "DPA208") == [("fail", (2,))]


def test_flags_of_another_kind_exempt_nothing() -> None:
    assert coded(check(padded(("no", "no", "yes")), config=TOLD), "DPA208") == [("fail", (2,))]


@pytest.mark.parametrize(("trained", "sizes"), [(False, "2 groups of 1"), (True, "")])
def test_a_marked_row_among_others_counts_where_it_is_trained(trained: bool, sizes: str) -> None:
    batch = padded((False, True, False))
    batch["non_tensor_batch"]["uid"] = np.array(["a", "a", "b"], object)
    batch["batch"]["response_mask"][1] = int(trained)
    found = [f for f in check(batch, config={"n": 2}).findings if f.code == "DPA401"]
    [finding] = found
    assert (2 in finding.rows, 0 in finding.rows) == (True, not trained)
    assert sizes in finding.actual


# -- rows that were rejected -----------------------------------------------------------------------


def rejected(row: int = 3, **more: Any) -> dict[str, Any]:
    """A batch with log-probs of both engines; all tokens of ``row`` are off the mask."""
    random = torch.Generator().manual_seed(3)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.long)
    attention = torch.ones(ROWS, PROMPT + WIDTH, dtype=torch.long)
    attention[:, -1] = mask[:, -1] = 0
    rollout = -(torch.rand(ROWS, WIDTH, generator=random) + 0.1) * mask
    old = rollout + 0.005 * torch.randn(ROWS, WIDTH, generator=random)
    before = mask.clone()
    mask[row] = 0
    fields = {
        "responses": torch.ones(ROWS, WIDTH, dtype=torch.long), "attention_mask": attention,
        "response_mask": mask, "rollout_log_probs": rollout, "old_log_probs": old,
    }  # fmt: skip
    made = {name: value(before, mask) if callable(value) else value for name, value in more.items()}
    return {"batch": fields | made}


def everywhere(before: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages as GAE leaves them: not 0 off the mask."""
    return torch.full(mask.shape, 0.5)


def masked(before: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return 0.5 * mask


def untouched(before: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask before rejection."""
    return before


def test_a_rejected_row_is_a_question_where_nobody_told_of_rejection() -> None:
    assert coded(check(rejected(advantages=masked)), "DPA208") == [("warn", (3,))]
    assert coded(check(rejected()), "DPA208") == [("warn", (3,))]


@pytest.mark.parametrize("advantages", [everywhere, masked])
def test_a_loss_mask_tells_of_rejection(advantages: Any) -> None:
    batch = rejected(advantages=advantages, loss_mask=untouched)
    assert coded(check(batch), "DPA208") == []


def test_a_loss_mask_that_is_cut_too_tells_nothing() -> None:
    batch = rejected(advantages=masked, loss_mask=lambda before, mask: mask)
    assert coded(check(batch), "DPA208") == [("warn", (3,))]


def test_a_loss_mask_says_nothing_where_rejection_is_off() -> None:
    batch = rejected(advantages=masked, loss_mask=untouched)
    assert coded(check(batch, config={"rejection": False}), "DPA208") == [("fail", (3,))]


@pytest.mark.parametrize(
    ("config", "more", "severity"),
    [
        ({"adv_estimator": "grpo"}, {}, "fail"),
        ({}, {}, "fail"),
        ({"adv_estimator": "gae"}, {}, "warn"),
        ({"adv_estimator": "remax"}, {}, "warn"),
        ({}, {"values": everywhere}, "warn"),
        ({"adv_estimator": "grpo"}, {"values": everywhere}, "fail"),
    ],
)
def test_advantages_off_the_mask_prove_it_where_an_estimator_masks_them(
    config: dict[str, Any], more: dict[str, Any], severity: str
) -> None:
    report = check(rejected(advantages=everywhere, **more), config=config)
    assert coded(report, "DPA208") == [(severity, (3,))]


def test_importance_weights_of_a_later_stage_leave_it_open() -> None:
    batch = rejected(advantages=everywhere, rollout_is_weights=untouched)
    batch["batch"]["rollout_is_weights"] = batch["batch"]["rollout_is_weights"].float()
    report = check(batch)
    assert coded(report, "DPA208") == []
    [outcome] = [o for o in report.outcomes if o.check == "sampled_tokens_trained"]
    assert outcome.reason == "importance weights are there: tell settings.rejection"
