"""What Megatron-core cannot do is said before anything starts; needs no megatron-core."""

import importlib.machinery
from dataclasses import replace

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron import layout
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions, options_from

MODEL = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "hidden_size": 64,
    "vocab_size": 43,
}


def check(options, world=4, dtype="float32", **model):
    layout.check_layout(options, MODEL | model, world_size=world, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        MegatronOptions(),
        MegatronOptions(tp=2, sp=True),
        MegatronOptions(tp=2, pp=2),
        MegatronOptions(pp=2, vpp=2, recompute="full"),
        MegatronOptions(cp=2, recompute="selective"),
        MegatronOptions(pp=4),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_layouts_that_work_pass(options, kind):
    check(options, model_type=kind, attention_bias=kind == "qwen2")


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        (MegatronOptions(tp=3), {}, r"tensor_model_parallel_size=3: the 3 ranks .* 4 ranks"),
        (MegatronOptions(pp=3), {}, r"pipeline_model_parallel_size=3: the 3 ranks"),
        (MegatronOptions(cp=3), {}, r"context_parallel_size=3: the 3 ranks"),
        (MegatronOptions(tp=4), {}, r"tensor_model_parallel_size: 2 key-value heads .* 4 ranks"),
        (
            MegatronOptions(tp=2),
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            r"tensor_model_parallel_size: 5 attention heads",
        ),
        (MegatronOptions(tp=2), {"intermediate_size": 95}, r"95 columns of the MLP"),
        (MegatronOptions(pp=4), {"num_hidden_layers": 6}, r"pipeline_model_parallel_size: 6 lay"),
        (MegatronOptions(pp=2, vpp=3), {}, r"virtual_pipeline_model_parallel_size: 4 layers"),
        (
            MegatronOptions(tp=2, pp=2, cp=2),
            {},
            r"tensor_model_parallel_size=2 x pipeline_model_parallel_size=2 x "
            r"context_parallel_size=2: the 8 ranks .* 4 ranks",
        ),
    ],
)
def test_sizes_that_do_not_divide_name_key_and_numbers(options, model, message):
    with pytest.raises(UsageError, match=rf"DPA854 actor_rollout_ref.actor.megatron.*{message}"):
        check(options, **model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MegatronOptions(vpp=2), r"virtual_pipeline_model_parallel_size: .*there is one"),
        (MegatronOptions(pp=2, vpp=1), r"virtual_pipeline_model_parallel_size: one chunk"),
        (MegatronOptions(sp=True), r"sequence_parallel: .*no tensor-parallel peer"),
        (MegatronOptions(recompute="some"), r"recompute_granularity: unknown 'some'"),
        (MegatronOptions(tp=0), r"tensor_model_parallel_size: 0 ranks"),
    ],
)
def test_values_that_cannot_work_name_their_key(options, message):
    with pytest.raises(UsageError, match=rf"DPA851 .*{message}"):
        check(options)


def test_half_precision_without_loss_scaling_is_refused():
    with pytest.raises(UsageError, match=r"DPA851 .*float16"):
        check(MegatronOptions(), dtype="float16")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "gemma3"}, r"model_type: 'gemma3' is not one of qwen2, qwen3, llama"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope of type 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope of type 'linear'"),
        ({"partial_rotary_factor": 0.5}, r"part of a head"),
        ({"use_sliding_window": True}, r"over a window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"over a window"),
        ({"attention_bias": True}, r"bias on the attention"),
        ({"mlp_bias": True}, r"bias in the MLP"),
        ({"hidden_act": "gelu"}, r"'gelu' is not silu"),
        ({"attention_dropout": 0.1}, r"dropout"),
    ],
)
def test_models_that_are_not_built_are_refused(model, message):
    with pytest.raises(UsageError, match=rf"DPA851 Megatron: .*{message}"):
        check(MegatronOptions(), **model)


def test_missing_megatron_core_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *_: None)
    with pytest.raises(UsageError, match=r"DPA858 megatron-core.*\[megatron\].*fsdp2"):
        check(MegatronOptions())


@pytest.mark.parametrize(
    ("options", "rows", "size", "message"),
    [
        (MegatronOptions(pp=2), 8, 8, r"1 micro-batches .* 2 pipeline stages.*to 4 or less"),
        (MegatronOptions(pp=4), 2, None, r"2 rows .* 4 pipeline stages.* Give each rank 4 rows"),
        (
            MegatronOptions(pp=2),
            1,
            1,
            r"2 pipeline stages.* 2 rows or more \(ppo_mini_batch_size\)",
        ),
        (MegatronOptions(pp=2, vpp=2), 6, 2, r"multiple of 2 micro-batches, .*3 micro-batches"),
        (MegatronOptions(pp=2, vpp=2), 7, None, r"multiple of 2 .*7 rows"),
    ],
)
def test_a_pipeline_that_cannot_be_filled_is_refused(options, rows, size, message):
    with pytest.raises(UsageError, match=rf"DPA854 .*{message}"):
        layout.check_micro_batches(options, rows=rows, size=size)


def test_the_keys_of_another_role_are_its_own():
    with pytest.raises(UsageError, match=r"critic\.megatron\.pipeline.* 1 micro-batch") as caught:
        layout.check_micro_batches(MegatronOptions(pp=2), rows=8, size=8, section="critic")
    assert "critic.ppo_micro_batch_size_per_gpu to 4" in caught.value.remedy


def test_micro_batches_that_fill_the_stages_pass():
    layout.check_micro_batches(MegatronOptions(), rows=1, size=1)
    layout.check_micro_batches(MegatronOptions(pp=2), rows=6, size=2)
    layout.check_micro_batches(MegatronOptions(pp=2, vpp=2), rows=8, size=2)


class Section:
    tensor_model_parallel_size = None
    pipeline_model_parallel_size = 2
    virtual_pipeline_model_parallel_size = None
    context_parallel_size = None
    sequence_parallel = None
    use_distributed_optimizer = False
    recompute_granularity = "full"


def test_null_takes_the_default():
    actor = MegatronOptions(tp=2, sp=True)
    assert options_from(Section(), defaults=actor) == replace(
        actor, pp=2, distributed_optimizer=False, recompute="full"
    )
    assert actor.model_ranks == 2
    assert actor.layout()["tp"] == 2
