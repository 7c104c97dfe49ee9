"""Losses of other policy objectives than PPO's, recomputed from what workers tell."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dataproto_audit.integrations.verl_workers_engine import response_lengths, responses_of
from dataproto_audit.reference.losses import policy_loss
from tests.integrations import _workers
from tests.integrations._workers import stage_of

BY_ROWS = "seq-mean-token-mean"
ROWS = 4
"""Of a mini-batch of the one rank."""


def loss_of_rows(kind: str, *, local: bool = False) -> Any:
    """What verl's workers compute for these objectives, whatever is configured; ``local``: divided
    by the rows of the micro-batch, as ``geo_mean`` is."""

    def loss(out: Any, micro: Any) -> Any:
        widths = response_lengths(micro)
        values = responses_of(out["log_probs"], widths)
        log_probs = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).requires_grad_()
        width = log_probs.shape[1]
        fields = (micro[name][:, :width] for name in ("old_log_probs", "advantages"))
        terms = policy_loss(
            log_probs, *fields, micro["response_mask"][:, :width], clip_ratio=0.2,
            loss_agg_mode=BY_ROWS, loss_mode=kind, normaliser=len(micro) if local else ROWS,
        )  # fmt: skip
        return terms["total"]

    return loss


@pytest.mark.parametrize("kind", ["gspo", "sapo", "geo_mean"])
@pytest.mark.parametrize("mode", [BY_ROWS, "token-mean"])
def test_an_aggregation_that_is_not_the_configured_one_is_found(
    kind: str, mode: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workers, "engine_loss", loss_of_rows(kind))
    monkeypatch.setattr(_workers, "SETTINGS", replace(_workers.SETTINGS, loss_agg_mode=mode))
    actor = {"policy_loss": {"loss_mode": kind}, "loss_agg_mode": mode,
             "tau_pos": 1.0, "tau_neg": 1.05}  # fmt: skip
    told = stage_of("engine-fsdp", "update_actor", tmp_path, monkeypatch, ranks=1, actor=actor)
    assert {entry["loss_mode"] for entry in told.evidence["losses"]} == {kind}
    if mode == BY_ROWS:
        assert told.outcomes["DPA502"].kind == "passed"
        return
    assert set(told.findings) == {"DPA502"}
    finding = told.findings["DPA502"]
    assert finding.evidence["explained by"] == f"aggregated as {BY_ROWS}"
    assert finding.causes[0] == "wrong_normaliser"


def test_means_of_micro_batches_that_are_added_are_found(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``geo_mean`` on engine workers, also with the one aggregation that it computes."""
    kind = "geo_mean"
    monkeypatch.setattr(_workers, "engine_loss", loss_of_rows(kind, local=True))
    monkeypatch.setattr(_workers, "SETTINGS", replace(_workers.SETTINGS, loss_agg_mode=BY_ROWS))
    actor = {"policy_loss": {"loss_mode": kind}, "loss_agg_mode": BY_ROWS}
    told = stage_of("engine-fsdp", "update_actor", tmp_path, monkeypatch, ranks=1, actor=actor)
    assert set(told.findings) == {"DPA502"}
    assert told.findings["DPA502"].evidence["factor"] == pytest.approx(2)
    assert told.findings["DPA502"].causes[0] in ("loss_depends_on_split", "wrong_normaliser")
