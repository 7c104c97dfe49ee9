"""Names that mean nothing: aliases that miss, batches of other things."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataproto_audit.checker import check
from dataproto_audit.codes import UsageError
from dataproto_audit.policy import Alias, Policy
from dataproto_audit.testing.recipes import cook


def renamed() -> dict[str, Any]:
    """A batch whose log-probs bear a name of its own."""
    batch = cook("T", [])
    batch["batch"]["logprobs"] = batch["batch"].pop("old_log_probs")
    return batch


def test_an_alias_that_is_nearly_a_name_of_ours_is_a_slip() -> None:
    policy = Policy(aliases={"old_log_prbs": Alias("logprobs")})
    with pytest.raises(UsageError, match=r"DPA851 .*old_log_prbs.*Write aliases.old_log_probs"):
        check(renamed(), policy=policy)


def test_an_alias_may_name_a_field_of_ones_own() -> None:
    policy = Policy(aliases={"judge": Alias("logprobs")})
    [outcome] = [o for o in check(renamed(), policy=policy).outcomes if "undeclared" in o.check]
    assert "judge" in outcome.reason


def test_an_alias_without_its_source_is_told() -> None:
    right = Policy(aliases={"old_log_probs": Alias("logprobs")})
    assert not [o for o in check(renamed(), policy=right).outcomes if "alias" in o.check]
    wrong = Policy(aliases={"old_log_probs": Alias("logprob")})
    [outcome] = [o for o in check(renamed(), policy=wrong).outcomes if "alias" in o.check]
    assert outcome.check == "aliases.old_log_probs"
    assert (outcome.kind, "no field logprob:" in outcome.reason) == ("not_checkable", True)


def test_batches_of_a_history_are_renamed_too() -> None:
    policy = Policy(aliases={"old_log_probs": Alias("logprobs")})
    report = check(renamed(), history=[renamed()], policy=policy)
    told = [o for o in report.outcomes if o.check == "old_log_probs_finite"]
    assert [o.kind for o in told] == ["passed", "passed"]


@pytest.mark.parametrize("batch", [{"a": [1]}, {"batch": {"x": torch.ones(2, 3)}}])
def test_a_batch_of_unknown_fields_is_not_ok(batch: dict[str, Any]) -> None:
    report = check(batch)
    [outcome] = report.outcomes
    assert (outcome.code, outcome.kind, outcome.check) == (
        "DPA101",
        "not_checkable",
        "fields.known",
    )
    assert outcome.reason.endswith(("only a", "only x"))
    assert str(report).startswith("nothing checked")


@pytest.mark.parametrize("batch", [{}, {"meta_info": {"n": 3}}])
def test_a_batch_without_a_field_does_not_read_ok(batch: dict[str, Any]) -> None:
    report = check(batch)
    assert report.ok
    assert str(report).startswith("nothing checked: 0 passed")


def test_a_field_with_too_few_axes_is_found_though_its_width_is_unknown() -> None:
    [finding] = check({"responses": torch.tensor([1.0, 2.0])}).findings
    assert (finding.code, finding.field) == ("DPA103", "responses")
