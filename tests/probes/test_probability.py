import math

import numpy as np
import pytest
import torch

from dataproto_audit import debug_metrics
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.probes.probability import probability_gap
from dataproto_audit.probes.scan import scan

NAMES = ("max", "mean", "std")


def batch(rows=30, columns=17, *, dtype=torch.float32, seed=0, noise=0.02, turns=False):
    random = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=random)
    rollout = (old + noise * torch.randn(rows, columns, generator=random)).clamp(max=0)
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows, 1), generator=random)
    if turns:  # what a tool says is between the tokens that are trained on
        mask[::3, 4:9] = False
        mask[1] = torch.arange(columns) > 3
    fields = {"old_log_probs": old, "rollout_log_probs": rollout}
    return {
        "batch": {
            **{name: (value * mask).to(dtype) for name, value in fields.items()},
            "response_mask": mask.long(),
        }
    }


def expected(fields):
    """The definitions in float64 (verl/utils/debug/metrics.py), token by token."""
    mask = fields["response_mask"] != 0
    p, q = (fields[n].double().exp()[mask] for n in ("old_log_probs", "rollout_log_probs"))
    d = (p - q).abs()
    return [float(d.max()), float(d.mean()), float(d.std())], float(
        torch.corrcoef(torch.stack([p, q]))[0, 1]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("noise", [1e-6, 0.02, 1.0])
def test_numbers_are_those_of_the_definition(dtype, noise, turns):
    given = batch(dtype=dtype, noise=noise, turns=turns)
    found = debug_metrics(given)
    numbers, correlation = expected(given["batch"])
    assert [found[f"training/rollout_probs_diff_{n}"] for n in NAMES] == pytest.approx(
        numbers, abs=1e-6
    )
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        correlation, abs=1e-6
    )
    assert found["training/rollout_probs_diff_valid"] == 1


def test_blocks_merge_into_the_whole():
    view, stat = BatchView.of(batch()), probability_gap("old_log_probs", "rollout_log_probs")
    whole, parts = (scan(view, [stat], rows=rows)[stat.name] for rows in (1000, 7))
    assert (whole.tokens, whole.largest) == (parts.tokens, parts.largest)
    assert parts[2:] == pytest.approx(whole[2:], rel=1e-5)


@pytest.mark.parametrize("turns", [False, True])
def test_what_is_not_trained_does_not_count(turns):
    given = batch(turns=turns)
    clean = debug_metrics(given)
    off = given["batch"]["response_mask"] == 0
    given["batch"]["old_log_probs"][off] = math.nan
    given["batch"]["rollout_log_probs"][off] = math.inf
    assert debug_metrics(given) == pytest.approx(clean, rel=1e-5)


def test_a_trained_cell_that_is_not_finite_makes_them_nan():
    given = batch()
    given["batch"]["old_log_probs"][0, 0] = math.nan
    found = debug_metrics(given)
    assert all(math.isnan(found[f"training/rollout_probs_diff_{name}"]) for name in NAMES)


def test_without_a_trained_token_nothing_is_valid():
    given = batch()
    given["batch"]["response_mask"].zero_()
    found = debug_metrics(given)
    assert found.pop("training/rollout_probs_diff_valid") == 0
    assert all(map(math.isnan, found.values()))
    empty = {"batch": {name: value[:0] for name, value in given["batch"].items()}}
    assert debug_metrics(empty)["training/rollout_probs_diff_valid"] == 0


def test_constant_probabilities_have_no_correlation():
    given = batch()
    for name in ("old_log_probs", "rollout_log_probs"):
        given["batch"][name].fill_(-1.0)
    found = debug_metrics(given)
    assert math.isnan(found["training/rollout_actor_probs_pearson_corr"])
    assert found["training/rollout_probs_diff_max"] == 0


def test_the_correlation_of_a_policy_that_is_nearly_certain_is_not_rounding():
    random = np.random.default_rng(0)
    old = -1e-4 * random.random((64, 50))
    rollout = np.minimum(old + 1e-5 * random.standard_normal((64, 50)), 0)
    fields = {"old_log_probs": old.astype(np.float32), "rollout_log_probs": rollout.astype("f4")}
    found = debug_metrics({"batch": {**fields, "response_mask": np.ones((64, 50), np.int64)}})
    p, q = (np.exp(value.astype(np.float64)).ravel() for value in fields.values())
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        np.corrcoef(p, q)[0, 1], abs=1e-6
    )


def test_missing_or_misshapen_fields_are_named():
    given = batch()
    short = {"batch": {**given["batch"], "old_log_probs": given["batch"]["old_log_probs"][:, 1:]}}
    with pytest.raises(UsageError, match=r"DPA103 .*\(30, 16\)"):
        debug_metrics(short)
    del given["batch"]["rollout_log_probs"]
    with pytest.raises(UsageError, match=r"DPA101 .*rollout_log_probs"):
        debug_metrics(given)


def test_half_precision_is_read_as_it_is():
    given = batch(dtype=torch.bfloat16)
    numbers, _ = expected(given["batch"])
    found = debug_metrics(given)
    got = np.array([found[f"training/rollout_probs_diff_{name}"] for name in NAMES])
    assert got == pytest.approx(np.array(numbers), abs=1e-6)


@pytest.mark.parametrize("constant", ["old_log_probs", "rollout_log_probs"])
def test_one_constant_side_has_no_correlation(constant):
    given = batch()
    given["batch"][constant].fill_(-1.0)
    found = debug_metrics(given)
    assert math.isnan(found["training/rollout_actor_probs_pearson_corr"])
    assert found["training/rollout_probs_diff_std"] > 0


def test_one_token_has_a_mean_and_no_deviation():
    given = batch()
    given["batch"]["response_mask"].zero_()
    given["batch"]["response_mask"][2, 0] = 1
    found = debug_metrics(given)
    assert found["training/rollout_probs_diff_valid"] == 1
    assert found["training/rollout_probs_diff_mean"] == found["training/rollout_probs_diff_max"]
    assert math.isnan(found["training/rollout_probs_diff_std"])
    assert math.isnan(found["training/rollout_actor_probs_pearson_corr"])
    given["batch"]["response_mask"][2, 1] = 1
    given["batch"]["old_log_probs"][2, :2] = torch.tensor([-0.5, -1.0])
    given["batch"]["rollout_log_probs"][2, :2] = torch.tensor([-0.4, -1.4])
    found = debug_metrics(given)
    numbers, _ = expected(given["batch"])
    assert [found[f"training/rollout_probs_diff_{n}"] for n in NAMES] == pytest.approx(numbers)
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
