import itertools
import math
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataproto_audit.reference import losses
from dataproto_audit.reference.losses import AGGREGATION_MODES, aggregate, policy_loss

# Row sums 1, 10 and 0 over 2, 3 and 0 trained tokens.
VALUES = torch.tensor(
    [[0.25, 0.75, 99.0, 99.0], [1.0, 4.0, 5.0, 99.0], [99.0] * 4], dtype=torch.float64
)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])


def _batch(seed: int, rows: int = 5, width: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -noise().abs()
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0, 0] = True
    return {
        "log_probs": old + 0.4 * noise(),
        "old_log_probs": old,
        "advantages": noise(),
        "response_mask": mask.long(),
        "ref_log_prob": old + 0.3 * noise(),
        "entropy": noise().abs(),
    }


def _loss_of_ratio(ratio: float, advantage: float, **options: Any) -> dict[str, float]:
    """Terms for a single token with the given ratio and advantage."""
    terms = policy_loss(
        torch.tensor([[ratio]], dtype=torch.float64).log(),
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        torch.ones(1, 1, dtype=torch.int64),
        **options,
    )
    return {name: value.item() for name, value in terms.items()}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 11 / 5),
        ("token-sum", 11.0),
        ("seq-mean-token-sum", 11 / 2),
        ("seq-mean-token-mean", (1 / 2 + 10 / 3) / 2),
        ("seq-mean-token-sum-norm", 11 / 2 / 4),
    ],
)
def test_aggregation_modes(mode: str, expected: float) -> None:
    assert aggregate(VALUES, MASK, mode).item() == pytest.approx(expected)


def test_every_mode_has_a_hand_computed_case() -> None:
    cases = test_aggregation_modes.pytestmark[0].args[1]
    assert {mode for mode, _ in cases} == set(AGGREGATION_MODES)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 5), ("seq-mean-token-sum", 2), ("seq-mean-token-mean", 2), ("token-sum", 1)],
)
def test_count_normaliser(mode: str, expected: int) -> None:
    assert losses.count_normaliser(MASK, mode) == expected


def test_a_given_normaliser_counts_masked_rows_as_verl_s_engine_does() -> None:
    value = aggregate(VALUES, MASK, "seq-mean-token-sum", normaliser=3)
    assert value.item() == pytest.approx(11 / 3)


def test_the_scale_factor_replaces_the_padded_width() -> None:
    value = aggregate(VALUES, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert value.item() == pytest.approx(11 / 2 / 10)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_an_empty_mask_gives_nothing(mode: str) -> None:
    assert aggregate(VALUES, torch.zeros_like(MASK), mode).item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nan_off_the_mask_does_no_harm(mode: str) -> None:
    values = torch.where(MASK.bool(), VALUES, float("nan"))
    assert torch.equal(aggregate(values, MASK, mode), aggregate(VALUES, MASK, mode))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown loss_agg_mode 'mean'.*token-mean"):
        aggregate(VALUES, MASK, "mean")
    with pytest.raises(ValueError, match="normaliser of a loss must be positive"):
        aggregate(VALUES, MASK, "token-mean", normaliser=0)
    with pytest.raises(ValueError, match="loss_scale_factor must be positive"):
        aggregate(VALUES, MASK, "seq-mean-token-sum-norm", loss_scale_factor=0)


# -- what went wrong elsewhere ---------------------------------------------------------------------


def test_a_rank_1_entropy_is_refused_instead_of_broadcast() -> None:
    # RLinf PR 1565: [B] times [B, 1] makes a B x B product.
    entropy = torch.tensor([0.3, 0.5, 0.4])
    mask = torch.ones(3, 1, dtype=torch.int64)
    assert aggregate(entropy[:, None], mask, "token-mean").item() == pytest.approx(0.4)
    with pytest.raises(jaxtyping.TypeCheckError, match="values"):
        aggregate(entropy, mask, "token-mean")


def test_removed_rows_leave_the_denominator() -> None:
    # TRL issue 6369: 15 tokens of loss over a count of 20 gives 0.75.
    lengths = torch.tensor([3, 4, 2, 0, 2, 4])  # row 3 (5 tokens) was truncated and removed
    mask = (torch.arange(5) < lengths[:, None]).long()
    assert aggregate(torch.ones(6, 5), mask, "token-mean").item() == 1.0
    assert aggregate(torch.ones(6, 5), mask, "token-mean", normaliser=20).item() == 0.75


def test_padding_does_not_dilute_a_mean() -> None:
    # open-instruct PR 535: the plain mean over all cells is 0.2.
    values = torch.tensor([[0.2, 0.4, 0.0, 0.0], [0.6, 0.2, 0.2, 0.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert aggregate(values, mask, "token-mean").item() == pytest.approx(0.32)


def test_unequal_micro_batches_share_one_token_count() -> None:
    # verl issue 5625: 4 tokens of loss 1, 9 of loss 0; weighting by samples gives 0.5.
    first = aggregate(
        torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64), "token-mean", normaliser=13
    )
    second = aggregate(
        torch.zeros(2, 5), torch.tensor([[1] * 5, [1] * 4 + [0]]), "token-mean", normaliser=13
    )
    assert (first + second).item() == pytest.approx(0.3077, abs=1e-4)


def test_accumulated_parts_do_not_add_up_to_four_times_the_loss() -> None:
    # verl PR 3332: four micro-batches of loss 0.4, backpropagated without a divisor.
    part = torch.full((1, 2), 0.4)
    ones = torch.ones(1, 2, dtype=torch.int64)
    parts = [aggregate(part, ones, "token-mean", normaliser=8) for _ in range(4)]
    assert sum(parts).item() == pytest.approx(0.4, abs=1e-7)


def test_the_dr_grpo_mode_does_not_grow_with_the_micro_batch() -> None:
    # verl issue 3741: sums of four rows over the padded width give 0.48.
    values = torch.zeros(4, 5)
    values[:, 0] = torch.tensor([0.5, 0.7, 0.3, 0.9])
    mode, ones = "seq-mean-token-sum-norm", torch.ones(4, 5, dtype=torch.int64)
    assert aggregate(values, ones, mode).item() == pytest.approx(0.12)
    halves = [aggregate(values[i : i + 2], ones[:2], mode, normaliser=4) for i in (0, 2)]
    assert sum(halves).item() == pytest.approx(0.12)


# -- the policy loss -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "upper", "lower"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside the clip range
        (1.5, 2.0, -2.4, 1, 0),  # A > 0: clipped at 1.2
        (0.5, 2.0, -1.0, 0, 0),  # A > 0: a small ratio is not clipped
        (1.5, -2.0, 3.0, 0, 0),  # A < 0: a large ratio is not clipped ...
        (4.0, -2.0, 6.0, 0, 1),  # ... up to c = 3
        (0.5, -2.0, 1.6, 1, 0),  # A < 0: clipped at 0.8
        (4.0, 0.0, 0.0, 0, 0),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, upper: int, lower: int) -> None:
    terms = _loss_of_ratio(ratio, advantage)
    assert terms["pg_loss"] == pytest.approx(loss)
    assert terms["total"] == terms["pg_loss"]
    assert (terms["pg_clipfrac"], terms["pg_clipfrac_lower"]) == (upper, lower)


def test_clip_ranges_can_differ() -> None:
    options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    assert _loss_of_ratio(2.0, 1.0, **options)["pg_loss"] == pytest.approx(-1.3)
    assert _loss_of_ratio(0.2, -1.0, **options)["pg_loss"] == pytest.approx(0.9)


def test_the_dual_clip_can_be_off() -> None:
    assert _loss_of_ratio(4.0, -2.0, clip_ratio_c=None)["pg_loss"] == pytest.approx(8.0)
    with pytest.raises(ValueError, match="bound above 1"):
        _loss_of_ratio(1.0, 1.0, clip_ratio_c=1.0)


def test_log_ratios_are_cut_at_20() -> None:
    terms = policy_loss(
        torch.tensor([[0.0]]), torch.tensor([[-96.0]]), -torch.ones(1, 1), torch.tensor([[1]]),
        clip_ratio_c=None,
    )  # fmt: skip
    assert terms["pg_loss"].item() == pytest.approx(torch.tensor(20.0).double().exp().item())
    assert terms["ppo_kl"].item() == -20.0


def test_rollout_weights_scale_the_clipped_loss() -> None:
    weights = torch.tensor([[0.5]])
    assert _loss_of_ratio(1.5, 2.0, rollout_is_weights=weights)["pg_loss"] == pytest.approx(-1.2)


def test_terms_and_their_signs() -> None:
    terms = policy_loss(
        torch.tensor([[-1.0, -2.0]]),
        torch.tensor([[-1.0, -2.0]]),
        torch.tensor([[1.0, 3.0]]),
        torch.tensor([[1, 1]]),
        ref_log_prob=torch.tensor([[-1.5, -2.5]]),
        entropy=torch.tensor([[0.2, 0.6]]),
        kl_loss_type="k2",
        kl_loss_coef=0.5,
        entropy_coeff=0.1,
    )
    assert terms["pg_loss"].item() == pytest.approx(-2.0)
    assert terms["kl_loss"].item() == pytest.approx(0.125)
    assert terms["entropy_loss"].item() == pytest.approx(0.4)
    # The KL is added, the entropy is a bonus.
    assert terms["total"].item() == pytest.approx(-2.0 + 0.0625 - 0.04)
    assert terms["normaliser"].item() == 2
    assert {value.dtype for value in terms.values()} == {torch.float64}


def test_a_term_without_weight_is_reported_and_left_out() -> None:
    log_probs = torch.zeros(1, 1, requires_grad=True)
    terms = policy_loss(
        log_probs, torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([[1]]),
        ref_log_prob=torch.full((1, 1), -1.0), entropy=torch.full((1, 1), float("nan")),
    )  # fmt: skip
    assert terms["kl_loss"].item() > 0
    assert terms["total"].item() == -1.0
    (gradient,) = torch.autograd.grad(terms["total"], log_probs)
    assert gradient.item() == -1.0


def test_a_weight_without_its_input_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_log_prob was not given"):
        _loss_of_ratio(1.0, 1.0, kl_loss_coef=0.1)
    with pytest.raises(ValueError, match="entropy was not given"):
        _loss_of_ratio(1.0, 1.0, entropy_coeff=0.1)


def test_advantages_in_place_of_the_mask_are_refused() -> None:
    # verl issue 2506.
    batch = _batch(0)
    batch["response_mask"] = batch["advantages"]
    with pytest.raises(jaxtyping.TypeCheckError, match="response_mask"):
        policy_loss(**batch)


def test_an_untrained_batch_has_no_loss() -> None:
    batch = _batch(0)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    assert policy_loss(**batch)["total"].item() == 0.0


def test_equal_policies_lose_minus_the_mean_advantage() -> None:
    batch = _batch(1)
    batch["log_probs"] = batch["old_log_probs"]
    terms = policy_loss(**batch)
    on = batch["response_mask"].bool()
    assert terms["pg_loss"].item() == pytest.approx(-batch["advantages"][on].mean().item())
    assert terms["ppo_kl"].item() == terms["pg_clipfrac"].item() == 0.0


def test_no_advantage_has_exactly_no_gradient() -> None:
    batch = _batch(2)
    batch["log_probs"].requires_grad_()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    (gradient,) = torch.autograd.grad(policy_loss(**batch)["total"], batch["log_probs"])
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_gradient_by_finite_differences(mode: str) -> None:
    batch = _batch(3)
    log_probs, entropy = batch.pop("log_probs"), batch.pop("entropy")

    def total(new: Tensor, entropies: Tensor) -> Tensor:
        return policy_loss(
            new, entropy=entropies, loss_agg_mode=mode, kl_loss_coef=0.3, entropy_coeff=0.2,
            **batch,
        )["total"]  # fmt: skip

    assert torch.autograd.gradcheck(
        total, (log_probs.requires_grad_(), entropy.requires_grad_()), eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_masked_tokens_have_no_influence_and_no_gradient(mode: str) -> None:
    batch = _batch(4)
    off = batch["response_mask"] == 0
    options = {"loss_agg_mode": mode, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}
    expected = policy_loss(**batch, **options)["total"]
    for name in batch:
        if name != "response_mask":
            batch[name] = batch[name].masked_fill(off, float("nan"))
    batch["log_probs"].requires_grad_()
    total = policy_loss(**batch, **options)["total"]
    assert torch.equal(total.detach(), expected)
    (gradient,) = torch.autograd.grad(total, batch["log_probs"])
    assert gradient[off].count_nonzero() == 0
    assert bool(gradient.isfinite().all())


@given(
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(AGGREGATION_MODES),
    cuts=st.lists(st.integers(0, 8), max_size=3).map(sorted),
)
def test_parts_of_a_mini_batch_add_up_whatever_the_split(
    seed: int, mode: str, cuts: list[int]
) -> None:
    batch = _batch(seed, rows=8)
    batch["log_probs"].requires_grad_()
    options: dict[str, Any] = {
        "loss_agg_mode": mode,
        "kl_loss_coef": 0.3,
        "entropy_coeff": 0.2,
        "normaliser": losses.count_normaliser(batch["response_mask"], mode),
    }
    whole = policy_loss(**batch, **options)["total"]
    bounds = [0, *cuts, 8]
    parts = [
        policy_loss(**{name: value[a:b] for name, value in batch.items()}, **options)["total"]
        for a, b in itertools.pairwise(bounds)
        if a < b
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(sum(parts), batch["log_probs"]),
        torch.autograd.grad(whole, batch["log_probs"]),
        rtol=1e-12,
        atol=1e-12,
    )


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(AGGREGATION_MODES))
def test_the_order_of_the_rows_does_not_matter(seed: int, mode: str) -> None:
    batch = _batch(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    moved = {name: value[order] for name, value in batch.items()}
    first = policy_loss(**batch, loss_agg_mode=mode, kl_loss_coef=0.1)
    second = policy_loss(**moved, loss_agg_mode=mode, kl_loss_coef=0.1)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-12, atol=1e-12)


def test_gspo_takes_the_mean_log_ratio_of_a_row() -> None:
    log_ratios = torch.tensor([[0.1, 0.3, 9.0], [-0.4, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([[1.0, 1.0, 5.0], [-2.0, -2.0, -2.0]])
    how = {"clip_ratio": 0.25, "loss_mode": "gspo", "clip_ratio_c": 1.1}
    zeros = torch.zeros(2, 3)
    wide = policy_loss(log_ratios, zeros, advantages, mask, **how)  # type: ignore[arg-type]
    first = min(math.exp(0.2), 1.25)
    second = -2 * max(math.exp(-0.4), 0.75)  # A < 0 takes the worse of both; no dual clip
    assert wide["pg_loss"].item() == pytest.approx((-first * 2 - second) / 3)
    narrow = policy_loss(
        log_ratios, zeros, advantages, mask, loss_agg_mode="seq-mean-token-mean", **how
    )  # type: ignore[arg-type]
    assert narrow["pg_loss"].item() == pytest.approx((-first - second) / 2)


def test_sapo_gates_by_the_sign_of_the_advantage() -> None:
    for advantage, tau in ((1.5, 1.0), (-1.5, 1.05)):
        terms = _loss_of_ratio(1.3, advantage, loss_mode="sapo")
        gate = 4 / tau / (1 + math.exp(-tau * 0.3))
        assert terms["pg_loss"] == pytest.approx(-advantage * gate)
        assert terms["pg_clipfrac"] == terms["pg_clipfrac_lower"] == 0
    other = _loss_of_ratio(1.3, 1.5, loss_mode="sapo", gate_temperatures=(2.0, 3.0))
    assert other["pg_loss"] == pytest.approx(-1.5 * 2 / (1 + math.exp(-0.6)))


def test_geo_mean_clips_tokens_and_takes_one_loss_of_a_row() -> None:
    log_ratios = torch.tensor([[0.1, 0.9, 9.0], [-0.9, 0.4, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    advantages = torch.tensor([[1.0, 2.0, 5.0], [-2.0, -2.0, -2.0]])
    weights = torch.tensor([[0.5, 2.0, 7.0], [0.5, 0.5, 0.0]])
    how = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5, "loss_mode": "geo_mean",
           "clip_ratio_c": 1.1}  # fmt: skip
    zeros = torch.zeros(2, 3)
    first = -1.5 * math.exp((0.1 + 0.5) / 2)  # a gain is bounded, in logarithms
    second = 2 * math.exp((-0.3 + 0.4) / 2)  # for A < 0 from below only
    plain = policy_loss(log_ratios, zeros, advantages, mask, **how)  # type: ignore[arg-type]
    assert plain["pg_loss"].item() == pytest.approx((first + second) / 2)
    assert plain["pg_clipfrac"].item() == pytest.approx(2 / 4)
    weighted = policy_loss(
        log_ratios, zeros, advantages, mask, rollout_is_weights=weights,
        loss_agg_mode="seq-mean-token-sum", **how,
    )  # type: ignore[arg-type]  # fmt: skip
    assert weighted["pg_loss"].item() == pytest.approx(2 * (first * 1.0 + second * 0.5) / 2)
    assert plain["pg_clipfrac_lower"] == 0


def test_another_policy_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown loss_mode 'cispo'; known: .*sapo, geo_mean"):
        _loss_of_ratio(1.0, 1.0, loss_mode="cispo")
