"""Each value by itself: out of range, not finite, not in the list; and every bound just inside."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.algorithms.kl import ESTIMATORS
from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.config import Config, load_config
from dataproto_audit.trainer.ranges import (
    CHOICES,
    DTYPES,
    KL_ESTIMATORS,
    MAY_BE_NULL,
    RANGES,
    check_each,
    taken,
    value_of,
)

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.temperature=nan", f"{ACTOR}.optim.betas=[0.9]", f"{ACTOR}.optim.betas=[0.9,1]",
        f"{ACTOR}.optim.betas=[0.9,nan]", f"{MODEL}.tiny.hidden_size=0", f"{ACTOR}.optim.lr=nan",
        f"{ACTOR}.optim.lr=-1", f"{ACTOR}.clip_ratio=-1", f"{ACTOR}.clip_ratio=nan",
        f"{ACTOR}.clip_ratio_c=1", f"{ACTOR}.entropy_coeff=inf", f"{ACTOR}.grad_clip=0",
        f"{ACTOR}.kl_loss_type=k9", f"{ROLLOUT}.top_p=0", f"{ROLLOUT}.top_p=1.5",
        f"{ROLLOUT}.top_k=-2", f"{ROLLOUT}.dtype=int8", f"{MODEL}.dtype=foo",
        f"{MODEL}.attn_implementation=foo", "warmup.steps=-1", "warmup.batch_size=0",
        "data.seed=-1", "trainer.seed=100000000000000000000", f"{ROLLOUT}.kv_cache_memory_bytes=1",
        "trainer.collective_timeout_s=inf", "trainer.ray_object_store_bytes=1000",
        "trainer.save_freq=-2", f"{ROLLOUT}.n=0", "data.max_response_length=100000000000",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=0", "audit.sync_probe_every=0",
    ],
)  # fmt: skip
def test_a_value_that_its_key_does_not_take_is_named(override):
    with pytest.raises(UsageError, match="DPA851") as caught:
        check_each(load_config("quickstart", [override]))
    assert override.partition("=")[0] in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.optim.lr=0", f"{ACTOR}.clip_ratio=0", f"{ACTOR}.entropy_coeff=-0.1",
        f"{ACTOR}.clip_ratio_low=null", f"{ROLLOUT}.top_p=1", f"{ROLLOUT}.top_k=-1",
        f"{ROLLOUT}.top_k=0", f"{ROLLOUT}.dtype=half", f"{ROLLOUT}.kv_cache_memory_bytes=null",
        f"{ACTOR}.kl_loss_type=low_var_kl+", f"{ACTOR}.optim.betas=[0,0.5]", "data.seed=0",
        "trainer.seed=4294967295", "trainer.save_freq=-1", "warmup.steps=0",
        f"{ROLLOUT}.val_kwargs.temperature=0", "data.generator_args.x=.inf",
    ],
)  # fmt: skip
def test_values_on_the_bounds_are_taken(override):
    check_each(load_config("quickstart", [override]))


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        (f"{ACTOR}.megatron.tensor_model_parallel_size", 99999999999, "2147483647 or less"),
        (f"{ROLLOUT}.n", 99999999999, "2147483647 or less"),
        (f"{ROLLOUT}.top_p", 1.5, "1 or less"),
        (f"{ROLLOUT}.top_p", 0, "above 0 and at most 1"),
        (f"{ROLLOUT}.n", 0, "It must be positive"),
    ],
)
def test_the_remedy_is_about_the_bound_that_was_passed(key, value, remedy):
    with pytest.raises(UsageError, match=f"DPA851 .*{remedy}"):
        check_each(load_config("quickstart", [f"{key}={value}"]))


def _numeric(section, prefix=""):
    hints = get_type_hints(section)
    for field in fields(section):
        key, kind = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(kind):
            yield from _numeric(kind, f"{key}.")
        elif kind in (int, float, int | None, float | None):
            yield key


def test_every_number_of_the_schema_has_a_range_or_takes_any():
    ranged = {f"{section}.{name}" for section, names in RANGES.items() for name in names}
    free = {f"{ACTOR}.entropy_coeff", f"{ROLLOUT}.temperature"}  # validate has words for the latter
    assert set(_numeric(Config)) == ranged | free


def test_the_lists_are_those_of_the_code_that_reads_them():
    assert KL_ESTIMATORS == ESTIMATORS
    assert set(DTYPES) == set(hf.DTYPES)
    config = load_config("quickstart")
    for key, choices in CHOICES.items():
        value = value_of(config, key)
        assert value in choices or (value is None and key in MAY_BE_NULL)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("data.size", ">= 1"),
        (f"{ROLLOUT}.top_p", "> 0, <= 1"),
        ("trainer.seed", ">= 0, <= 4294967295"),
        ("trainer.ray_object_store_bytes", ">= 78643200"),
        (f"{ACTOR}.optim.betas", "two numbers, >= 0, < 1"),
        ("trainer.resume_mode", "disable, auto, path"),
        ("trainer.run_dir", ""),
    ],
)
def test_the_page_says_what_a_key_takes(key, words):
    assert taken(key) == words
