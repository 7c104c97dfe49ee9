"""Which change of a loss gives the reported numbers: one mini-batch by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.probes.context import Settings
from dataproto_audit.probes.loss_causes import MiniBatch, explain_loss
from dataproto_audit.reference.kl import kl_of_difference
from dataproto_audit.reference.losses import policy_loss

ROWS, WIDTH = 6, 4
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum")
SETTINGS = Settings(
    use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", entropy_coeff=0.01,
    clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, loss_agg_mode="token-mean",
)  # fmt: skip
PARTS = ((np.array([0, 1]), np.array([2])), (np.array([3]), np.array([4, 5])))


def fields() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)

    old = -torch.rand(ROWS, WIDTH, generator=random, dtype=torch.float64) - 0.5
    mask = torch.arange(WIDTH)[None] < torch.tensor([4, 3, 1, 4, 2, 2])[:, None]
    return {
        "log_probs": old + noise(0.6), "old_log_probs": old, "ref_log_prob": old + noise(0.3),
        "advantages": noise(1.0) + 0.4, "entropy": noise(0.1).abs() + 1.0,
        "response_mask": mask.long(),
    }  # fmt: skip


def how(settings: Settings = SETTINGS) -> dict[str, Any]:
    return {
        "clip_ratio_low": settings.clip_ratio_low, "clip_ratio_high": settings.clip_ratio_high,
        "clip_ratio_c": settings.clip_ratio_c, "loss_agg_mode": settings.loss_agg_mode,
        "kl_loss_coef": settings.kl_loss_coef, "kl_loss_type": settings.kl_loss_type,
        "entropy_coeff": settings.entropy_coeff,
    }  # fmt: skip


def loss(rows: Any = None, settings: Settings = SETTINGS, **changes: Any) -> dict[str, float]:
    given = {n: f if rows is None else f[rows] for n, f in fields().items()}
    made = policy_loss(**given, **{**how(settings), **changes})  # type: ignore[arg-type]
    return {name: float(value) for name, value in dict(made).items()}  # type: ignore[arg-type]


def explained(reported: dict[str, Any], *wrong: str, parts: Any = (),
              settings: Settings = SETTINGS, **more: Any) -> tuple[str, str]:  # fmt: skip
    """First cause and what explains it, where the terms ``wrong`` are as ``reported``."""
    right = loss(settings=settings)
    mini = MiniBatch(
        fields=fields(), how=how(settings), reported={**right, **reported, **more},
        wrong={name: (reported[name], right[name]) for name in wrong},
        terms=policy_loss(**fields(), **how(settings)), settings=settings, parts=parts,
    )  # fmt: skip
    causes, told = explain_loss(mini)
    return causes[0], told.get("explained by", "")


def times(factor: float, *names: str) -> dict[str, float]:
    return {name: factor * loss()[name] for name in names}


ALL = ("pg_loss", "kl_loss", "entropy_loss", "total")


def test_a_count_that_was_reported_is_the_divisor() -> None:
    tokens = loss()["normaliser"]
    assert tokens == 16
    said = explained(times(0.5, *ALL), *ALL, normaliser=32.0)
    assert said == ("wrong_normaliser", "divided by 32 instead of 16")
    other = explained(times(0.7, *ALL), *ALL, normaliser=32.0)
    assert other == ("wrong_normaliser", "all terms times 0.7")


@pytest.mark.parametrize("factor", [2, 3])
def test_whole_factors(factor: int) -> None:
    said = explained(times(factor, *ALL), *ALL)
    assert said == ("wrong_normaliser", f"all terms are {factor} times too large")
    said = explained(times(factor, "pg_loss"), "pg_loss")
    assert said == ("loss_depends_on_split", f"{factor} times too large")


def test_a_factor_of_one_and_a_half_is_no_count() -> None:
    assert explained(times(1.5, "pg_loss"), "pg_loss") == ("loss_depends_on_split", "")
    assert explained(times(1.5, *ALL), *ALL) == ("wrong_normaliser", "all terms times 1.5")


def test_all_columns() -> None:
    said = explained(times(16 / 24, *ALL), *ALL)
    assert said == ("wrong_normaliser", "aggregated as seq-mean-token-sum-norm")
    said = explained(times(16 / 24, "entropy_loss"), "entropy_loss")
    assert said == ("wrong_normaliser", "divided by all 24 columns")
    said = explained(times(16 / 24, "kl_loss"), "kl_loss")
    assert said == ("wrong_normaliser", "divided by all 24 columns")


def test_ranks_that_divide_once_more() -> None:
    said = explained(times(0.5, *ALL), *ALL, parts=PARTS)
    assert said == ("wrong_normaliser", "divided by 2 ranks once more")
    assert explained(times(0.5, *ALL), *ALL)[1] == "all terms times 0.5"


def test_micro_batches_that_are_not_divided() -> None:
    said = explained(times(2.0, *ALL), *ALL, parts=PARTS)
    assert said == ("loss_depends_on_split", "2 micro-batches added and not divided")
    uneven = ((np.array([0, 1]), np.array([2])), (np.array([3, 4, 5]),))
    assert explained(times(2.0, *ALL), *ALL, parts=uneven)[1] == "all terms are 2 times too large"


def mean(*rows: list[int]) -> dict[str, float]:
    made = [loss(torch.tensor(part)) for part in rows]
    return {name: float(np.mean([part[name] for part in made])) for name in ALL}


def test_means_of_means() -> None:
    said = explained(mean([0, 1], [2], [3], [4, 5]), *ALL, parts=PARTS)
    assert said == ("loss_depends_on_split", "the mean of the means of 4 micro-batches")
    said = explained(mean([0, 1, 2], [3, 4, 5]), *ALL, parts=PARTS)
    assert said == ("loss_depends_on_split", "the mean of the means of 2 ranks")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clip_ratio_low": 0.3, "clip_ratio_high": 0.2}, "the sides of the clip range swapped"),
        ({"clip_ratio_low": 1.0, "clip_ratio_high": 1e9, "clip_ratio_c": None}, "no clip"),
        ({"clip_ratio_high": 0.2}, "the lower side on both sides"),
        ({"clip_ratio_low": 0.3}, "the upper side on both sides"),
    ],
)
def test_other_clip_ranges(changes: dict[str, Any], told: str) -> None:
    assert loss(**changes)["pg_loss"] != pytest.approx(loss()["pg_loss"], rel=3e-4)
    said = explained({"pg_loss": loss(**changes)["pg_loss"]}, "pg_loss")
    assert said == ("wrong_clip", told)


@pytest.mark.parametrize("mode", MODES[1:])
def test_other_aggregations(mode: str) -> None:
    """Told from the policy loss, or from the total where that alone was reported."""
    made = loss(loss_agg_mode=mode)
    assert explained({"pg_loss": made["pg_loss"]}, "pg_loss")[0] == "wrong_normaliser"
    said = explained({"total": made["total"]}, "total", pg_loss=None)
    assert said == ("wrong_normaliser", f"aggregated as {mode}")


@pytest.mark.parametrize(
    ("kind", "sign", "told"),
    [
        ("k1", 1.0, "k1"), ("k2", 1.0, "k2"), ("abs", 1.0, "abs"),
        ("k1", -1.0, "k1 with swapped arguments"), ("k3", -1.0, "k3 with swapped arguments"),
    ],
)  # fmt: skip
def test_other_estimators_of_the_kl(kind: str, sign: float, told: str) -> None:
    given = fields()
    on = given["response_mask"] != 0
    distance = (given["log_probs"] - given["ref_log_prob"])[on]
    used = float(kl_of_difference(sign * distance, kind).mean())
    assert explained({"kl_loss": used}, "kl_loss") == ("wrong_kl_estimator", told)


def test_terms_of_the_total() -> None:
    right = loss()
    pg, kl, entropy = (right[n] for n in ALL[:3])
    for total, said in (
        (pg + 0.1 * kl + 0.01 * entropy, ("entropy_sign", "total = pg + kl + entropy bonus")),
        (pg - 0.1 * kl - 0.01 * entropy, ("wrong_sign", "total = pg - kl - entropy bonus")),
        (pg + 0.25 * kl - 0.01 * entropy,
         ("engine_setting", "a KL coefficient of 0.25 instead of 0.1")),
        (pg - 0.01 * entropy, ("engine_setting", "a KL coefficient of 0 instead of 0.1")),
        (pg + 10 * kl - 0.01 * entropy,
         ("engine_setting", "a KL coefficient of 10 instead of 0.1")),
        (pg + 11 * kl - 0.01 * entropy, ("loss_depends_on_split", "")),
    ):  # fmt: skip
        assert explained({"total": total}, "total") == said


def test_what_is_not_finite_has_no_factor() -> None:
    assert explained({"pg_loss": float("nan")}, "pg_loss") == ("non_finite", "")


def test_usual_causes_where_nothing_fits() -> None:
    right = loss()
    for name, first in (("pg_loss", "loss_depends_on_split"), ("kl_loss", "wrong_kl_estimator"),
                        ("entropy_loss", "loss_depends_on_split")):  # fmt: skip
        assert explained({name: right[name] * 0.123 + 0.01}, name) == (first, "")


@pytest.mark.parametrize(("off", "fits"), [(1.9e-4, True), (2.2e-4, False)])
def test_how_exactly_a_cause_has_to_fit(off: float, fits: bool) -> None:
    said = explained(times(2.0 * (1 + off), "pg_loss"), "pg_loss")
    assert (said[1] == "2 times too large") is fits


@pytest.mark.parametrize("names", [("pg_loss",), ("pg_loss", "total"), ("pg_loss", "kl_loss")])
def test_terms_of_the_other_sign(names: tuple[str, ...]) -> None:
    right = loss()
    cause, told = explained({name: -right[name] for name in names}, *names)
    assert (cause, told) == ("wrong_sign", f"{', '.join(sorted(names))} of the other sign")
