import pytest
import torch

from dataproto_audit.trainer.compare.judge import (
    Values,
    differences,
    first_wrong,
    gradient_factor,
    not_judged,
    sizes_of,
    tolerances,
    wrong_gradients,
    wrong_values,
)


def values(**changes):
    found = {
        "log_probs": torch.zeros(2, 3, dtype=torch.float64),
        "entropy": torch.ones(2, 3),
        "terms": {"pg_loss": 2.0, "total": 1.0},
        "gradients": {"a": torch.ones(2, 2), "b": torch.zeros(3)},
        "moved": {"a": torch.ones(2, 2), "b": torch.zeros(3)},
    }
    return Values(**(found | changes))


def test_the_worst_cell_and_the_worst_parameter_are_named():
    log_probs = torch.zeros(2, 3)
    log_probs[1, 2] = -0.5
    gradients = {"a": torch.ones(2, 2), "b": torch.tensor([0.0, 0.3, 0.0])}
    found = differences(
        values(log_probs=log_probs, gradients=gradients, terms={"pg_loss": 2.0, "total": 1.2}),
        values(),
    )
    assert found["max_abs_logprob_diff"] == pytest.approx(0.5)
    assert found["worst_logprob"] == [1, 2]
    assert (found["worst_gradient"], found["worst_term"]) == ("b", "total")
    assert found["max_abs_grad_diff"] == pytest.approx(0.3)
    assert found["rel_loss_diff"] == pytest.approx(0.1), "a share of the largest term"


def test_an_update_is_compared_by_its_length():
    moved = {"a": torch.ones(2, 2) * 1.5, "b": torch.zeros(3)}
    assert differences(values(moved=moved), values())["rel_update_diff"] == pytest.approx(0.5)


def test_nan_and_a_missing_parameter_are_no_agreement():
    log_probs = torch.zeros(2, 3)
    log_probs[0, 1] = torch.nan
    found = differences(values(log_probs=log_probs, gradients={"a": torch.ones(2, 2)}), values())
    assert found["worst_logprob"] == [0, 1]
    assert found["worst_gradient"] == "b"
    bounds = tolerances(differences(values(), values()), largest_gradient=1.0)
    assert wrong_values(found, bounds) == ["max_abs_logprob_diff", "max_abs_grad_diff"]
    assert wrong_values({**found, "rel_loss_diff": float("nan")}, {"rel_loss_diff": 1.0})


def test_tolerances_follow_the_noise_and_have_a_floor():
    quiet = differences(values(), values())
    assert tolerances(quiet, largest_gradient=0.5)["max_abs_grad_diff"] == 0.5e-5
    far = tolerances(quiet, largest_gradient=1.0, largest={"log_prob": 20.0, "entropy": 0.1})
    assert far["max_abs_logprob_diff"] == pytest.approx(20 * 4 * 2**-23)
    assert far["max_abs_entropy_diff"] == 1e-6
    loud = quiet | {"max_abs_logprob_diff": 0.1}
    assert tolerances(loud, largest_gradient=1.0)["max_abs_logprob_diff"] == pytest.approx(0.4)


@pytest.mark.parametrize("term", ["pg_loss", "total"])
def test_nan_in_any_loss_term_is_no_agreement(term):
    terms = {"pg_loss": 2.0, "total": 1.0} | {term: float("nan")}
    found = differences(values(terms=terms), values())
    assert (found["worst_term"], found["rel_loss_diff"]) == (term, float("inf"))
    assert wrong_values(found, {"rel_loss_diff": 1.0}) == ["rel_loss_diff"]


def test_values_are_compared_where_they_are_expected():
    expected = values(token_values=torch.zeros(2, 3), value_gradients={"v": torch.ones(2)})
    off = torch.zeros(2, 3)
    off[1, 0] = 0.25
    found = differences(
        values(token_values=off, value_gradients={"v": torch.tensor([1.0, 1.5])}), expected
    )
    assert (found["max_abs_value_diff"], found["worst_value"]) == (0.25, [1, 0])
    assert (found["max_abs_value_grad_diff"], found["worst_value_gradient"]) == (0.5, "v")
    quiet = differences(expected, expected)
    bounds = tolerances(quiet, largest_gradient=1.0, largest_value_gradient=2.0)
    assert bounds["max_abs_value_grad_diff"] == 2e-5
    wrong = wrong_values(found, bounds)
    assert wrong == ["max_abs_value_diff", "max_abs_value_grad_diff"]
    assert first_wrong(wrong, layer="", gradients=[]) == "value_head"


def test_wrong_gradients_are_named_in_the_model_s_order_and_one_factor_is_seen():
    scaled = {"a": torch.ones(2, 2) / 4, "b": torch.zeros(3)}
    assert wrong_gradients(values(gradients=scaled), values(), bound=1e-6) == ["a"]
    assert gradient_factor(values(gradients=scaled), values()) == pytest.approx(0.25)
    one = {"a": torch.tensor([[1.0, 1.0], [1.0, 2.0]]), "b": torch.zeros(3)}
    assert gradient_factor(values(gradients=one), values()) is None
    assert gradient_factor(values(), values()) is None
    lost = values(gradients={"a": torch.ones(2, 2)})
    assert wrong_gradients(lost, values(), bound=1e-6) == ["b"]
    assert gradient_factor(lost, values()) is None
    nothing = values(gradients={})
    assert wrong_gradients(nothing, values(), bound=1e-6) == ["a", "b"]
    assert gradient_factor(nothing, values()) is None
    nan = {"a": torch.full((2, 2), torch.nan), "b": torch.zeros(3)}
    assert wrong_gradients(values(gradients=nan), values(), bound=1e-6) == ["a"]
    assert gradient_factor(values(gradients=nan), values()) is None


@pytest.mark.parametrize(
    ("wrong", "layer", "first"),
    [
        ([], "", None),
        (["layers", "max_abs_logprob_diff"], "model.layers.1", "model.layers.1"),
        (["max_abs_entropy_diff", "rel_loss_diff"], "", "lm_head"),
        (["max_abs_logprob_diff"], None, "forward"),
        (["rel_loss_diff", "max_abs_grad_diff"], None, "loss"),
        (["max_abs_grad_diff", "rel_update_diff"], None, "gradient w"),
        (["rel_update_diff"], "", "optimizer"),
    ],
)
def test_the_first_place_that_differs(wrong, layer, first):
    assert first_wrong(wrong, layer=layer, gradients=["w", "x"]) == first


def test_a_bound_that_zeros_would_keep_is_said_to_judge_nothing():
    expected = values(log_probs=torch.full((2, 3), -4.0), gradients={"a": torch.full((2,), -0.5)})
    sizes, quiet = sizes_of(expected), differences(expected, expected)
    assert (sizes["max_abs_logprob_diff"], sizes["max_abs_grad_diff"]) == (4.0, 0.5)
    assert not_judged(tolerances(quiet, largest_gradient=0.5), sizes) == []
    loud = tolerances(
        quiet | {"max_abs_grad_diff": 0.125, "rel_update_diff": 0.3}, largest_gradient=0.5
    )
    assert not_judged(loud, sizes) == ["max_abs_grad_diff", "rel_update_diff"]
    assert not_judged({"max_abs_value_grad_diff": 0.0}, sizes) == [], "nothing may differ from 0"


def test_infinity_agrees_with_nothing():
    assert wrong_values({"rel_loss_diff": float("inf")}, {"rel_loss_diff": float("inf")})
    nan = {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(1)}
    assert sizes_of(values(gradients=nan))["max_abs_grad_diff"] != 0.0
