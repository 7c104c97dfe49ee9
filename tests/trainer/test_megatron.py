"""What a configuration asks of Megatron-core and cannot have, by key, before anything starts."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.checkpoint import SEATS
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.models import TinyModel, write_tiny_model
from dataproto_audit.trainer.preflight import prepare
from dataproto_audit.trainer.sizes import data_parallel_size
from dataproto_audit.trainer.workers.spec import checkpoint_layout, worker_spec

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"


def prepared(tmp_path, *overrides, name="megatron_quickstart"):
    where = f"trainer.run_dir={tmp_path / 'run'}"
    return prepare(load_config(name, [where, *overrides]), tmp_path)


@pytest.mark.parametrize(
    ("name", "overrides", "chunks"),
    [
        ("megatron_quickstart", (), 1),
        ("megatron_pp", (), 1),
        ("megatron_tp2pp2", (), 1),
        ("megatron_quickstart", ("trainer.n_gpus_per_node=4",), 2),
        ("megatron_quickstart", (f"{REF}.strategy=fsdp2",), 1),
        ("quickstart", (f"{REF}.strategy=megatron",), 2),
        (
            "quickstart",
            (f"{REF}.strategy=megatron", f"{REF}.megatron.tensor_model_parallel_size=2"),
            2,
        ),
    ],
)
def test_ready_configurations_and_mixed_roles_pass(tmp_path, name, overrides, chunks):
    prepared(tmp_path, *overrides, name=name)
    assert data_parallel_size(load_config(name, overrides)) == chunks
    assert not (tmp_path / "run").exists()


TP, PP = f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.megatron.pipeline_model"


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        ((f"{TP}=3", "trainer.n_gpus_per_node=3"), "DPA854", f"{TP}: 4 attention heads"),
        (("trainer.n_gpus_per_node=1",), "DPA854", f"{TP}=2: the 2 ranks .* 1 ranks"),
        ((f"{PP}_parallel_size=4", "trainer.n_gpus_per_node=8"), "DPA854", "2 layers of the mod"),
        (
            (f"{PP}_parallel_size=2", f"{TP}=1", f"{ACTOR}.ppo_micro_batch_size_per_gpu=256"),
            "DPA854",
            "1 micro-batches .*ppo_micro_batch_size_per_gpu to 128 or less",
        ),
        (
            (f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2",),
            "DPA851",
            "virtual_pipeline_model_parallel_size: .*there is one",
        ),
        (
            (f"{ACTOR}.optim.name=sgd",),
            "DPA851",
            r"optim.name is sgd; .*use_distributed_optimizer=false",
        ),
        (
            (
                f"{TP}=1",
                f"{ACTOR}.megatron.context_parallel_size=2",
                "actor_rollout_ref.model.use_remove_padding=true",
            ),
            "DPA851",
            r"use_remove_padding packs rows, .*context_parallel_size=2",
        ),
        (
            (f"{REF}.megatron.tensor_model_parallel_size=1",),
            "DPA851",
            rf"{REF}.megatron.tensor_model_parallel_size is 1 and {TP} 2\. Both roles",
        ),
        (
            (f"{REF}.megatron.sequence_parallel=true", f"{REF}.megatron.context_parallel_size=1"),
            "DPA851",
            rf"{REF}.megatron.sequence_parallel is true and {ACTOR}.megatron.sequence_parallel "
            r"false\. Both",
        ),
        ((f"{ACTOR}.megatron.recompute_granularity=some",), "DPA851", r"recompute_granularity"),
        ((f"{TP}=0",), "DPA851", r"tensor_model_parallel_size is 0"),
        (
            ("actor_rollout_ref.model.dtype=float16",),
            "DPA851",
            rf"actor_rollout_ref.model.dtype is float16, and {ACTOR} runs on Megatron",
        ),
        (
            (
                f"{TP}=1",
                f"{PP}_parallel_size=2",
                "trainer.n_gpus_per_node=64",
                "warmup.batch_size=32",
            ),
            "DPA854",
            r"warmup.batch_size=32 gives each of 32 .* 64 or more",
        ),
    ],
)
def test_what_cannot_work_names_its_key(tmp_path, overrides, code, message):
    with pytest.raises(UsageError, match=f"{code} .*{message}"):
        prepared(tmp_path, *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("megatron_quickstart", [f"{REF}.strategy=fsdp2", f"{ACTOR}.use_kl_loss=true"],
         "3 rows of a step .* reference's 2"),
        ("quickstart",
         [f"{REF}.strategy=megatron", f"{ACTOR}.ulysses_sequence_parallel_size=2",
          "actor_rollout_ref.model.use_remove_padding=true"],
         "3 rows of a step .* reference's 2"),
        ("quickstart", [f"{ACTOR}.use_kl_loss=true"], "3 rows, which .* 2 ranks"),
        ("megatron_quickstart", [f"{ACTOR}.megatron.tensor_model_parallel_size=1"],
         "3 rows, which .* 2 ranks"),
        ("ppo_quickstart",
         [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2",
          "critic.strategy=fsdp2"],
         "3 rows, which .* critic's 2"),
    ],
)  # fmt: skip
def test_rows_divide_over_the_ranks_of_every_role_on_every_engine(tmp_path, name, overrides, said):
    odd = ["data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", "warmup.steps=0",
           "actor_rollout_ref.rollout.n=3"]  # fmt: skip
    with pytest.raises(UsageError, match=f"DPA854 .*{said}"):
        prepared(tmp_path, *overrides, *odd, name=name)
    even = [item.replace("rollout.n=3", "rollout.n=4") for item in odd]
    prepared(tmp_path, *overrides, *even, name=name)


def test_rows_of_a_reference_that_nothing_reads_need_not_divide(tmp_path):
    overrides = ("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", "warmup.steps=0",
                 "actor_rollout_ref.rollout.n=3", f"{ACTOR}.use_kl_loss=false")  # fmt: skip
    prepared(tmp_path, *overrides)


def test_a_reference_of_other_data_parallel_ranks_must_divide_the_rows(tmp_path):
    overrides = (
        f"{REF}.strategy=megatron",
        "trainer.n_gpus_per_node=6",
        f"{ACTOR}.ulysses_sequence_parallel_size=6",
        "actor_rollout_ref.model.use_remove_padding=true",
        "warmup.steps=0",
        "actor_rollout_ref.model.tiny.num_attention_heads=6",
        "actor_rollout_ref.model.tiny.num_key_value_heads=6",
    )
    with pytest.raises(UsageError, match=r"DPA854 512 rows .*reference's 6 data-parallel ranks"):
        prepared(tmp_path, *overrides, name="quickstart")


def test_an_unknown_architecture_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model", TinyModel(charset="digits"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"gemma3"'))
    with pytest.raises(UsageError, match=r"DPA851 Megatron: model_type: 'gemma3'"):
        prepared(tmp_path, f"actor_rollout_ref.model.path={folder}")


def test_sizes_of_the_layout_are_part_of_a_checkpoint():
    two = checkpoint_layout(worker_spec(load_config("megatron_quickstart"), model_path=""))
    assert (two["strategy"], two["tp"], two["pp"]) == ("megatron", 2, 1)
    piped = checkpoint_layout(worker_spec(load_config("megatron_pp"), model_path=""))
    assert two != piped
    mixed = load_config("megatron_quickstart", [f"{REF}.strategy=fsdp2"])
    assert checkpoint_layout(worker_spec(mixed, model_path=""))["ref_strategy"] == "fsdp2"
    assert two[SEATS] is True
    plain = checkpoint_layout(worker_spec(load_config("quickstart"), model_path=""))
    assert SEATS not in plain


def test_the_layout_of_every_megatron_role_is_part_of_a_checkpoint():
    """Ranks of another layout would else load each other's layers without a word."""

    def layout_of(name, *overrides):
        return checkpoint_layout(worker_spec(load_config(name, list(overrides)), model_path=""))

    ref, kl = f"{REF}.megatron", "actor_rollout_ref.actor.use_kl_loss=true"
    beside = (f"{REF}.strategy=megatron", kl)
    one, two = (
        layout_of("quickstart", *beside, f"{ref}.pipeline_model_parallel_size={size}")
        for size in (1, 2)
    )
    assert (one["ref_megatron"]["pp"], two["ref_megatron"]["pp"]) == (1, 2)
    assert one == layout_of("quickstart", *beside)
    same = layout_of("megatron_quickstart", kl)
    assert "ref_megatron" not in same
    own = layout_of("megatron_quickstart", kl, f"{ref}.use_distributed_optimizer=false")
    assert own["ref_megatron"]["distributed_optimizer"] is False
    critics = [
        layout_of("ppo_quickstart", "critic.strategy=megatron", *more)
        for more in ((), ("critic.megatron.use_distributed_optimizer=false",))
    ]
    assert critics[0] != critics[1]
    assert "critic_megatron" not in layout_of("ppo_quickstart")
