"""Our schedule next to Megatron's own class, update by update, and what is refused."""

from types import SimpleNamespace

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.rates import INCREASES, STYLES, WSD_STYLES, RateSchedule
from dataproto_audit.trainer.validate import validate
from dataproto_audit.trainer.workers.spec import lr_at, weight_decay_at, worker_spec

UPDATES = 30
SECTION = "actor_rollout_ref.actor.optim"


def of_megatron(schedule):
    """(learning rate, weight decay) of each update by megatron-core's scheduler, stepped once after
    each update as verl does."""
    with shims.importing():
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=schedule.init_lr,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style=schedule.style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.weight_decay,
        wd_incr_steps=schedule.decay_steps,
        wd_incr_style=schedule.incr_style,
        wsd_decay_steps=schedule.wsd_steps,
        lr_wsd_decay_style=schedule.wsd_style,
    )
    out = []
    for _ in range(UPDATES):
        out.append((group["lr"], group["weight_decay"]))
        scheduler.step(1)
    return out


def ours(schedule):
    schedule.check()
    return [(schedule.lr_at(k), schedule.weight_decay_at(k)) for k in range(UPDATES)]


def same(schedule):
    for found, expected in zip(ours(schedule), of_megatron(schedule), strict=True):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0, 5])
def test_rates_are_megatrons_in_every_style(style, warmup):
    same(
        RateSchedule(
            style, lr=3e-4, decay_steps=20, warmup_steps=warmup, init_lr=1e-6, min_lr=1e-5,
            wsd_steps=7, weight_decay=0.1, start_weight_decay=0.1,
        )
    )  # fmt: skip


@pytest.mark.parametrize("style", WSD_STYLES)
def test_the_last_part_of_wsd_is_megatrons(style):
    same(RateSchedule("WSD", lr=1e-3, decay_steps=25, warmup_steps=3, wsd_style=style, wsd_steps=9))


@pytest.mark.parametrize("style", INCREASES[1:])
def test_weight_decay_rises_as_megatrons(style):
    same(
        RateSchedule(
            "cosine", lr=1e-3, decay_steps=17, weight_decay=0.2, start_weight_decay=0.05,
            incr_style=style,
        )
    )  # fmt: skip


def test_the_first_update_of_a_warm_up_has_its_first_rate():
    assert RateSchedule("linear", lr=1.0, decay_steps=9, warmup_steps=4).lr_at(0) == 0.0


def config(*overrides):
    named = [f"{SECTION}.{override}" for override in overrides]
    return load_config("quickstart", named)


def test_keys_reach_the_schedule_and_without_a_style_there_is_none():
    made = worker_spec(
        config("lr_decay_style=cosine", "min_lr=1e-5", "weight_decay=0.1", "lr_warmup_steps=10"),
        model_path="",
    )
    rates = made.update.rates
    assert rates == RateSchedule(
        "cosine", lr=6e-4, decay_steps=90, warmup_steps=10, min_lr=1e-5, weight_decay=0.1,
        start_weight_decay=0.1,
    )  # fmt: skip
    assert lr_at(made.optim, made.update, step=90) == 1e-5
    assert weight_decay_at(made.optim, made.update, step=3) == 0.1
    plain = worker_spec(config("weight_decay=0.1"), model_path="")
    assert plain.update.rates is None
    assert lr_at(plain.optim, plain.update, step=90) == 6e-4
    assert weight_decay_at(plain.optim, plain.update, step=3) == 0.1


@pytest.mark.parametrize(
    "idle",
    [
        "lr_decay_steps=50", "lr_warmup_init=1e-06", "min_lr=1e-05", "lr_wsd_decay_style=linear",
        "lr_wsd_decay_steps=5", "weight_decay_incr_style=linear", "start_weight_decay=0.0",
    ],
)  # fmt: skip
def test_keys_that_only_a_schedule_reads_need_one(idle):
    with pytest.raises(UsageError, match=rf"DPA851 .*lr_decay_style is null, so {idle}") as caught:
        validate(config(idle))
    assert "Choose actor_rollout_ref.actor.optim.lr_decay_style" in str(caught.value)
    validate(config("lr_warmup_steps=5", "weight_decay=0.1", "min_lr=0.0"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr_decay_style=sawtooth"], "lr_decay_style"),
        (["lr_decay_style=linear", "lr_decay_steps=10", "lr_warmup_steps=10"], "lr_warmup_steps"),
        (["lr_decay_style=linear", "min_lr=1"], "min_lr is 1.0, above lr"),
        (["lr_decay_style=linear", "lr_warmup_init=1"], "lr_warmup_init is 1.0, above lr"),
        (["lr_decay_style=WSD"], "lr_wsd_decay_steps is None"),
        (["lr_decay_style=WSD", "lr_wsd_decay_steps=81"], "1 to 80 updates"),
        (["lr_decay_style=linear", "start_weight_decay=0.5"], "rises only"),
        (
            ["lr_decay_style=linear", "weight_decay=1", "start_weight_decay=0.5"],
            "weight_decay_incr_style is constant",
        ),
    ],
)
def test_what_megatron_would_stop_at_is_a_usage_error(overrides, message):
    with pytest.raises(UsageError, match=message):
        validate(config(*overrides))
