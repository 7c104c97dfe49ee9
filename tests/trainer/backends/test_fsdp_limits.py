"""What is refused before anything starts, with numbers and the key."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec
from dataproto_audit.trainer.backends.fsdp_limits import check_layout, check_model
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.sizes import data_parallel_size
from dataproto_audit.trainer.validate import validate

PACKED = ModelSpec("m", remove_padding=True)
QWEN = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2}
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("model", "options", "code", "fragment"),
    [
        (PACKED, {"fsdp_size": 3}, "DPA854", "fsdp_size=3 does not divide 4 ranks"),
        (PACKED, {"fsdp_size": 0}, "DPA854", "fsdp_size=0"),
        (PACKED, {"sequence_parallel": 3}, "DPA854", "size=3 does not divide 4 ranks"),
        (ModelSpec("m"), {"sequence_parallel": 2}, "DPA851", "use_remove_padding is off"),
        (PACKED, {"offload": True}, "DPA851", "offload_policy.*no accelerator"),
        (PACKED, {"reshard_after_forward": 3}, "DPA854", "no part of 4 ranks"),
        (PACKED, {"reshard_after_forward": 2, "fsdp_size": 2}, "DPA854", "no part of 2 ranks"),
        (PACKED, {"reshard_after_forward": "yes"}, "DPA851", "is 'yes'"),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks_is_refused(model, options, code, fragment):
    with pytest.raises(UsageError, match=rf"{code} .*{fragment}"):
        check_layout(model, FSDPOptions(**options), world_size=4, device="cpu")


def test_layouts_that_fit_are_taken():
    for options in ({}, {"fsdp_size": 2}, {"sequence_parallel": 4}, {"reshard_after_forward": 2}):
        check_layout(PACKED, FSDPOptions(**options), world_size=4, device="cpu")
    check_layout(PACKED, FSDPOptions(offload=True), world_size=4, device="cuda")


@pytest.mark.parametrize(
    ("changes", "shared", "fragment"),
    [
        ({"model_type": "gemma3"}, 1, "use_remove_padding is on.*'gemma3'"),
        ({"use_sliding_window": True, "sliding_window": 64}, 1, "sliding window"),
        ({"attention_dropout": 0.1}, 1, "attention_dropout 0.1"),
        ({}, 4, "cannot share 6 heads and 2"),
        ({"num_key_value_heads": 3}, 2, "cannot share 6 heads and 3"),
    ],
)
def test_a_model_that_packing_does_not_know_is_refused(changes, shared, fragment):
    options = FSDPOptions(sequence_parallel=shared)
    with pytest.raises(UsageError, match=rf"DPA85[14] .*{fragment}"):
        check_model(PACKED, options, QWEN | changes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "2"},
        {"num_attention_heads": None},
        {"rope_parameters": "x"},
        {"dtype": "x"},
    ],
)
def test_values_that_transformers_does_not_take_are_refused_for_other_types(wrong):
    sizes = {"model_type": "mistral", "vocab_size": 19, "hidden_size": 32}
    check_model(ModelSpec("m"), FSDPOptions(), sizes)
    with pytest.raises(UsageError, match=r"DPA852 config\.json .*does not take it") as caught:
        check_model(ModelSpec("m"), FSDPOptions(), sizes | wrong)
    assert "\n" not in str(caught.value)


def test_models_are_taken_where_the_switches_allow():
    for shared in (1, 2, 6):
        check_model(PACKED, FSDPOptions(sequence_parallel=shared), QWEN)
    check_model(ModelSpec("m"), FSDPOptions(), {"model_type": "gpt2"})
    sliding = QWEN | {"use_sliding_window": True, "sliding_window": 64}
    check_model(ModelSpec("m", fused_kernels=True), FSDPOptions(), sliding)


def test_ranks_that_share_a_sequence_count_once():
    packed = [f"{MODEL}.use_remove_padding=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    shared = load_config("quickstart", packed)
    validate(shared)
    assert data_parallel_size(shared) == 1
    assert data_parallel_size(load_config("quickstart")) == 2
    with pytest.raises(UsageError, match="does not divide 2 ranks"):
        validate(load_config("quickstart", [*packed[:1], f"{packed[1][:-1]}3"]))
    with pytest.raises(UsageError, match="use_remove_padding"):
        validate(load_config("quickstart", packed[1:]))
