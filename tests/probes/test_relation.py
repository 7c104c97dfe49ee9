"""What shared prefixes tell of two fields: a factor, an offset, other weights, or the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.relation import Relation, relation
from dataproto_audit.testing.healthy import Options, boundaries
from dataproto_audit.testing.toy_policy import ToyPolicy, prompt_hash

OPTIONS = Options(prompts=4, n=12, vocab=8, response_width=8)


def related(other: Callable[[Any, ToyPolicy], Any], *, rows: int | None = None) -> Relation | None:
    """Rollout log-probs against those that ``other(score, policy)`` gives of the same tokens."""
    for b in boundaries(OPTIONS):
        if (b.stage, b.when) == ("rollout", "after"):
            break
    tensors = {name: tensor[:rows].clone() for name, tensor in b.batch.batch.items()}
    used = tensors["attention_mask"][:, : OPTIONS.prompt_width].numpy() != 0
    hashes = prompt_hash(tensors["prompts"].numpy(), used)
    ids = tensors["responses"].numpy()
    policy = ToyPolicy(OPTIONS.vocab)
    made = other(lambda policy: policy.score(hashes, ids)[0], policy)
    tensors["old_log_probs"] = torch.from_numpy(made)
    view = BatchView.of({"batch": tensors})
    context = Context(1, "old_log_prob", "after", Settings())
    keep = tensors["response_mask"].numpy() != 0
    return relation(view, context, "old_log_probs", "rollout_log_probs", keep, 1e-3)


def test_the_same_policy() -> None:
    found = related(lambda score, policy: score(policy))
    assert found is not None
    assert found.free > 3
    assert abs(found.slope - 1.0) < 1e-4
    assert found.apart < 1e-4
    assert found.scattered == 0.0


def test_another_temperature_is_a_factor() -> None:
    found = related(lambda score, policy: score(replace(policy, temperature=2.0)))
    assert found is not None
    assert abs(found.slope - 2.0) < 1e-3
    assert found.left < 1e-4 < found.apart
    assert found.scattered == 0.0


def test_an_offset_for_each_prefix_cancels() -> None:
    found = related(lambda score, policy: score(replace(policy, top_p=0.999999)) - 0.1)
    assert found is not None
    assert found.apart < 1e-3
    assert found.scattered == 0.0


def test_other_weights_fit_nothing_and_do_not_depend_on_the_row() -> None:
    found = related(lambda score, policy: score(policy.at(0.5)))
    assert found is not None
    assert found.left > 0.05
    assert found.repeated > 2
    assert found.scattered == 0.0


def test_dropout_depends_on_the_row() -> None:
    random = np.random.default_rng(0)

    def scattered(score: Any, policy: ToyPolicy) -> Any:
        made = score(policy)
        return made + random.normal(0, 0.4, made.shape)

    found = related(scattered)
    assert found is not None
    assert found.scattered > 0.9


def test_one_row_shares_nothing() -> None:
    assert related(lambda score, policy: score(policy), rows=1) is None
