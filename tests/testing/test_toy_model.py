"""The toy policy as a model: a simulated step can be recomputed with it."""

import numpy as np
import pytest
import torch

from dataproto_audit.reference.logprobs import token_log_probs
from dataproto_audit.testing.bases import Healthy, healthy_configurations
from dataproto_audit.testing.bench import model_at, run_healthy
from dataproto_audit.testing.healthy import Options, boundaries
from dataproto_audit.testing.toy_model import ToyModel
from dataproto_audit.testing.toy_policy import ToyPolicy

RECOMPUTED = ("rollout_log_probs_recomputed", "old_log_probs_recomputed",
              "ref_log_prob_recomputed")  # fmt: skip


@pytest.mark.parametrize(
    "options", [Options(exact=True, step=3), Options(exact=True, multi_turn=True, response_width=9)]
)
def test_it_scores_as_the_policy_does(options: Options) -> None:
    batch = next(b.batch for b in boundaries(options)
                 if (b.stage, b.when) == ("old_log_prob", "after")).batch  # fmt: skip
    fields = (batch["input_ids"], batch["attention_mask"], batch["position_ids"])
    width = batch["responses"].shape[1]
    log_probs, entropy = token_log_probs(model_at(options, options.step), *fields, width)
    on = batch["attention_mask"][:, -width:] != 0
    assert torch.allclose(log_probs[on].float(), batch["old_log_probs"][on], atol=1e-5)
    assert torch.allclose(entropy[on].float(), batch["entropys"][on], atol=1e-5)


def test_a_policy_at_a_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature 0\.5"):
        ToyModel(ToyPolicy(temperature=0.5))


def test_steps_are_recomputed_where_it_is_told() -> None:
    options = Options(exact=True, step_drift=0.0)
    told = run_healthy([Healthy("a", options, 1, recomputed=True)])
    assert all(told.executed[name] == 3 for name in RECOMPUTED)
    assert told.alarms == []
    assert not any(run_healthy([Healthy("a", options, 1)]).executed[name] for name in RECOMPUTED)


def test_published_gaps_are_as_wide_as_published() -> None:
    """Means of 0.010 to 0.018 nats; token_mult_prob_error between 1.01 and 1.05."""
    published = [one for one in healthy_configurations() if "published gap" in one.name]
    assert len(published) >= 8
    for one in published:
        b = next(b.batch.batch for b in boundaries(one.options)
                 if (b.stage, b.when) == ("old_log_prob", "after"))  # fmt: skip
        on = (b["response_mask"] != 0).numpy()
        gap = (b["old_log_probs"].double() - b["rollout_log_probs"].double()).abs().numpy()[on]
        assert 0.005 < gap.mean() < 0.03, one.name
        assert 1.005 < np.exp(gap).mean() < 1.06, one.name
